"""Which source gives sequence n: an exact, computable order for given weights.

With weights w_s (rationals that sum to 1) every prefix of the order is fair: after n sequences, source s has
given a count with |count - n·w_s| < 1.

How. The j-th sequence of source s (j = 1, 2, …) keeps that bound if and only if it stands at a position t
(1-based) with  ⌊(j-1)/w_s⌋ + 1 ≤ t ≤ ⌈j/w_s⌉.  So each sequence is a unit job with a release time and a
deadline, one job per position. Giving every source the fraction w_s of every position meets all windows
fractionally; jobs against positions is a bipartite problem, whose fractional solutions imply whole ones; and
for unit jobs with whole release times and deadlines "of the released jobs take the one with the earliest
deadline" finds a whole solution whenever there is one (Jackson 1955; the windows are those of P-fair
scheduling, Baruah et al. 1996).

Weights are decimals, so w_s = a_s/Q with whole numbers, and after Q positions every source has given exactly
a_s.
The order repeats with period Q, and one period is stored: a source and a rank for each of at most ~10⁶
positions.

A linear ramp of the weights from one recipe to another is a staircase of short steps. Step r gives source s a
whole number of sequences, chosen by the same rule (earliest deadline first, a step's length of jobs at a
time) so that at the end of every step each source is within one sequence of the integral of the straight
line. Inside a step the order is the fair one for that step's numbers. Tables of steps are made when needed
and forgotten again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

MAX_DECIMALS = 6
SUM_TOLERANCE = Decimal("1e-6")
MAX_SOURCES = 255
RAMP_STEP = 512  # sequences in a step of a ramp; making its table takes about half a millisecond
MAX_RAMP_STEPS = 1 << 14
BLOCK = 1 << 15


def exact_weights(weights: dict[str, float], where: str) -> dict[str, Fraction]:
    """The weights as rationals that sum to exactly 1, read as the decimals they are written as.

    Raises ValueError, naming all problems of `where` at once: no weights, a weight that is no positive number
    or has more than 6 decimals, a sum further than 1e-6 from 1.
    """
    problems = []
    decimals: dict[str, Decimal] = {}
    for source, weight in weights.items():
        try:
            value = Decimal(repr(weight) if isinstance(weight, float) else str(weight))
        except InvalidOperation:
            problems.append(f"weight of {source} is {weight!r}, which is no number")
            continue
        if not value.is_finite() or value <= 0:
            problems.append(f"weight of {source} is {weight}; it must be above 0 (remove the source instead)")
        elif -int(value.normalize().as_tuple().exponent) > MAX_DECIMALS:
            problems.append(
                f"weight of {source} is {weight}; at most {MAX_DECIMALS} decimals are kept exactly"
            )
        else:
            decimals[source] = value
    if not weights:
        problems.append("there are no weights")
    elif len(weights) > MAX_SOURCES:
        problems.append(f"there are {len(weights)} sources, at most {MAX_SOURCES} are possible")
    total = sum(decimals.values(), Decimal(0))
    if not problems and abs(total - 1) > SUM_TOLERANCE:
        problems.append(
            f"weights sum to {total}, not to 1 (within {SUM_TOLERANCE}); the difference is {total - 1}"
        )
    if problems:
        raise ValueError(f"{where}: " + "; ".join(problems))
    return {source: Fraction(value) / Fraction(total) for source, value in decimals.items()}


class Schedule:
    """The order of sources over one phase, for K sources numbered as given.

    `weights`: K rationals that sum to 1. `ramp`, if given: (weights to start from, length in sequences ≥ 1).
    """

    def __init__(
        self, weights: Sequence[Fraction], ramp: tuple[Sequence[Fraction], int] | None = None
    ) -> None:
        denominator = math.lcm(*(w.denominator for w in weights))
        self._period_counts = tuple(int(w * denominator) for w in weights)
        self._period_K = np.array(self._period_counts, dtype=np.int64)
        self._ramp_length = 0
        self._step = RAMP_STEP
        self._step_counts_RK = np.zeros((1, len(weights)), dtype=np.int64)
        if ramp is not None:
            start, self._ramp_length = ramp
            # Short enough that a step's straight chord is within a quarter of a sequence of the curved
            # integral.
            finest = max(1, min(RAMP_STEP, math.isqrt(2 * self._ramp_length)))
            self._step = max(finest, -(-self._ramp_length // MAX_RAMP_STEPS))
            self._step_counts_RK = _ramp_counts(start, weights, self._ramp_length, self._step)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sources and ordinals of positions (n,) int64 ≥ 0: position p is the ordinal-th sequence (from 0)
        that its source gives in this phase. Both int64 (n,).
        """
        sources, ordinals = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        after = positions >= self._ramp_length
        if after.any():
            period, place = np.divmod(positions[after] - self._ramp_length, self._period_K.sum())
            table_source, table_rank = self._period
            s = table_source[place].astype(np.int64)
            sources[after] = s
            ordinals[after] = self._step_counts_RK[-1, s] + period * self._period_K[s] + table_rank[place]
        for i in np.flatnonzero(~after):
            r, place = divmod(int(positions[i]), self._step)
            table_source, table_rank = fair_order(self._counts_of_step(r))
            sources[i] = table_source[place]
            ordinals[i] = self._step_counts_RK[r, sources[i]] + table_rank[place]
        return sources, ordinals

    def counts(self, n: int) -> np.ndarray:
        """int64 (K,): sequences that each source gives in the first n."""
        if n >= self._ramp_length:
            periods, place = divmod(n - self._ramp_length, int(self._period_K.sum()))
            done_K = self._step_counts_RK[-1] + periods * self._period_K
            order = self._period[0]
        else:
            r, place = divmod(n, self._step)
            done_K = self._step_counts_RK[r]
            order = fair_order(self._counts_of_step(r))[0]
        return done_K + np.bincount(order[:place], minlength=len(done_K))

    @cached_property
    def _period(self) -> tuple[np.ndarray, np.ndarray]:
        return fair_order(self._period_counts)

    def _counts_of_step(self, r: int) -> tuple[int, ...]:
        return tuple((self._step_counts_RK[r + 1] - self._step_counts_RK[r]).tolist())


@lru_cache(maxsize=64)
def fair_order(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The fair order of sum(counts) positions in which source s stands counts[s] times.

    Returns (source uint8, rank int32), one entry per position: the rank counts the earlier entries of that
    source.
    """
    length = sum(counts)
    source = np.empty(length, np.uint8)
    if length == 0:
        return source, np.empty(0, np.int32)
    # All jobs, by release time. A job is deadline * length + its number in this list, so that the smallest is
    # the most urgent, and of equally urgent ones the one that has waited longest.
    sources, releases, deadlines = [], [], []
    for s, a in enumerate(counts):
        j_N = np.arange(1, a + 1, dtype=np.int64)
        sources.append(np.full(a, s, dtype=np.uint8))
        releases.append(((j_N - 1) * length // max(a, 1)).astype(np.int32))
        deadlines.append(-(-j_N * length // max(a, 1)).astype(np.int32))
    release = np.concatenate(releases)
    by_release = np.argsort(release, kind="stable").astype(np.int32)
    released_by = np.searchsorted(release[by_release], np.arange(length, dtype=np.int32), side="right")
    jobs = np.concatenate(deadlines)[by_release].astype(np.int64) * length + np.arange(length)
    source_of_job = np.concatenate(sources)[by_release]
    ready: list[int] = []
    taken = 0
    for first in range(0, length, BLOCK):  # in blocks, since a list of Python numbers takes much memory
        order = []
        released_in_block = released_by[first : first + BLOCK].tolist()
        upcoming = jobs[taken : released_in_block[-1]].tolist()
        offset = taken
        for released in released_in_block:
            while taken < released:
                heapq.heappush(ready, upcoming[taken - offset])
                taken += 1
            order.append(heapq.heappop(ready) % length)
        source[first : first + BLOCK] = source_of_job[order]
    rank = np.empty(length, np.int32)
    for s, a in enumerate(counts):
        rank[source == s] = np.arange(a, dtype=np.int32)
    return source, rank


def _ramp_counts(start: Sequence[Fraction], end: Sequence[Fraction], length: int, step: int) -> np.ndarray:
    """int64 (R+1, K): sequences given by each source before each step of a ramp, and at its end."""
    unit = math.lcm(*(w.denominator for w in (*start, *end)))
    lines = [_Line(int(u * unit), int(v * unit), length) for u, v in zip(start, end, strict=True)]
    scale = 2 * length * unit
    given = [0] * len(lines)
    counts = [given]
    for n in [*range(step, length, step), length]:
        # Sequences due by now must be given; what room is left goes to those begun and due later, earliest
        # first.
        integrals = [line.integral(n) for line in lines]
        given = [max(before, integral // scale) for before, integral in zip(given, integrals, strict=True)]
        room = n - sum(given)
        begun = [s for s, integral in enumerate(integrals) if given[s] * scale < integral]
        if room < len(begun):
            due = {s: lines[s].reaches((given[s] + 1) * scale, step) for s in begun}
            begun.sort(key=lambda s: (due[s], s))
        for s in begun[:room]:
            given[s] += 1
        counts.append(given)
    return np.array(counts, dtype=np.int64)


class _Line:
    """The weight of one source in a ramp, from `u` to `v` (in some common unit) over `length` sequences."""

    def __init__(self, u: int, v: int, length: int) -> None:
        self._u, self._change, self._length = u, v - u, length

    def integral(self, n: int) -> int:
        """2·length times the integral of the weight over the first n sequences: a whole number."""
        return 2 * self._length * self._u * n + self._change * n * n

    def reaches(self, level: int, step: int) -> int:
        """The first multiple of `step` at which the integral is ≥ `level`; past the end all are equal."""
        last = -(-self._length // step)
        linear, root_arg = (
            2 * self._length * self._u,
            (2 * self._length * self._u) ** 2 + 4 * self._change * level,
        )
        if self.integral(self._length) < level or root_arg < 0:
            return last + 1
        guess = min(last, int(2 * level / (linear + math.sqrt(root_arg)) / step))
        while guess < last and self.integral(guess * step) < level:
            guess += 1
        while guess > 0 and self.integral(min((guess - 1) * step, self._length)) >= level:
            guess -= 1
        return guess
