"""How long a run takes on machines that fail: closed forms, and a simulation that checks them.

A run alternates between training and recovering. Training writes a checkpoint every `interval`, which blocks
for `save`; a failure, Poisson with the cluster's mean time between failures (MTBF), throws away what came after
the last checkpoint and costs `recovery`. The best interval is sqrt(2 x save x MTBF) (Young 1974, "A first order
approximation to the optimum checkpoint interval"), with Daly's higher-order correction (2006). Goodput is the
time that steps need divided by the time that passes. All times are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Failures:
    """A cluster as a source of interruptions, and what one costs."""

    mtbf: float  # of the whole cluster
    recovery: float  # from a failure to the first new step
    save: float  # that a checkpoint blocks training
    interval: float  # of training between two checkpoints


def young_daly(save: float, mtbf: float) -> float:
    """The interval of training between checkpoints that loses least; `mtbf` where a save takes half of it or more."""
    if save >= mtbf / 2:
        return mtbf
    ratio = math.sqrt(save / (2 * mtbf))
    return math.sqrt(2 * save * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - save


def expected_time(work: float, failures: Failures) -> float:
    """Expected seconds for `work` seconds of training, exactly for exponential failures (Daly 2006, equation 13).

    Each segment of `interval` and its save has to be got through without a failure.
    """
    segment, mtbf = failures.interval + failures.save, failures.mtbf
    return mtbf * math.exp(failures.recovery / mtbf) * math.expm1(segment / mtbf) * work / failures.interval


def goodput(failures: Failures) -> float:
    return 1.0 / expected_time(1.0, failures)


def simulate(work: float, failures: Failures, rng: np.random.Generator) -> tuple[float, int]:
    """One run, failure by failure: its seconds and its interruptions. Failures also strike during recovery."""
    now, done, interruptions = 0.0, 0.0, 0
    while True:
        until = rng.exponential(failures.mtbf)  # uptime until the next failure
        segment = failures.interval + failures.save
        left = math.ceil((work - done) / failures.interval - 1e-9)
        completed = min(int(until // segment), left)
        if completed == left:
            return now + (work - done) + left * failures.save, interruptions
        now += until
        done += completed * failures.interval
        interruptions += 1
        while (repair := rng.exponential(failures.mtbf)) < failures.recovery:
            now += repair
            interruptions += 1
        now += failures.recovery


def simulated_goodput(
    work: float, failures: Failures, runs: int, seed: int = 0
) -> tuple[float, float, float]:
    """Mean goodput of `runs` simulated runs, its standard error, and the mean number of interruptions."""
    rng = np.random.default_rng(seed)
    results = [simulate(work, failures, rng) for _ in range(runs)]
    values = np.array([work / seconds for seconds, _ in results])
    error = float(values.std(ddof=1) / math.sqrt(runs))
    return float(values.mean()), error, float(np.mean([count for _, count in results]))
