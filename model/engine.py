"""A loaded model that answers requests: in one process, or spread over several that each hold some of the lanes.

The first process is given the requests. It announces each to the others, and then all run the same generation and
come to the same tokens (model/decode.py). The processes are either started here, on this machine, or by torchrun.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from model.checkpoint import parameter_reader, read_architecture
from model.config import LaneformerConfig
from model.decode import Generation, Sampling, Timing, generate
from model.delayed_tp import LaneGroup, Part, activation_dtype, weight_kind
from model.exchange import Alone, Exchange, GroupExchange, SocketExchange
from model.sockets import PeerError, connect
from model.text import Tokenizer

WEIGHTS = ("float32", "float64", "bfloat16", "float16", "int8")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a checkpoint is loaded. weights: one of WEIGHTS; on the CPU, activations are at least float32.
    timeout: seconds that a process may be late before the job ends."""

    checkpoint: Path
    weights: str = "float32"
    device: str = "cpu"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights} must be one of {', '.join(WEIGHTS)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda, but torch sees no GPU here")
        if self.weights == "int8" and self.device != "cpu":
            raise ValueError("weights=int8 is for device=cpu; use bfloat16 or float16 on a GPU")
        if self.weights == "float16" and self.device == "cpu":
            raise ValueError("weights=float16 is for device=cuda; use bfloat16 or int8 on a CPU")

    @property
    def stored(self) -> torch.dtype:
        """The dtype of what is not quantised."""
        return torch.bfloat16 if self.weights == "int8" else getattr(torch, self.weights)

    @property
    def kind(self) -> str:
        """How model.weights keeps the linear maps."""
        return "int8" if self.weights == "int8" else weight_kind(self.stored, torch.device(self.device))

    def load(self, config: LaneformerConfig, exchange: Exchange) -> LaneGroup:
        """This process's part of the checkpoint; no more than one whole parameter beside it is in memory."""
        device = torch.device(self.device)
        read, part = parameter_reader(self.checkpoint, config), Part.of(config, exchange.rank, exchange.size)
        dtype = activation_dtype(self.stored, device)

        def weight(name: str) -> torch.Tensor:
            # int8 is computed from what was trained, not from its rounding to bfloat16.
            as_stored = self.kind == "int8" and name != "tok_embeddings.weight"
            own = part.cut(name, read(name), config)
            return own.to(device, own.dtype if as_stored else self.stored, copy=True)

        return LaneGroup(config, weight, exchange, dtype, self.kind)


class Engine:
    """A model and its tokenizer. control carries requests to the processes that hold the other lanes."""

    def __init__(self, group: LaneGroup, tokenizer: Tokenizer, control: Exchange | None = None):
        self.group = group
        self.sizes = group.sizes
        self.tokenizer = tokenizer
        self.control = control or Alone()
        self.workers: list[Any] = []
        self._busy = False  # in the middle of a request, where the other processes do not listen for another

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
        on_token: Callable[[list[str]], bool | None] | None = None,
    ) -> tuple[list[Generation], Timing]:
        """model.decode.generate, by all processes. Raises ValueError as that does, or PeerError."""
        sampling = sampling or Sampling()
        request = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "sampling": asdict(sampling),
            "stops": list(stops),
        }
        self._busy = True
        if self.control.size > 1:
            _announce(self.control, json.dumps(request).encode())
        failure: list[BaseException] = []

        def watch(texts: list[str]) -> bool:
            # The other processes have to be told, so what goes wrong here comes out after the last step.
            try:
                return bool(on_token and on_token(texts))
            except BaseException as error:
                failure.append(error)
                return True

        try:
            answer = self._generate(request, watch if on_token else None)
        except ValueError:  # raised by all processes, before the first step
            self._busy = False
            raise
        self._busy = False
        if failure:
            raise failure[0]
        return answer

    def _generate(
        self, request: dict[str, Any], on_token: Callable[[list[str]], bool | None] | None
    ) -> tuple[list[Generation], Timing]:
        prompts = request["prompts"]
        return generate(
            self.group,
            prompts,
            self.tokenizer.reader(prompts[0] if prompts else []),
            max_new_tokens=request["max_new_tokens"],
            sampling=Sampling(**request["sampling"]),
            eos_id=self.tokenizer.eos_id,
            stops=request["stops"],
            on_token=on_token,
        )

    def is_whole(self) -> bool:
        """Whether the processes that were started here all live. torchrun ends a job itself when one dies."""
        return all(worker.is_alive() for worker in self.workers)

    def follow(self) -> None:
        """Take part in what the first process is asked for, until it closes."""
        while request := _announce(self.control, None):
            try:
                self._generate(json.loads(request), None)
            except ValueError:
                continue  # the same is raised, and told, in the first process

    def close(self) -> None:
        """End the other processes."""
        if self.control.size > 1 and self.control.rank == 0:
            _announce(self.control, b"")
        self.control.close()
        if self.group.exchange is not self.control:
            self.group.exchange.close()
        for worker in self.workers:
            worker.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._busy:
            self.close()
            return
        # A process is lost, or this one is interrupted: the end cannot be announced.
        for worker in self.workers:
            worker.terminate()


def open_engine(loading: Loading, processes: int = 1) -> Engine | None:
    """Load a checkpoint over so many processes of this machine, or over those that torchrun has started.

    In the processes that torchrun starts, other than the first, this returns None when the job is over.
    Raises ValueError if the checkpoint or the number of processes does not fit, or PeerError.
    """
    config = read_architecture(loading.checkpoint)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and processes not in (1, size):
        raise ValueError(f"lanes={processes}, but torchrun has started {size} processes")
    Part.of(config, 0, max(size, processes))
    if size > 1:
        store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=loading.timeout)))
        engine = _join(loading, config, store, rank, size)
        if rank == 0:
            return engine
        engine.follow()
        engine.close()
        return None
    if processes > 1:
        return _spawn(loading, config, processes)
    return Engine(loading.load(config, Alone()), Tokenizer(loading.checkpoint / "tokenizer.model"))


def _join(loading: Loading, config: LaneformerConfig, store: dist.Store, rank: int, size: int) -> Engine:
    """This process's engine, connected with the others."""
    control = SocketExchange(connect(store, rank, size, loading.timeout))
    exchange: Exchange = control
    if loading.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
        timeout = timedelta(seconds=loading.timeout)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
        exchange = GroupExchange()
    group = loading.load(config, exchange)
    return Engine(group, Tokenizer(loading.checkpoint / "tokenizer.model"), control)


def _spawn(loading: Loading, config: LaneformerConfig, size: int) -> Engine:
    """Start all processes but this one, which is the first."""
    if loading.device == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(f"lanes={size} needs as many GPUs; torch sees {torch.cuda.device_count()}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(loading, config, store.port, rank, size, threads), daemon=True)
        for rank in range(1, size)
    ]
    # Ctrl-C is for this process alone: the others are started with it blocked. What multiprocessing starts beside
    # them unblocks it, and so has to run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        engine = _join(loading, config, store, 0, size)
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    engine.workers = workers
    return engine


def _work(loading: Loading, config: LaneformerConfig, port: int, rank: int, size: int, threads: int) -> None:
    """The life of a process that _spawn has started."""
    os.setpgrp()  # what ends the whole group lets the first process finish, which then ends this one
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(threads)
    try:
        engine = _join(loading, config, dist.TCPStore("127.0.0.1", port, is_master=False), rank, size)
        engine.follow()
        engine.close()
    except (PeerError, ValueError, OSError) as error:
        print(f"process {rank}: {error}", file=sys.stderr)
        sys.exit(1)


def _announce(control: Exchange, message: bytes | None) -> bytes:
    """Give the first process's message to all; those that wait for it wait without limit."""
    control.push(torch.tensor([len(message or b"")]))
    length = int(control.collect(patient=control.rank > 0)[0, 0])
    if not length:
        return b""
    content = torch.frombuffer(bytearray(message or bytes(length)), dtype=torch.uint8)
    control.push(content)
    return bytes(control.collect()[0].tolist())
