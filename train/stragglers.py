"""Which ranks are slow: each rank's own time in a step, gathered when a step is logged.

All ranks take the same time for a step, because each waits for the others in every layer's gather. What tells a slow
rank from those that wait for it is the time between collectives: reading its batch, the blocks' forward passes, the
optimizer. A block's forward is timed inside FSDP's hooks, after its weights have been gathered; the backward pass,
whose collectives overlap with it, is not timed, since what slows one pass slows the other. On a GPU the blocks are
timed by events of the compute stream, read when the step has waited for the device anyway.

Nothing is exchanged in a step. Where one is logged, ranks gather three numbers each, and rank 0 writes all of them to
stragglers.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from train.run_dir import RunDir

WINDOW = 200  # steps that percentiles are of
QUANTILES = (0.50, 0.95, 0.99)


@dataclass(frozen=True)
class RankTimes:
    """Percentiles of one rank's own seconds in a step, over its last `WINDOW` steps."""

    rank: int
    node: str
    p50: float
    p95: float
    p99: float


class OwnTime:
    """This rank's. Give it the blocks after they have been parallelised: its hooks must run inside FSDP's."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device, node: str):
        self.device = device
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self.begun: Any = None
        self.spans: list[tuple[Any, Any]] = []  # begin and end of each block's forward in the running step
        for block in blocks:
            block.register_forward_pre_hook(self._begin)  # pyright: ignore[reportAttributeAccessIssue]
            block.register_forward_hook(self._end, prepend=True)  # pyright: ignore[reportAttributeAccessIssue]
        self.nodes: list[str] = [node]
        if dist.get_world_size() > 1:
            self.nodes = [""] * dist.get_world_size()
            dist.all_gather_object(self.nodes, node)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # A compiled block's hooks run uncompiled, but what they call would be compiled without the decorator.
    @torch.compiler.disable
    def _begin(self, block: nn.Module, args: Any) -> None:
        if block.training:
            self.begun = self._now()

    @torch.compiler.disable
    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if block.training:
            self.spans.append((self.begun, self._now()))

    def step(self, other: float) -> None:
        """A step is over: `other` seconds are the rank's own besides the blocks. The device has been waited for."""
        # A block computed again in the backward pass may stop before its end.
        spans = [(begin, end) for begin, end in self.spans if end is not None]
        if self.device.type == "cuda":
            blocks = sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
        else:
            blocks = sum(end - begin for begin, end in spans)
        self.spans.clear()
        self.seconds.append(blocks + other)

    def gather(self) -> list[RankTimes]:
        """Every rank's percentiles, by rank. A collective."""
        own = [quantile(self.seconds, q) for q in QUANTILES]
        mine_Q = torch.tensor(own, dtype=torch.float32, device=self.device)
        all_RQ = torch.empty(len(self.nodes), len(QUANTILES), dtype=torch.float32, device=self.device)
        if len(self.nodes) > 1:
            dist.all_gather_into_tensor(all_RQ.view(-1), mine_Q)
        else:
            all_RQ[0] = mine_Q
        rows = zip(self.nodes, all_RQ.tolist(), strict=True)
        return [RankTimes(rank, node, *values) for rank, (node, values) in enumerate(rows)]


def node_name() -> str:
    """As the scheduler calls it, for people exclude nodes by that name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest of the values that a share `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summary(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """The ranks' row of metrics: the median and the slowest of their medians, and which the slowest is."""
    slowest = max(ranks, key=lambda times: times.p50)
    return {
        "ranks/own_median": statistics.median(times.p50 for times in ranks),
        "ranks/own_slowest": slowest.p50,
        "ranks/slowest": slowest.rank,
    }


def write_report(run: RunDir, step: int, ranks: Sequence[RankTimes]) -> None:
    """stragglers.json: the ranks, slowest first. Not synced to the disk: the next logged step writes it again."""
    ordered = sorted(ranks, key=lambda times: -times.p50)
    report = {
        "step": step,
        "median": summary(ranks)["ranks/own_median"],
        "ranks": [asdict(r) for r in ordered],
    }
    temporary = run.stragglers.with_name(f".{run.stragglers.name}.tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(run.stragglers)
