"""Each rank computes its share of a batch inside the model's call: losses and gradients of one process."""

CASES = "support.forward_of_rank_cases"


def test_losses_and_gradients_are_those_of_one_process(two_ranks):
    """Of pairs of samples, too; with uneven shares, and a batch of fewer samples than ranks."""
    for found in two_ranks.run("compared", module=CASES):
        assert len(found) == 30
        assert max(found.values()) <= 1e-13, found


def test_models_one_after_the_other_and_inputs_get_the_gradients_of_the_whole_batch(two_ranks):
    for found in two_ranks.run("chained", module=CASES):
        assert max(found.values()) <= 1e-14, found


def test_ranks_drop_other_values_and_go_on_with_the_same_random_numbers(two_ranks):
    (dropped, plain), (dropped_there, plain_there) = two_ranks.run("random_numbers", module=CASES)
    assert dropped == dropped_there
    assert dropped[:2] == (False, False)
    assert plain == plain_there
    assert plain[:2] == (True, True)


def test_what_cannot_be_divided_is_refused_on_every_rank(two_ranks):
    one, other = two_ranks.run("refused", module=CASES)
    assert one.keys() == other.keys()
    for name, says in {
        "mixes samples": "sharding: the model combines samples with each other",
        "no batch": "sharding: Linear is passed a Tensor without a row for each sample",
        "two means": "sharding: the model's loss adds means over different numbers of elements",
        "a count": "sharding: the model returns a number, or multiplies or divides its loss by one, that it",
        "second derivative": "sharding: a second derivative (create_graph=True) needs the graphs of all",
    }.items():
        assert one[name][0].startswith(says), one[name]
        assert one[name][1] == [one[name][0]] * (name != "second derivative")
        assert "slice" not in one[name][0]
    assert one["batch norm"] == 1
