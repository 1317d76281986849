"""How the processes that hold a model's lanes hear each other.

An exchange carries tensors from every process to every process. `push` sends this process's contribution and
returns at once; `collect` waits for the contributions to the oldest push that was not collected yet. What lies
between the two is time in which a message travels unnoticed: two layers, in a model with a delay of two.

All processes push the same shapes in the same order. There are three carriers: `Alone` (all lanes in one
process), `SocketExchange` (CPU; plain sockets and no threads, because a message is small and only its latency
counts) and `GroupExchange` (torch.distributed: NCCL on GPUs; gloo works too).

Shape suffix: P processes
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from model.sockets import Mesh


class Exchange(Protocol):
    rank: int
    size: int

    def push(self, x: torch.Tensor) -> None:
        """Send x to all. x may be overwritten as soon as this returns."""
        ...

    def collect(self, patient: bool = False) -> torch.Tensor:
        """All processes' contributions to the oldest push, (P, …) in order of rank; valid until the next collect.

        Raises PeerError if a process has ended or, unless patient, is late.
        """
        ...

    def close(self) -> None:
        """Send what others wait for, then part. Without it, or another call, large messages may not go out."""
        ...


@dataclass
class Slot:
    """One message of every process, and how much of it is still on its way."""

    buffer: torch.Tensor
    to_send: int = 0
    """Peers that this process's part has not left for yet."""
    ready: float = 0.0
    """When it may be read, where a delay is simulated."""
    raw: list[memoryview] = field(default_factory=list)
    """For carriers that move bytes: the memory of each process's part."""


class Slots:
    """Message buffers, (P, *shape), made once and used again. A slot is lent from push until the next collect."""

    def __init__(self, size: int):
        self.size = size
        self.free: dict[tuple[torch.Size, torch.dtype], list[Slot]] = defaultdict(list)
        self.pending: deque[Slot] = deque()
        self.lent: Slot | None = None
        self.made = 0

    def take(self, like: torch.Tensor, bytes_too: bool) -> Slot:
        """A slot for a message like this one, at the end of the pending ones."""
        unused = self.free[like.shape, like.dtype]
        # A slow peer may still be reading from a slot that has been collected here.
        at = next((i for i, slot in enumerate(unused) if slot.to_send == 0), None)
        if at is not None:
            slot = unused.pop(at)
        else:
            self.made += 1
            slot = Slot(torch.empty(self.size, *like.shape, dtype=like.dtype, device=like.device))
            if bytes_too:
                parts = slot.buffer.view(self.size, -1).view(torch.uint8)
                slot.raw = [part.numpy().data for part in parts]
        self.pending.append(slot)
        return slot

    def lend(self) -> Slot:
        """The oldest pending slot; the one lent before is free again."""
        if self.lent is not None:
            self.free[self.lent.buffer.shape[1:], self.lent.buffer.dtype].append(self.lent)
        self.lent = self.pending.popleft()
        return self.lent


class Alone:
    """All lanes in this process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.slots = Slots(1)

    def push(self, x: torch.Tensor) -> None:
        self.slots.take(x, bytes_too=False).buffer[0].copy_(x)

    def collect(self, patient: bool = False) -> torch.Tensor:
        return self.slots.lend().buffer

    def close(self) -> None:
        pass


class SocketExchange:
    """Tensors on the CPU over a mesh of sockets. delay holds every message back for so many seconds after it was
    sent, to simulate a slower network between processes of one machine."""

    def __init__(self, mesh: Mesh, delay: float = 0.0):
        self.mesh = mesh
        self.rank, self.size = mesh.rank, mesh.size
        self.slots = Slots(self.size)
        mesh.delay = delay

    def push(self, x: torch.Tensor) -> None:
        slot = self.slots.take(x, bytes_too=True)
        slot.buffer[self.rank].copy_(x)
        self.mesh.send(slot)

    def collect(self, patient: bool = False) -> torch.Tensor:
        # The slot leaves the queue only when it is complete: what arrives goes to the oldest that lacks it.
        self.mesh.receive(self.slots.pending, patient)
        return self.slots.lend().buffer

    def close(self) -> None:
        self.mesh.close()


class GroupExchange:
    """Over torch.distributed's default group: one all-gather a message, on the group's own stream or thread."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.slots = Slots(self.size)
        self.work: deque[dist.Work] = deque()

    def push(self, x: torch.Tensor) -> None:
        slot = self.slots.take(x, bytes_too=False)
        own = slot.buffer[self.rank]
        own.copy_(x)
        work = dist.all_gather_single(slot.buffer.flatten(0, 1), own, async_op=True)
        assert work is not None
        self.work.append(work)

    def collect(self, patient: bool = False) -> torch.Tensor:
        self.work.popleft().wait()
        return self.slots.lend().buffer

    def close(self) -> None:
        dist.destroy_process_group()
