"""How prepared text lies on disk, and how it is written (`token_stream.py` reads it).

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
    altered: dict[str, int] | None = None,
    rows: int | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the manifest that makes a split complete, and return it.

    `origin`: revision, licence and the like, as the source states them. `rows`: what was read for all splits.
    `dropped`, `altered`: of these, documents left out and documents taken otherwise than as they are, by
    reason. `settings`: what the preparation depended on.
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
        "rows": rows,
        "dropped": dropped,
        "altered": altered or {},
        "settings": settings,
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
    manifest = read_manifest(directory)
    problems: list[str] = []
    for shard in manifest["shards"]:
        found = [file_problem(directory / name, recorded) for name, recorded in shard["files"].items()]
        problems += [problem for problem in found if problem]
        if not any(found):
            problems += _count_problems(directory, shard, np.dtype(manifest["dtype"]).itemsize)
    for key in ("documents", "tokens", "text_bytes"):
        total = sum(shard[key] for shard in manifest["shards"])
        if total != manifest[key]:
            problems.append(f"{directory / MANIFEST}: {key} is {manifest[key]}, its shards add up to {total}")
    return problems


def file_problem(path: Path, recorded: dict[str, Any]) -> str | None:
    """What is wrong with a file, given its recorded size and SHA-256; None when nothing is."""
    if not path.exists():
        return f"{path}: missing"
    size = path.stat().st_size
    if size != recorded["bytes"]:
        return f"{path}: {size} bytes, {recorded['bytes']} are recorded"
    found = file_sha256(path)
    if found != recorded["sha256"]:
        return f"{path}: SHA-256 is {found}, {recorded['sha256']} is recorded"
    return None


def _count_problems(directory: Path, shard: dict[str, Any], itemsize: int) -> list[str]:
    """Whether the counts of a shard are those of its (undamaged) files."""
    index = np.fromfile(directory / f"{shard['stem']}.docs", "<u8")
    documents = (len(index) - 1) // 2
    counted = {
        "documents": documents,
        "tokens": shard["files"][f"{shard['stem']}.bin"]["bytes"] // itemsize,
        "text_bytes": int(index[documents + 1 :].sum()),
    }
    if counted["tokens"] != int(index[documents]):
        return [
            f"{directory / shard['stem']}.docs: it ends at token {index[documents]}, not {counted['tokens']}"
        ]
    return [
        f"{directory / MANIFEST}: {shard['stem']} has {key} {shard[key]}, its files have {n}"
        for key, n in counted.items()
        if shard[key] != n
    ]


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
