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
