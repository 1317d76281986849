"""Ends an attempt whose steps have stopped, after writing where every rank stands.

A rank that is stuck (a lost collective, a dead file system, a stopped process) makes all ranks wait, silently,
until a collective's timeout. Each rank's watchdog is a thread that compares the running step with the median
of the steps before. When it is a hang, the thread writes the Python stacks of all its rank's threads to
logs/<attempt>/stacks-rank-N.txt and the record of its last collectives beside it, gives the other ranks time to do
the same, records the attempt's end, and exits with EXIT_HANG. A rank without a stack file is the one to look at.

Only training steps are watched: saves and validation have no typical time, and the first steps compile.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
from torchtitan.tools.logging import logger

from train.config import ClusterConfig
from train.run_dir import RunDir

EXIT_HANG = 5
WARM_STEPS = 5  # steps before the median is trusted
GRACE_SECONDS = 5.0  # for the other ranks' stacks


class Watchdog:
    """One rank's. Wrap each training step in `step`; the thread starts with the first one."""

    def __init__(self, cluster: ClusterConfig, run: RunDir, attempt: int, rank: int):
        self.factor, self.least = cluster.hang_factor, cluster.hang_seconds
        self.run, self.attempt, self.rank, self.ranks = run, attempt, rank, cluster.ranks
        self.taken: deque[float] = deque(maxlen=200)
        self.current: tuple[int, float] | None = None  # the running step and when it began
        self.thread: threading.Thread | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self.thread is None and self.factor:
            self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self.thread.start()
        begun = time.monotonic()
        self.current = number, begun
        try:
            yield
        finally:
            self.current = None
            self.taken.append(time.monotonic() - begun)

    def rest(self) -> None:
        """Stop watching the running step: it has failed and writes what reproduces it."""
        self.current = None

    def limit(self) -> float | None:
        """Seconds after which a step is a hang; None while too few have been seen."""
        taken = list(self.taken)
        if len(taken) < WARM_STEPS:
            return None
        return max(self.least, self.factor * statistics.median(taken))

    def _watch(self) -> None:
        while True:
            time.sleep(0.2 if self.least < 10 else 2.0)
            current, limit = self.current, self.limit()
            if current is not None and limit is not None and time.monotonic() - current[1] > limit:
                self._end(current[0], limit)

    def _end(self, step: int, limit: float) -> None:
        typical = statistics.median(self.taken)
        logger.error(
            f"step {step} has not ended in {limit:.0f} s (median {typical:.2f} s): writing the stacks"
        )
        folder = self.run.logs / str(self.attempt)
        with (folder / f"stacks-rank-{self.rank}.txt").open("w") as stream:
            stream.write(f"rank {self.rank} on {os.uname().nodename}, step {step}, {limit:.0f} s\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        write_flight_recorder(folder / f"flight-recorder-rank-{self.rank}.pickle")
        time.sleep(GRACE_SECONDS)
        silent = [r for r in range(self.ranks) if not (folder / f"stacks-rank-{r}.txt").exists()]
        reason = f"step {step} did not end in {limit:.0f} s (median {typical:.2f} s); stacks are in {folder}"
        if silent:
            reason += f"; none from rank {', '.join(map(str, silent))}"
        if not self.run.attempt_ended(self.attempt):
            self.run.end_attempt(self.attempt, "failed", step - 1, reason=reason)
        logger.error(reason)
        os._exit(EXIT_HANG)


def write_flight_recorder(file: Path) -> None:
    """The last collectives of this rank, pickled, as torch's flight-recorder analyser reads them."""
    recorder = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"  # NCCL's, gloo's
    file.write_bytes(getattr(import_module("torch._C._distributed_c10d"), recorder)())
