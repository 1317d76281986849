"""Schedules of communication between the processes of one decoding job, with a simulated one-way delay.

| schedule | when a module's sum over all processes is added |
|---|---|
| TP | before the next module starts: standard tensor parallelism |
| Ladder | one module later |
| DTP | two layers, that is four modules, later, as the Laneformer's architecture says |

All three run on the exchange of model/exchange.py. "sleep": every module sleeps for a fixed time and sends a vector,
so that processes do not share cores, and the schedules differ by their waiting alone. "weights": the decoder of
model/delayed_tp.py with real weights; TP is the same decoder with broadcast_delay = 0.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from model.config import Kind, LaneformerConfig
from model.decode import generate
from model.delayed_tp import Awaited, LaneGroup, Part
from model.exchange import Exchange, GroupExchange, SocketExchange
from model.hf import internal_shapes
from model.kv_cache import LayerCache
from model.sockets import connect

SCHEDULES = ("TP", "Ladder", "DTP")
CARRIERS = ("sockets", "gloo")


@dataclass(frozen=True)
class Plan:
    """What to measure with one number of processes. delays in seconds."""

    config: LaneformerConfig
    delays: Sequence[float]
    repeats: int
    tokens: int
    module_seconds: float
    real: bool
    """Whether to run the decoder with real weights too."""


class LadderGroup(LaneGroup):
    """The decoder with every module's sum added one module late."""

    waiting = False
    """Whether a module's sum is under way."""

    def _add(
        self, x_LTD: torch.Tensor, o_LTD: torch.Tensor, layer: int, kind: Kind, under_way: deque[Awaited]
    ) -> None:
        self.exchange.push(self._own_sum(o_LTD))
        if self.waiting:
            x_LTD.add_(self._collected_sum())
        self.waiting = True

    def _streams(
        self, tokens_BC: torch.Tensor, positions_BC: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        self.waiting = False
        x_LTD = super()._streams(tokens_BC, positions_BC, caches)
        return x_LTD.add_(self._collected_sum())


def measure(size: int, plan: Plan) -> list[dict[str, Any]]:
    """One row for each carrier, schedule, delay and kind of compute: milliseconds per token, one per repeat."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(store.port, rank, size, plan), daemon=True)
        for rank in range(1, size)
    ]
    for worker in workers:
        worker.start()
    before = torch.get_num_threads()
    try:
        return _take_part(store, 0, size, plan)
    finally:
        torch.set_num_threads(before)
        for worker in workers:
            worker.join(30)


def _work(port: int, rank: int, size: int, plan: Plan) -> None:
    _take_part(dist.TCPStore("127.0.0.1", port, is_master=False), rank, size, plan)


def _take_part(store: dist.Store, rank: int, size: int, plan: Plan) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    mesh = connect(store, rank, size, timeout=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    gloo = GroupExchange()
    cases: dict[tuple[str, str, str, float], Callable[[], float]] = {}

    def after_delay(delay: float, token: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            mesh.delay = delay
            return token()

        return run

    sockets = SocketExchange(mesh)
    for delay in plan.delays:
        for schedule in SCHEDULES:
            case = after_delay(delay, lambda schedule=schedule: sleeping_token(sockets, schedule, plan))
            cases["sockets", "sleep", schedule, delay] = case
    for schedule in SCHEDULES:  # gloo cannot be delayed
        cases["gloo", "sleep", schedule, 0.0] = lambda schedule=schedule: sleeping_token(gloo, schedule, plan)
    if plan.real:
        for schedule, group in real_groups(plan.config, sockets).items():
            for delay in plan.delays:
                case = after_delay(delay, lambda group=group: real_token(group, plan.tokens))
                cases["sockets", "weights", schedule, delay] = case
    times: dict[tuple[str, str, str, float], list[float]] = {key: [] for key in cases}
    for _ in range(plan.repeats):
        for key, run in cases.items():
            dist.barrier()
            times[key].append(1e3 * run())
    mesh.delay = 0.0
    sockets.close()
    gloo.close()
    names = ("carrier", "compute", "schedule", "delay")
    return [{"processes": size, **dict(zip(names, key, strict=True)), "ms": ms} for key, ms in times.items()]


def sleeping_token(exchange: Exchange, schedule: str, plan: Plan) -> float:
    """Seconds per token of modules that sleep. As in the decoder, a token also waits for three exchanges."""
    late = {"TP": 0, "Ladder": 1, "DTP": 2 * plan.config.broadcast_delay}[schedule]
    message = torch.zeros(1, plan.config.hidden_size)

    def wait_for_all() -> None:
        exchange.push(message)
        exchange.collect()

    begin = time.perf_counter()
    for _ in range(plan.tokens):
        wait_for_all()  # the embedding
        for module in range(2 * plan.config.num_hidden_layers):
            time.sleep(plan.module_seconds)
            exchange.push(message)
            if module >= late:
                exchange.collect()
        for _ in range(late):
            exchange.collect()
        wait_for_all()  # the final state
        wait_for_all()  # the choice
    return (time.perf_counter() - begin) / plan.tokens


def real_groups(config: LaneformerConfig, exchange: Exchange) -> dict[str, LaneGroup]:
    """The decoder under each schedule, all with the same float32 weights."""
    shapes, held = internal_shapes(config), {}
    generator = torch.Generator()
    part = Part.of(config, exchange.rank, exchange.size)

    def weight(name: str) -> torch.Tensor:
        if name not in held:
            generator.manual_seed(sum(name.encode()) + exchange.rank)
            rows = part.cut(name, torch.empty(shapes[name], device="meta"), config).shape
            held[name] = (
                torch.ones(rows)
                if "norm" in name
                else torch.empty(rows).normal_(0, 0.02, generator=generator)
            )
        return held[name]

    at_once = dataclasses.replace(config, broadcast_delay=0)
    kinds: dict[str, tuple[type[LaneGroup], LaneformerConfig]] = {
        "TP": (LaneGroup, at_once),
        "Ladder": (LadderGroup, at_once),
        "DTP": (LaneGroup, config),
    }
    return {
        schedule: kind(sizes, weight, exchange, torch.float32, "float32")
        for schedule, (kind, sizes) in kinds.items()
    }


def real_token(group: LaneGroup, tokens: int) -> float:
    _, timing = generate(group, [[1, 2, 3, 4]], lambda ids: "", max_new_tokens=tokens)
    return 1 / timing.tokens_per_second
