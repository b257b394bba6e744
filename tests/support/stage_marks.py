"""Orders of the marks of a run as scripts and frameworks make them, and the stage after each mark."""

from memfit.records import MarkKind, SaveKind, Stage, UntrainedForwardReason

LETTERS = {
    "b": (MarkKind.BATCH, 0),
    "e": (MarkKind.LOADER_END, 0),
    "B": (MarkKind.BATCH, 1),
    "E": (MarkKind.LOADER_END, 1),
    "f": (MarkKind.FORWARD, 0),
    "v": (MarkKind.EVALUATION, UntrainedForwardReason.EVALUATES),
    "m": (MarkKind.EVALUATION, UntrainedForwardReason.EVAL_MODE),
    "n": (MarkKind.EVALUATION, UntrainedForwardReason.NO_GRADIENTS),
    "p": (MarkKind.EVALUATION, UntrainedForwardReason.NO_PARAMETERS),
    "w": (MarkKind.BACKWARD, 0),
    "s": (MarkKind.TRAINING_STEP, 0),
    "d": (MarkKind.SAVE, SaveKind.STATE),
    "t": (MarkKind.SAVE, SaveKind.FILE),
    "a": (MarkKind.SAVE, SaveKind.FILE_BESIDE),
    "l": (MarkKind.LOAD, 0),
}
NAMES = {
    "-": Stage.SETUP,
    "L": Stage.LOADING,
    "T": Stage.TRAINING,
    "V": Stage.EVALUATION,
    "S": Stage.SAVING,
}
ORDERS = [
    ("bfwsbfwse", "TTTTTTTTT"),
    ("bfwsbfwseBfvBfvEbfws", "TTTTTTTTTVVVVVVVTTTT"),  # two loaders, and a second epoch
    ("bfwsBfvBfvEbfws", "TTTTVVVVVVVTTTT"),  # in the middle of an epoch
    ("bfwseBfBfE", "TTTTTVVVVV"),  # neither eval() nor no_grad()
    ("bfwsBfBfEbfwse", "TTTTVVVVVTTTTT"),
    ("bfmwsbfmws", "TTTTTTTTTT"),  # trained in eval mode
    ("fwsfmfmfws", "TTTVVVVTTT"),  # evaluated with gradients, without a loader
    ("fwsfvfvfws", "TTTVVVVTTT"),
    ("bfnfwsbfnfws", "TTTTTTTTTTTT"),  # a teacher, before each forward
    ("bffnwsbffnws", "TTTTTTTTTTTT"),  # after it
    ("bfwseBfnBfnE", "TTTTTVVVVVVV"),  # the evaluation of an average
    ("bffwsbffwse", "TTTTTTTTTTT"),  # two forwards for each backward
    ("lbfws", "LTTTT"),
    ("bfwsdtbfws", "TTTTSSTTTT"),
    ("bfwsdbfwsd", "TTTTTTTTTT"),  # an average of the state, in memory
    ("bfwseddt", "TTTTTSSS"),
    ("bfwsdbfawsbfwse", "TTTTTTTTTTTTTTT"),  # a thread writes what was copied
    ("bfwsdabfws", "TTTTSSTTTT"),  # at once
    ("fwsfntfwsfntfws", "TTTVVSTTTVVSTTT"),  # evaluated without a loader, and without eval()
    ("Bfvlfws", "VVVLTTT"),
    ("bfbfbfewsbfbfe", "TTTTTTTTTVVVVV"),  # a gradient of the whole pass
    ("fwsdtfws", "TTTSSTTT"),  # without a loader
    ("dtbfws", "--TTTT"),  # before the first forward
    ("bbfwsb", "TTTTTT"),  # batches that the script skips
    ("fnfn", "VVVV"),  # inference
    ("bffpwsBfmfpBfmfpEbffpws", "TTTTTTVVVVVVVVVVVTTTTTT"),  # with the module of a loss
    ("bffpwsBfmfpBfm", "TTTTTTVVVVVVVV"),  # memory ran out
    ("bfwseBfBf", "TTTTTVVVV"),
    ("bfwsebf", "TTTTTTT"),
    ("bfBfwsbfBfwseE", "TTTTTTTTTTTTTT"),  # two loaders side by side
    ("bfwsBfBfbfws", "TTTTVVVVTTTT"),  # an evaluation that is broken off
    ("bbfwsbfwsbefws", "TTTTTTTTTTTTTT"),  # accelerate reads one batch ahead
    ("bbfwsBBfvBEfvdtbefws", "TTTTTVVVVVVVVSSTTTTT"),  # and the last after an evaluation
    ("BBfvBEfvbbbbefwfwfws", "VVVVVVVVTTTTTTTTTTTT"),  # all batches of an update
    ("bfwseBBfBfBEf", "TTTTTVVVVVVVV"),  # neither eval() nor no_grad()
    ("bbeffws", "TTTTTTT"),
    ("bbfwsbeBfvE", "TTTTTTTVVVV"),  # the script has skipped a batch, and is not ahead
    ("bbfwsbedtfv", "TTTTTTTSSVV"),
]
