"""Prepare the units of a source in several processes, with one progress bar."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tqdm import tqdm

from data_mixtures.prepare import Job, UnitPreparer, begin

_worker: _Worker | None = (
    None  # of this process, when it is one of a pool: pools hand over state in no other way
)


def prepare_units(job: Job, shard: int = 0, shards: int = 1, workers: int = 1) -> None:
    """Prepare units shard, shard + shards, … of a source in `workers` processes.

    Raises what a unit raises (the others end after their running unit); ValueError on impossible numbers.
    """
    if not 0 <= shard < shards or workers < 1:
        raise ValueError(
            f"shard is {shard}/{shards} with {workers} workers; shards go from 0/n to n-1/n, workers from 1"
        )
    begin(job)
    indices = range(shard, len(job.units), shards)
    context = multiprocessing.get_context("spawn")  # forking a process that has threads may hang
    read, tokens = context.Value("d", 0.0), context.Value("q", 0)
    total = sum(job.units[i].size for i in indices)
    with tqdm(
        total=total, desc=job.source.name, unit="B", unit_scale=True, disable=None, mininterval=1.0
    ) as bar:
        if workers == 1 or len(indices) < 2:
            worker = _Worker(job, read, tokens, lambda: _show(bar, read, tokens))
            for i in indices:
                worker.prepare(i)
            return
        with ProcessPoolExecutor(
            min(workers, len(indices)), context, initializer=_start_worker, initargs=(job, read, tokens)
        ) as pool:
            running: set[Future[None]] = {pool.submit(_prepare, i) for i in indices}
            try:
                while running:
                    done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    _show(bar, read, tokens)
                    for future in done:
                        future.result()
            except BrokenProcessPool as error:
                raise ValueError(
                    "a worker process was killed (out of memory?); run the same command again to continue, "
                    "with fewer workers or smaller shard_tokens"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)


class _Worker:
    """Prepares units and adds what it has done to the shared counters `read` (size) and `tokens`."""

    def __init__(
        self, job: Job, read: Any, tokens: Any, after_report: Callable[[], None] | None = None
    ) -> None:
        self._job = job
        self._preparer = UnitPreparer(job)
        self._read, self._tokens = read, tokens
        self._after_report = after_report

    def prepare(self, unit_index: int) -> None:
        size = self._job.units[unit_index].size
        last = 0.0

        def report(progress: float, tokens: int) -> None:
            nonlocal last
            with self._read.get_lock():
                self._read.value += (progress - last) * size
            with self._tokens.get_lock():
                self._tokens.value += tokens
            last = progress
            if self._after_report:
                self._after_report()

        self._preparer.run(unit_index, report)


def _start_worker(job: Job, read: Any, tokens: Any) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _Worker(job, read, tokens)


def _end_with_parent() -> None:
    """End this worker when the main process is killed; it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _prepare(unit_index: int) -> None:
    assert _worker is not None
    _worker.prepare(unit_index)


def _show(bar: tqdm, read: Any, tokens: Any) -> None:
    bar.update(read.value - bar.n)
    rate = tokens.value / max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(f"{tokens.value / 1e6:.1f}M tokens, {rate / 1e6:.2f}M tokens/s", refresh=False)
