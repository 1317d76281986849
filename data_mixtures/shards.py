"""How prepared text lies on disk, and how any stretch of it is found again.

One split of one source is a directory:

    manifest.json          what it is, where it came from, how much, and the SHA-256 of every file
    shard-00000.bin        token ids, little-endian uint16 (uint32 when the vocabulary needs it), nothing else
    shard-00000.docs       little-endian uint64: n+1 token offsets of the documents, then n lengths in UTF-8
    bytes shard-00000.mask       optional, one byte per token: 1 where the token is trained on (chat data)

Every document is BOS + text + EOS. Where a document ends is known from the index, never from EOS. Shards
follow each other in the order of the manifest and form one stream of tokens; a window of it may cross shards.

Files are written under a temporary name, synced and renamed, the manifest last: a split with a manifest is
whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "laneformer-tokens"
VERSION = 1
MANIFEST = "manifest.json"
ORDER_STATEMENT = (
    "documents are stored in the order of the input; sequences are cut from the stored stream and visited, "
    "each epoch, in a seeded pseudo-random permutation of the whole source (feistel-1)"
)
CHUNK_BYTES = 1 << 20


class ShardError(ValueError):
    """A damaged, missing or unreadable file of a prepared source; the message names it."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_atomically(path: Path, chunks: Iterable[bytes]) -> dict[str, Any]:
    """Write `chunks` to `path` so that it is there whole or not at all. Returns {"bytes", "sha256"} of the
    file.
    """
    digest = hashlib.sha256()
    size = 0
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, [(json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()])


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ShardError that names the file when it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ShardError(f"{path} does not exist; prepare the source first") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShardError(f"{path} is not valid JSON ({error}); prepare the source again") from error


class ShardWriter:
    """Collects documents in memory and writes them as one shard.

    `stem` is the file name without its ending. Masks must be given for all documents or for none.
    """

    def __init__(self, directory: Path, stem: str, dtype: np.dtype) -> None:
        self._directory = directory
        self._stem = stem
        self._dtype = dtype
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._byte_lengths: list[int] = []
        self.tokens = 0

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def add(self, ids: Sequence[int], byte_length: int, mask: Sequence[int] | None = None) -> None:
        """Add one document: its ids with BOS and EOS, the UTF-8 length of its text, its loss mask if any."""
        if (mask is not None) != (len(self._masks) == len(self._lengths)) and self._lengths:
            raise ValueError(f"{self._stem}: some documents have a loss mask and some have none")
        if mask is not None and len(mask) != len(ids):
            raise ValueError(f"{self._stem}: a document of {len(ids)} tokens has a mask of {len(mask)}")
        self._tokens.append(np.asarray(ids, dtype=self._dtype))
        if mask is not None:
            self._masks.append(np.asarray(mask, dtype=np.uint8))
        self._lengths.append(len(ids))
        self._byte_lengths.append(byte_length)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Write the files. Returns the shard's entry of the manifest."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.uint64)]).astype("<u8")
        byte_lengths = np.asarray(self._byte_lengths, dtype="<u8")
        files = {
            f"{self._stem}.bin": write_atomically(
                self._directory / f"{self._stem}.bin", (t.tobytes() for t in self._tokens)
            ),
            f"{self._stem}.docs": write_atomically(
                self._directory / f"{self._stem}.docs", [offsets.tobytes(), byte_lengths.tobytes()]
            ),
        }
        if self._masks:
            files[f"{self._stem}.mask"] = write_atomically(
                self._directory / f"{self._stem}.mask", (m.tobytes() for m in self._masks)
            )
        return {
            "stem": self._stem,
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": int(byte_lengths.sum()),
            "files": files,
        }


def write_manifest(
    directory: Path,
    *,
    source: str,
    split: str,
    origin: dict[str, Any],
    tokenizer_sha256: str,
    vocab_size: int,
    shards: list[dict[str, Any]],
    dropped: dict[str, int],
) -> dict[str, Any]:
    """Write the manifest that makes a split complete, and return it.

    `origin`: revision, licence and the like, as the source states them. `dropped`: documents left out, by
    reason.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "split": split,
        "origin": origin,
        "tokenizer_sha256": tokenizer_sha256,
        "dtype": token_dtype(vocab_size).name,
        "byteorder": "little",
        "loss_mask": any(name.endswith(".mask") for shard in shards for name in shard["files"]),
        "order": ORDER_STATEMENT,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "text_bytes": sum(shard["text_bytes"] for shard in shards),
        "dropped": dropped,
        "shards": shards,
    }
    write_json(directory / MANIFEST, manifest)
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a split. Raises ShardError when it is missing, damaged or of another format."""
    path = directory / MANIFEST
    manifest = read_json(path)
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise ShardError(
            f"{path} has format {found}, this code reads {(FORMAT, VERSION)}; prepare the source again"
        )
    return manifest


def manifest_sha256(manifest: dict[str, Any]) -> str:
    """A hash of everything that decides which tokens a split gives, and in which order."""
    content = {
        "dtype": manifest["dtype"],
        "tokenizer": manifest["tokenizer_sha256"],
        "order": manifest["order"],
        "shards": [
            [shard["stem"], shard["tokens"], sorted((n, f["sha256"]) for n, f in shard["files"].items())]
            for shard in manifest["shards"]
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify_split(directory: Path) -> list[str]:
    """Re-read every file of a split. Returns one line per problem, each naming the file; empty when all is
    well.
    """
    problems: list[str] = []
    for shard in read_manifest(directory)["shards"]:
        for name, expected in shard["files"].items():
            path = directory / name
            if not path.exists():
                problems.append(f"{path}: missing")
                continue
            size = path.stat().st_size
            if size != expected["bytes"]:
                problems.append(f"{path}: {size} bytes, the manifest says {expected['bytes']}")
                continue
            found = file_sha256(path)
            if found != expected["sha256"]:
                problems.append(f"{path}: SHA-256 is {found}, the manifest says {expected['sha256']}")
    return problems


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


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
