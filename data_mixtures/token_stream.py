"""The stored tokens of a source as one long array, of which any stretch is found again with its documents."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures.shards import MANIFEST, ShardError, read_manifest


class TokenStream:
    """The tokens of one split as one long array. Opening reads the manifest only; shards are opened on first
    use and the `max_open` most recent ones stay open.

    Tokens are read with pread rather than a memory map: a file that is cut off or unreadable then gives an
    error, where a map would kill the process. Attributes: `manifest`, `tokens` (length of the stream),
    `documents`, `has_mask`, `reading` (file and byte offset of the last read, for whoever waits for it).
    """

    def __init__(self, directory: str | Path, max_open: int = 256) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        self.tokens: int = self.manifest["tokens"]
        self.documents: int = self.manifest["documents"]
        self.has_mask: bool = self.manifest["loss_mask"]
        self.reading: tuple[Path, int] = (self.directory / MANIFEST, 0)
        self._dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self._entries = self.manifest["shards"]
        self._starts = np.concatenate(
            [[0], np.cumsum([entry["tokens"] for entry in self._entries], dtype=np.int64)]
        )
        if self._starts[-1] != self.tokens:
            raise ShardError(
                f"{self.directory / MANIFEST}: its shards hold {self._starts[-1]} tokens, "
                f"its total says {self.tokens}"
            )
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._max_open = max_open

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokens [start, stop) of the stream.

        Returns (tokens (n,) in the stored type, starts int64: the places in it, ascending, where a document
        begins, mask uint8 (n,) or None). Raises ShardError naming file and offset when they cannot be had.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise ShardError(f"{self.directory}: tokens {start} to {stop} asked for, it has {self.tokens}")
        parts = []
        done = 0
        k = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start + done < stop:
            base = int(self._starts[k])
            first, last = start + done - base, min(stop, int(self._starts[k + 1])) - base
            tokens, starts, mask = self._shard(k).read(first, last, self)
            parts.append((tokens, starts + done, mask))
            done += last - first
            k += 1
        if len(parts) == 1:
            return parts[0]
        if not parts:
            empty = np.empty(0, np.uint8)
            return empty.astype(self._dtype), empty.astype(np.int64), empty if self.has_mask else None
        tokens, starts, masks = zip(*parts, strict=True)
        return (
            np.concatenate(tokens),
            np.concatenate(starts),
            np.concatenate(masks) if self.has_mask else None,
        )

    @property
    def num_shards(self) -> int:
        return len(self._entries)

    def shard_start(self, shard: int) -> int:
        """Where a shard begins in the stream, in tokens."""
        return int(self._starts[shard])

    def document_offsets(self, shard: int) -> np.ndarray:
        """uint64 (n+1,): token offsets of the documents of one shard, relative to the shard."""
        return self._shard(shard).offsets

    def _shard(self, k: int) -> _Shard:
        shard = self._open.get(k)
        if shard is None:
            shard = self._open[k] = _Shard(self.directory, self._entries[k], self._dtype, self.has_mask)
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(k)
        return shard


class _Shard:
    """One opened shard."""

    def __init__(self, directory: Path, entry: dict[str, Any], dtype: np.dtype, has_mask: bool) -> None:
        stem, documents, tokens = directory / entry["stem"], entry["documents"], entry["tokens"]
        self._dtype = dtype
        self._tokens = _File(stem.with_suffix(".bin"), tokens * dtype.itemsize)
        self._mask = _File(stem.with_suffix(".mask"), tokens) if has_mask else None
        index = _File(stem.with_suffix(".docs"), 8 * (2 * documents + 1))
        self.offsets = np.memmap(index.path, dtype="<u8", mode="r", shape=(documents + 1,)).view(np.ndarray)
        index.close()

    def read(
        self, first: int, last: int, stream: TokenStream
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        size = self._dtype.itemsize
        stream.reading = (self._tokens.path, first * size)
        tokens = np.frombuffer(self._tokens.read(first * size, last * size), self._dtype)
        lo, hi = np.searchsorted(self.offsets[:-1], np.array([first, last], dtype=np.uint64))
        starts = self.offsets[lo:hi].astype(np.int64) - first
        mask = np.frombuffer(self._mask.read(first, last), np.uint8) if self._mask else None
        return tokens, starts, mask

    def close(self) -> None:
        self._tokens.close()
        if self._mask:
            self._mask.close()


class _File:
    """A file of a known size, read by byte range."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ShardError(
                f"{path} cannot be opened: {error.strerror}; prepare the source again"
            ) from error
        found = os.fstat(self._fd).st_size
        if found != size:
            self.close()
            what = "is cut off" if found < size else "is too long"
            raise ShardError(
                f"{path} {what}: it ends at byte {found}, the manifest says {size}; prepare the source again"
            )

    def read(self, first: int, last: int) -> bytes:
        try:
            content = os.pread(self._fd, last - first, first)
        except OSError as error:
            raise ShardError(
                f"{self.path}: reading {last - first} bytes at {first} failed: {error.strerror}"
            ) from error
        if len(content) != last - first:
            raise ShardError(
                f"{self.path} was cut off: bytes {first} to {last} are wanted, "
                f"it ends at byte {first + len(content)}"
            )
        return content

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()
