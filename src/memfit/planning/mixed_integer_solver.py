"""Mixed-integer programs, built column by column and row by row, and solved with HiGHS."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

INFINITY = float(highspy.kHighsInf)
_EFFORT, _LEAST = 4_000_000, 120
"""Checks of its limits after which HiGHS is stopped: so many over the number of factors in the rows, and at
least. HiGHS checks them after each linear program that it solves outside of heuristics. For 24 layers of a
transformer, that takes up to eight seconds of one core."""
_UNSOLVABLE = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


@dataclass(frozen=True, slots=True)
class MixedIntegerSolution:
    """The best values found."""

    values: tuple[float, ...]
    """By column; empty if none were found with the effort."""
    objective: float
    """Of these; infinite without them."""
    bound: float
    """No solution has a smaller objective."""


class MixedIntegerProgram:
    """Minimizes the cost of its columns, which are at least 0, under its rows.

    >>> program = MixedIntegerProgram()
    >>> apples = program.column(cost=3.0, integral=True, upper=10.0)
    >>> _ = program.row({apples: 2.0}, 5.0, INFINITY)
    >>> program.minimize().objective
    9.0
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._integral: list[bool] = []
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    def column(self, cost: float = 0.0, *, integral: bool = False, upper: float = 1.0) -> int:
        """Add a column, and return its number."""
        self._costs.append(cost)
        self._uppers.append(upper)
        self._integral.append(integral)
        return len(self._costs) - 1

    def row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        """Add a row: the columns in ``terms`` times their factors add up to ``lower`` to ``upper``."""
        self._rows.append((terms, lower, upper))

    def minimize(
        self,
        only: int | None = None,
        *,
        fixed: Mapping[int, float] | None = None,
        gap: float = 0.0,
        cost_gap: float = 0.0,
        enough: float = INFINITY,
        effort: float = 1.0,
    ) -> MixedIntegerSolution | None:
        """Return the best solution found with limited work; None if there is none.

        Args:
            only: a column to minimize instead of the cost.
            fixed: values of columns.
            gap: how far from the bound the cost of a solution may be, relative to it.
            cost_gap: how far from the bound it may be, in units of cost; the larger of the two counts.
            enough: a bound at which HiGHS stops, because a solution that is known already is close to it.
            effort: how much of the usual work HiGHS may do.
        """
        columns = len(self._costs)
        lower, upper = np.zeros(columns), np.array(self._uppers)
        for column, value in (fixed or {}).items():
            lower[column] = upper[column] = value
        costs = np.array(self._costs) if only is None else np.arange(columns) == only
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = columns, len(self._rows)
        program.col_cost_, program.col_lower_, program.col_upper_ = costs.astype(float), lower, upper
        program.integrality_ = [
            highspy.HighsVarType.kInteger if each else highspy.HighsVarType.kContinuous
            for each in self._integral
        ]
        program.row_lower_ = np.array([low for _, low, _ in self._rows])
        program.row_upper_ = np.array([high for _, _, high in self._rows])
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(terms) for terms, _, _ in self._rows)])
        matrix.index_ = np.array([column for terms, _, _ in self._rows for column in terms])
        matrix.value_ = np.array([factor for terms, _, _ in self._rows for factor in terms.values()])
        highs = make_highs_solver()
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("mip_abs_gap", cost_gap)
        highs.passModel(program)
        most = effort * max(_LEAST, _EFFORT // max(1, len(matrix.index_)))
        _limit(highs, most, enough)
        highspy.Highs.resetGlobalScheduler(True)  # threads of a solver with more of them make HiGHS refuse
        try:
            highs.run()
        finally:
            highspy.Highs.resetGlobalScheduler(True)
        if highs.getModelStatus() in _UNSOLVABLE:
            return None
        info, solution = highs.getInfo(), highs.getSolution()
        objective = float(info.objective_function_value)
        bound = float(info.mip_dual_bound) if any(self._integral) else objective
        return MixedIntegerSolution(
            tuple(solution.col_value) if objective < INFINITY else (), objective, bound
        )


def make_highs_solver() -> Any:
    """Return HiGHS, silent and on one thread: with more, which of equal solutions it finds varies."""
    with _quiet_stdout():  # the first solver of a process prints HiGHS's version
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("mip_pscost_minreliable", 0)  # strong branching would take most of the work
        highs.setOptionValue("mip_allow_restart", False)  # each restart runs the heuristics of the root again
    return highs


def _limit(highs: Any, most: float, enough: float) -> None:
    """Have a solver stop after so many checks of its limits, or once its bound is this high."""
    checks = 0

    def check(event: Any) -> None:
        nonlocal checks
        checks += 1
        if checks > most or event.data_out.mip_dual_bound >= enough:
            event.interrupt()

    highs.cbMipInterrupt.subscribe(check)


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Send what C code prints on standard output nowhere."""
    sys.stdout.flush()
    kept, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(silence)
