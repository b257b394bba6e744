"""Objects travel between ranks as files."""

import pytest

from memfit.ghost.ranks.object_exchange_files import ExchangedObjects


def ranks(folder):
    return [ExchangedObjects(lambda: (folder, folder), rank) for rank in (0, 1)]


def test_calls_are_matched_by_their_order(tmp_path):
    sender, receiver = ranks(tmp_path)
    for sent in ({"width": 3}, ["second"]):
        sender.leave(sender.key("send", "0", 0, 1), sent)
    assert receiver.receive(receiver.key("send", "0", 0, 1), 0) == {"width": 3}
    assert receiver.receive(receiver.key("send", "0", 0, 1), 0) == ["second"]
    assert not list(tmp_path.glob("w*"))  # nothing was asked for


def test_what_cannot_be_pickled_is_not_left(tmp_path):
    sender, receiver = ranks(tmp_path)
    sender.leave(sender.key("send"), lambda: None)
    (tmp_path / "failed-0").write_text("it ended")
    with pytest.raises(LookupError, match="it ended"):
        receiver.receive(receiver.key("send"), 0)
    assert (tmp_path / "wanted-0").exists()


def test_what_awaits_a_third_rank_is_left_in_order_once_this_one_is_wanted(tmp_path):
    sender, receiver = ranks(tmp_path)
    awaited = []
    for key in ("first", "second"):
        sender.leave_awaited(key, lambda key=key: awaited.append(key) or key.upper())
    assert not awaited
    receiver.want(0)
    sender.leave_awaited("third", lambda: "THIRD")
    assert awaited == ["first", "second"]
    assert [receiver.receive(key, 0) for key in ("first", "second", "third")] == ["FIRST", "SECOND", "THIRD"]
    assert receiver.sources == {0}


def test_nothing_is_counted_while_pytorch_agrees_by_itself(tmp_path):
    sender, receiver = ranks(tmp_path)
    with sender.quiet():
        assert not sender.key("broadcast", "0", 0)
    assert sender.key("broadcast", "0", 0) == receiver.key("broadcast", "0", 0)


def test_a_rank_waits_only_while_the_other_runs(tmp_path):
    _, receiver = ranks(tmp_path)
    (tmp_path / "failed").write_text("the ranks 0, 1 wait for each other")
    with pytest.raises(LookupError, match="wait for each other"):
        receiver.wait_until(lambda: False, 0)
    assert not (tmp_path / "waits-1").exists()
