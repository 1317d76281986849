"""`profile=on`: what a few steps spend time and memory on, written into the run directory.

The profiler runs for RECORDED steps of an attempt, once the first ones, which compile and allocate, are over; before
and after it costs nothing. Rank 0 writes profile/step-N/, where N is the first recorded step:

    trace.json.gz     for https://ui.perfetto.dev: operations, kernels, collectives
    ops.txt           operations and kernels by the time they take themselves
    memory.json       bytes in use over time, and the peak
    profile.png       both as a picture
    memory_snapshot.pickle   on a GPU: every allocation and where it was made, for https://pytorch.org/memory_viz

Bytes in use are those of tensors. On a CPU they are what lives between steps (weights, optimizer state) plus every
allocation and release that the profiler saw; on a GPU the allocator counts them.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torchtitan.tools.logging import logger

from train.run_dir import RunDir

SKIPPED = 5  # steps of an attempt before the profiler is started; its first step is not recorded
RECORDED = 3
M_MMAP_THRESHOLD = -3  # of malloc.h: bytes from which a block is mapped by itself
TOP = 30  # rows of ops.txt
SNAPSHOT_ENTRIES = 1_000_000  # allocations and releases that a memory snapshot may hold


class StepProfiler:
    """One rank's. Wrap each step in `step`."""

    def __init__(self, run: RunDir, device: torch.device, resident: Callable[[], int]):
        """resident gives the bytes of what lives between steps; asked on the CPU only."""
        self.run, self.device, self.resident = run, device, resident
        self.left = SKIPPED + RECORDED  # steps until the profile is written
        self.profile: Any = None
        self.first = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self.left == RECORDED + 1:
            self._start(number + 1)
        yield
        if self.left:
            self.left -= 1
            if self.profile is not None:
                self.profile.step()
                if self.left == 0:
                    self._write()

    def close(self) -> None:
        """The attempt ends: say so if it was too short to be profiled."""
        if self.left:
            logger.warning(f"profile=on: the attempt ended {self.left} steps before the profile was complete")
        if self.profile is not None:
            self.profile.stop()

    def _start(self, first: int) -> None:
        self.first = first
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _keep_large_blocks_apart()
        self.profile = profile(
            activities=activities,
            record_shapes=True,
            profile_memory=True,
            schedule=schedule(wait=0, warmup=1, active=RECORDED, repeat=1),
        )
        self.profile.start()

    def _write(self) -> None:
        finished, self.profile = self.profile, None
        finished.stop()
        folder = self.run.path / "profile" / f"step-{self.first}"
        folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(folder / "trace.json.gz"))
        averages = finished.key_averages()
        side = "cuda" if self.device.type == "cuda" else "cpu"
        table = averages.table(
            sort_by=f"self_{side}_time_total", row_limit=TOP, max_name_column_width=70, header=self._title()
        )
        (folder / "ops.txt").write_text(table + "\n")
        timeline = self._timeline(finished)
        peak = max((bytes_ for _, bytes_ in timeline), default=0)
        if side == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.memory._dump_snapshot(str(folder / "memory_snapshot.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        memory = {"peak_bytes": peak, "timeline": {"microseconds_and_bytes": timeline}}
        (folder / "memory.json").write_text(json.dumps(memory) + "\n")
        times = {
            row.key: getattr(row, f"self_{'device' if side == 'cuda' else side}_time_total")
            for row in averages
        }
        draw(times, timeline, self._title(), folder / "profile.png")
        logger.info(f"steps {self.first} to {self.first + RECORDED - 1} were profiled: {folder}")

    def _title(self) -> str:
        return f"steps {self.first} to {self.first + RECORDED - 1}, {self.device.type}"

    def _timeline(self, finished: profile) -> list[tuple[int, int]]:
        """Microseconds since the first recorded step, and bytes in use from then on."""
        result: Any = finished.profiler
        on_device = self.device.type == "cuda"
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in result.kineto_results.events()
            if event.name() == "[memory]" and (event.device_type().name == "CUDA") == on_device
        )
        used = (
            torch.cuda.memory_allocated(self.device) - sum(n for _, n in changes)
            if on_device
            else self.resident()
        )
        timeline = []
        for at, change in changes:
            used += change
            timeline.append(((at - changes[0][0]) // 1000, used))
        return timeline


def _keep_large_blocks_apart() -> None:
    """Have malloc give tensors pages of their own, and take these back at once.

    The profiler's many small records would otherwise come to lie in what tensors leave, where no tensor of the same
    size then fits: a run's resident memory grew by 3 GB a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**20)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this process's storages of the tensors, a shared one counted once."""
    storages = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def draw(times: dict[str, float], timeline: list[tuple[int, int]], title: str, file: Path) -> None:
    """The operations that take longest, by their own time in microseconds, and bytes in use over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 4))
    times = {key: value for key, value in times.items() if not key.startswith("ProfilerStep")}
    total = sum(times.values()) or 1.0
    longest = sorted(times, key=lambda key: -times[key])[:12]
    left.barh([key[:40] for key in longest], [100 * times[key] / total for key in longest])
    left.invert_yaxis()
    left.tick_params(axis="y", labelsize=7)
    left.set_xlabel("share of the time (%)")
    right.plot([at / 1e6 for at, _ in timeline], [used / 2**20 for _, used in timeline], linewidth=0.7)
    right.set_xlabel("seconds")
    right.set_ylabel("memory of tensors (MiB)")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.25)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, dpi=110)
