"""Batches for training and validation, from a mixture and the prepared shards.

Micro-batch m of the run covers the global sequences [m·B·W, (m+1)·B·W) for local batch size B and world size
W; rank r takes the r-th part of B. So the global order does not depend on how many ranks share it, and the
state is one number: how many sequences of the phase have been handed out. Batches are made by one thread
ahead of time; what it has made but not handed out is not in the state.

Shapes: B local batch, S sequence length, M micro-batches, N sequences.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from data_mixtures.mixture import Mixture
from data_mixtures.plan_record import PlanChanged, describe, differences, plan_hash
from data_mixtures.recipe import Packing
from data_mixtures.sequences import SequenceReader
from data_mixtures.shards import ShardError, read_json

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
T = TypeVar("T")

STALL_SECONDS = 600.0
LOCATED_TOGETHER = 256  # sequences whose places are computed in one go, since each call has a fixed cost


class MixtureLoader:
    """Iterates over the micro-batches of one rank.

    Yields ({"input": (B, S), "positions": (B, S), "source": (B,)}, labels (B, S)), all int64; labels are -100
    where nothing is learned, "source" indexes `mixture.sources`. Ends when the phase has no whole global
    batch left.

    root: folder of the prepared sources. prefetch: micro-batches made ahead (≥ 1). plan_file: where the run
    recorded its plan; read only to name what changed when a state does not fit. stall_seconds: a batch that
    takes longer is an error. Metrics: `wait_seconds`, time spent waiting for batches since the start;
    `ready`, batches made ahead.

    Raises ValueError for bad sizes; while iterating, ShardError naming rank, file and offset.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        root: str | Path,
        rank: int,
        world_size: int,
        local_batch_size: int,
        seq_len: int,
        prefetch: int = 2,
        plan_file: Path | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, world_size is {world_size}; the rank must be below it")
        if local_batch_size < 1 or prefetch < 1:
            raise ValueError(
                f"local_batch_size is {local_batch_size}, prefetch is {prefetch}; both must be ≥ 1"
            )
        if seq_len != mixture.seq_len:
            raise ValueError(f"seq_len is {seq_len}, the mixture was planned for {mixture.seq_len}")
        self.mixture = mixture
        self.position = 0
        self.wait_seconds = 0.0
        self._rank = rank
        self._local_batch_size = local_batch_size
        self._global_batch_size = local_batch_size * world_size
        self._prefetch = prefetch
        self._plan_file = plan_file
        self._stall_seconds = stall_seconds
        self._plan = describe(mixture)
        self._root = Path(root)
        self._readers: list[SequenceReader | None] = [None] * len(mixture.sources)
        self._reading: SequenceReader | None = None
        self._ahead: _Ahead[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current position on. A second iterator ends the first one's thread."""
        self.close()
        ahead = self._ahead = _Ahead(self._batches(self.position), self._prefetch)
        try:
            while True:
                started = time.monotonic()
                batch = ahead.next(self._stall_seconds, self._describe_reading)
                self.wait_seconds += time.monotonic() - started
                if batch is None:
                    return
                self.position += self._global_batch_size
                yield batch
        finally:
            ahead.stop()

    @property
    def ready(self) -> int:
        """Batches made and waiting."""
        return self._ahead.ready if self._ahead else 0

    def close(self) -> None:
        """End the thread, if one runs."""
        if self._ahead:
            self._ahead.stop()
            self._ahead = None

    def state_dict(self) -> dict[str, Any]:
        """Position in sequences of the phase, and the hashes of plan and tokenizer."""
        return {"position": self.position, "plan": plan_hash(self._plan), "tokenizer": self.mixture.tokenizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, at any world size and batch size. Takes effect with the next `iter()`.

        Raises PlanChanged, naming what changed, when it was saved under another plan or tokenizer.
        """
        ours = self.state_dict()
        if state["tokenizer"] != ours["tokenizer"]:
            raise PlanChanged(
                f"the checkpoint was made with tokenizer {state['tokenizer'][:12]}, "
                f"the data is prepared with {ours['tokenizer'][:12]}"
            )
        if state["plan"] != ours["plan"]:
            raise PlanChanged(
                f"the data plan has changed since the checkpoint: {self._name_changes()}. "
                "Restore it, or start a new run"
            )
        self.close()
        self.position = int(state["position"])

    def _name_changes(self) -> str:
        if self._plan_file is None or not self._plan_file.exists():
            return "its hash differs (there is no plan.json that would tell where)"
        changes = differences(read_json(self._plan_file), self._plan)
        return "; ".join(changes) or f"its hash differs, though {self._plan_file} equals the plan of now"

    def _batches(self, position: int) -> Iterator[Batch]:
        B = self._local_batch_size
        together = max(1, LOCATED_TOGETHER // B)
        last = self.mixture.sequences - self._global_batch_size
        while position <= last:
            stop = min(last + 1, position + together * self._global_batch_size)
            first_M = np.arange(position, stop, self._global_batch_size) + self._rank * B
            place_MB = first_M[:, None] + np.arange(B)
            source_N, item_N, _ = self.mixture.locate(place_MB.ravel())
            for m, first in enumerate(first_M.tolist()):
                batch = slice(m * B, (m + 1) * B)
                yield self._make(first, source_N[batch], item_N[batch])
            position += len(first_M) * self._global_batch_size

    def _make(self, first: int, source_B: np.ndarray, item_B: np.ndarray) -> Batch:
        B, S = self._local_batch_size, self.mixture.seq_len
        tokens_BS, positions_BS, labels_BS = (np.empty((B, S), dtype=np.int64) for _ in range(3))
        for b, (source, item) in enumerate(zip(source_B.tolist(), item_B.tolist(), strict=True)):
            try:
                self._reader(source).read(item, tokens_BS[b], positions_BS[b], labels_BS[b])
            except ShardError as error:
                raise ShardError(f"rank {self._rank}, sequence {first + b} of the phase: {error}") from error
        inputs = {"input": tokens_BS, "positions": positions_BS, "source": source_B.copy()}
        return {name: torch.from_numpy(array) for name, array in inputs.items()}, torch.from_numpy(labels_BS)

    def _reader(self, source: int) -> SequenceReader:
        reader = self._readers[source]
        if reader is None:
            directory = self._root / self.mixture.sources[source] / "train"
            reader = SequenceReader(directory, self.mixture.seq_len, self.mixture.packing)
            self._readers[source] = reader
        self._reading = reader
        return reader

    def _describe_reading(self) -> str:
        if self._reading is None:
            return f"rank {self._rank} has read nothing yet"
        path, offset = self._reading.stream.reading
        return f"rank {self._rank} is reading {path} at byte {offset}"


class ValidationSet:
    """Held-out sequences of one source, the same at every call: at most `max_sequences`, spread over the
    split.

    Indexing gives (input (S,), positions (S,), labels (S,)), int64. Raises ValueError when there is not one
    sequence.
    """

    def __init__(
        self, root: str | Path, source: str, seq_len: int, max_sequences: int, packing: Packing = "concat"
    ) -> None:
        self.source = source
        self._seq_len = seq_len
        self._reader = SequenceReader(Path(root) / source / "validation", seq_len, packing)
        if self._reader.items < 1 or max_sequences < 1:
            raise ValueError(
                f"{self._reader.directory} gives {self._reader.items} sequences of {seq_len} tokens and "
                f"{max_sequences} are wanted; hold out more, or validate on shorter sequences"
            )
        self._length = min(self._reader.items, max_sequences)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"validation sequence {index} of {self._length}")
        rows_3S = np.empty((3, self._seq_len), dtype=np.int64)
        self._reader.read(index * self._reader.items // self._length, *rows_3S)
        tokens_S, positions_S, labels_S = torch.from_numpy(rows_3S)
        return tokens_S, positions_S, labels_S


class _Ahead(Generic[T]):
    """Runs an iterator in a thread, `depth` values ahead."""

    def __init__(self, values: Iterator[T], depth: int) -> None:
        self._queue: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(values,), name="data-prefetch", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        return self._queue.qsize()

    def next(self, timeout: float, describe: Callable[[], str]) -> T | None:
        """The next value, None at the end. Raises what the iterator raised, or ShardError after `timeout`
        seconds.
        """
        try:
            value = self._queue.get(timeout=timeout)
        except queue.Empty:
            raise ShardError(
                f"no batch for {timeout:g} s: {describe()}; is the file system stalled?"
            ) from None
        if isinstance(value, BaseException):
            raise value
        return value

    def stop(self) -> None:
        """End the thread; what it has made is lost."""
        self._stopping.set()
        while not self._queue.empty():  # a put that waits for room returns, sees the flag and ends
            self._queue.get_nowait()
        self._thread.join(timeout=1.0)

    def _run(self, values: Iterator[T]) -> None:
        try:
            for value in values:
                self._queue.put(value)
                if self._stopping.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # handed to the thread that waits for batches
            self._queue.put(error)
