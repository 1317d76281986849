"""pass@k without bias, and how sure it is.

With n samples of a task, c of them right, the chance that k drawn without replacement hold a right one is
1 − C(n−c, k)/C(n, k); the benchmark's pass@k is its mean over the tasks.

The interval says how far the mean would move with other tasks of the same kind (95 %): the percentile bootstrap
over tasks, and Wilson's interval where each task is simply right or wrong, which stays sensible at 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # of 95 %
DRAWS = 10_000


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Of one task. Raises ValueError unless 0 ≤ right ≤ samples and 1 ≤ k ≤ samples."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} needs at least {k} samples and no more right ones; got {right} of {samples}"
        )
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def estimate(samples: int, right: Sequence[int], k: int) -> dict[str, float]:
    """{"value", "low", "high"} of pass@k over tasks with `right` right ones of `samples` each."""
    values = np.array([pass_at_k(samples, count, k) for count in right])
    mean = float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        low, high = wilson(int(values.sum()), len(values))
    else:
        generator = np.random.default_rng(0)
        drawn = generator.integers(0, len(values), (DRAWS, len(values)))
        low, high = (float(bound) for bound in np.quantile(values[drawn].mean(1), (0.025, 0.975)))
    return {"value": mean, "low": low, "high": high}


def wilson(right: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of `right` in `of`."""
    share = right / of
    middle = share + Z**2 / (2 * of)
    spread = Z * math.sqrt(share * (1 - share) / of + Z**2 / (4 * of**2))
    scale = 1 + Z**2 / of
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
