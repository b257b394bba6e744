"""What must be the same on all ranks: its digest, and a report of the first difference.

Ranks compare digests, a number each, in an exchange that they make anyway. Only if these differ do they
exchange the facts themselves, to report which of them differs, and on which ranks.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from memfit.report.terminal.ranks import listed

Facts = Mapping[str, str]
"""Values by name, each as it is written in an error."""
_DIGEST_BYTES = 6  # exact in a float64
_SHOWN = 4  # values of one fact


def digest(call: str, facts: Facts) -> float:
    """Return a number that is the same for the same facts, and almost surely another for others."""
    text = "\0".join([call, *(f"{name}\0{value}" for name, value in facts.items())])
    return float(int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()))


def difference(ranks: Sequence[tuple[str, Facts]]) -> str:
    """Return a message about the first difference between ranks.

    Args:
        ranks: of each rank, the call that it is in, and its facts.

    >>> print(difference([("engine.step", {"lr": "0.1"}), ("engine.step", {"lr": "0.2"})]))
    The ranks have different settings: lr is 0.1 on rank 0, and 0.2 on rank 1. Pass the same on all ranks.
    """
    calls = [call for call, _ in ranks]
    if len(set(calls)) > 1:
        return (
            f"The ranks are in different calls: {_by_value(calls)}. All ranks must make the same calls "
            "of the engine, in the same order. Check conditions such as `if rank == 0`."
        )
    names = dict.fromkeys(name for _, facts in ranks for name in facts)
    for name in names:
        values = [facts.get(name, "not set") for _, facts in ranks]
        if len(set(values)) > 1:
            return (
                f"The ranks have different settings: {name} is {_by_value(values)}. Pass the same on all "
                "ranks."
            )
    return f"The ranks have the same settings in different orders: {', '.join(list(names)[:_SHOWN])}, ..."


def _by_value(values: Sequence[str]) -> str:
    """Return which values there are, and on which ranks, as a part of a sentence."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    written = [
        f"{value} on rank{'s' * (len(own) > 1)} {listed(tuple(own))}"
        for value, own in list(ranks.items())[:_SHOWN]
    ]
    if len(ranks) > _SHOWN:
        written.append("others on other ranks")
    return f"{', '.join(written[:-1])}, and {written[-1]}"
