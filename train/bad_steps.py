"""Steps whose loss is not finite or spikes: what is known of them, and which are passed over. Imports no torch.

A bad step ends the attempt before the weights change, with what reproduces it (trainer.py), and is recorded in
the run's bad_steps.jsonl. The next attempt resumes from the last checkpoint and meets it again. A step that was
bad once may have been the hardware's fault; one that is bad twice is the data's or the recipe's. So from its
second time on, with `stability.skip_steps`, the steps up to it are passed over: their sequences are read and
counted as read, and the weights stay as they are. Position, learning rate and the audit are those of the plan.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter, deque

from train.config import StabilityConfig
from train.run_dir import RunDir, append_line, read_lines


class BadSteps:
    """The bad steps of one run, and a judge of the next ones."""

    def __init__(self, config: StabilityConfig, run: RunDir, attempt: int):
        self.config, self.run, self.attempt = config, run, attempt
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.passed_over = passed_over(config, run)

    def judge(self, loss: float) -> str | None:
        """What is wrong with a step's loss, or None. All ranks give the same answer to the same losses."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        threshold = self.spike_threshold()
        if threshold is not None and loss > threshold:
            return f"loss {loss:.4f} spikes above {threshold:.4f}, the limit by the last {len(self.losses)} steps"
        self.losses.append(loss)
        return None

    def spike_threshold(self) -> float | None:
        """Median plus `spike_sigmas` standard deviations, both robust; None while too few losses are known."""
        if not self.config.spike_sigmas or len(self.losses) < self.config.spike_window:
            return None
        middle = statistics.median(self.losses)
        deviation = 1.4826 * statistics.median(abs(loss - middle) for loss in self.losses)
        return middle + self.config.spike_sigmas * deviation

    def state(self) -> str:
        """The losses known, for the checkpoint: the next attempt must judge as this one would have."""
        return json.dumps(list(self.losses))

    def load_state(self, state: str) -> None:
        self.losses = deque(json.loads(state), maxlen=self.config.spike_window)

    def record(self, step: int, reason: str) -> None:
        line = {"step": step, "attempt": self.attempt, "time": time.time(), "reason": reason}
        append_line(self.run.bad_steps, line)


def passed_over(config: StabilityConfig, run: RunDir) -> frozenset[int]:
    """The steps to pass over: `skip_steps` of them up to each that was bad in two attempts, `max_skips` windows."""
    if not config.skip_steps:
        return frozenset()
    seen = {(line["step"], line["attempt"]) for line in read_lines(run.bad_steps)}
    times = Counter(step for step, _ in seen)
    windows = sorted(step for step, count in times.items() if count >= 2)[: config.max_skips]
    return frozenset(
        step for last in windows for step in range(max(1, last - config.skip_steps + 1), last + 1)
    )
