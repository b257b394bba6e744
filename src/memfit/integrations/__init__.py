"""The trainers that people use, under a plan: who divides the loss, synchronizes the ranks and steps.

    memfit.transformers   Trainer does all three; memfit sets its arguments, and applies the rest of the plan
    memfit.accelerate     memfit divides; Accelerate synchronizes; the script's loop steps
    memfit.lightning      memfit corrects Lightning's divisor; Lightning synchronizes and steps
    memfit.mmengine       memfit divides, in an optimizer wrapper; MMEngine synchronizes and steps
    pytest_plugin         ``@pytest.mark.fits("8GiB")``: the test itself runs on the ghost

What a trainer cannot do is refused by name, and so is a second divisor. Each file needs the extra of its name
(``pip install 'memfit[lightning]'``), and is imported when ``memfit.lightning`` is first used.
"""
