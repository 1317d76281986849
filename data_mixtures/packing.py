"""Whole-document packing: which documents share a sequence of S tokens.

Best fit, longest first: each document goes where it leaves the least room, or opens a new sequence. Documents
longer than S are cut into pieces of S (and a rest). It is computed once, when preparing, and stored beside
the shards, so that an item of the loader is one pack. Packs do not cross shards. The order of packs means
nothing: the loader permutes them.

    packing-4096.bin    little-endian uint64: p+1 bounds of the packs in the list of pieces, then for each
                        piece its first token in the stream, then for each piece its length packing-4096.json
                        counts, the shares of padding and of cut documents, SHA-256, and the manifest it
                        belongs to
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures.shards import (
    ShardError,
    manifest_sha256,
    read_json,
    write_atomically,
    write_json,
)
from data_mixtures.token_stream import TokenStream


def pack_split(directory: Path, seq_len: int) -> dict[str, Any]:
    """Pack a prepared split into sequences of `seq_len` and store the result. Returns what is in the JSON
    file.

    Deterministic. `padded` and `cut` are shares: of all token places, and of all documents.
    """
    stream = TokenStream(directory)
    starts, lengths, sizes = [], [], [np.empty(0, np.int64)]
    cut = 0
    for k in range(stream.num_shards):
        offsets = stream.document_offsets(k).astype(np.int64)
        piece_starts, piece_lengths = _pieces(offsets, seq_len)
        cut += int((np.diff(offsets) > seq_len).sum())
        order, pack_sizes = best_fit(piece_lengths, seq_len)
        starts.append(piece_starts[order] + stream.shard_start(k))
        lengths.append(piece_lengths[order])
        sizes.append(pack_sizes)
    sizes_P = np.concatenate(sizes)
    bounds = np.concatenate([[0], np.cumsum(sizes_P)])
    content = np.concatenate([bounds, *starts, *lengths]).astype("<u8")
    written = write_atomically(_path(directory, seq_len, "bin"), [content.tobytes()])
    places = len(sizes_P) * seq_len
    packed = {
        "seq_len": seq_len,
        "items": len(sizes_P),
        "pieces": int(bounds[-1]),
        "padded": (places - stream.tokens) / max(1, places),
        "cut": cut / max(1, stream.documents),
        "manifest_sha256": manifest_sha256(stream.manifest),
        **written,
    }
    write_json(_path(directory, seq_len, "json"), packed)
    return packed


def best_fit(lengths_N: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit-decreasing bin packing of pieces of 1..capacity tokens.

    Returns (order int64 (N,): the pieces in the order of the bins, sizes int64 (P,): pieces in each bin).
    """
    # open_bins[r]: bins with r tokens of room; rooms: bit r is set where there are any, so that "the smallest
    # room of at least n" is one shift and one lowest-set-bit.
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    members: list[list[int]] = []
    for piece in np.argsort(-lengths_N, kind="stable").tolist():
        length = int(lengths_N[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            target = open_bins[room].pop()
            if not open_bins[room]:
                rooms &= ~(1 << room)
            members[target].append(piece)
        else:
            room, target = capacity, len(members)
            members.append([piece])
        if left := room - length:
            open_bins[left].append(target)
            rooms |= 1 << left
    order = np.array([piece for bin_ in members for piece in bin_], dtype=np.int64)
    return order, np.array([len(bin_) for bin_ in members], dtype=np.int64)


def read_packing(directory: Path, seq_len: int, of_manifest: str) -> dict[str, Any]:
    """What `pack_split` recorded. Raises ShardError when it is missing or was made for other shards."""
    path = _path(directory, seq_len, "json")
    source = directory.parent
    fix = f"run `python -m data_mixtures pack root={source.parent} source={source.name} seq_len={seq_len}`"
    if not path.exists():
        raise ShardError(f"{directory} is not packed for sequences of {seq_len} tokens; {fix}")
    packed = read_json(path)
    if packed["manifest_sha256"] != of_manifest:
        raise ShardError(f"{path} belongs to an earlier preparation of this source; {fix}")
    return packed


class PackFile:
    """The stored packing of a split, memory-mapped."""

    def __init__(self, directory: Path, seq_len: int, items: int) -> None:
        path = _path(directory, seq_len, "bin")
        recorded = read_json(_path(directory, seq_len, "json"))
        size = path.stat().st_size if path.exists() else -1
        if size != recorded["bytes"]:
            raise ShardError(
                f"{path} has {size} bytes, {recorded['bytes']} are expected; pack the source again"
            )
        content = np.memmap(path, dtype="<u8", mode="r").view(np.ndarray)
        pieces = recorded["pieces"]
        self._bounds = content[: items + 1]
        self._starts = content[items + 1 : items + 1 + pieces]
        self._lengths = content[items + 1 + pieces :]

    def pieces(self, item: int) -> list[tuple[int, int]]:
        """(first token in the stream, length) of each piece of a pack."""
        lo, hi = int(self._bounds[item]), int(self._bounds[item + 1])
        return list(zip(self._starts[lo:hi].tolist(), self._lengths[lo:hi].tolist(), strict=True))


def _pieces(offsets: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of documents, those longer than `seq_len` cut."""
    lengths = np.diff(offsets)
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[:-1][document] + part * seq_len
    return starts, np.minimum(seq_len, offsets[1:][document] - starts)


def _path(directory: Path, seq_len: int, ending: str) -> Path:
    return directory / f"packing-{seq_len}.{ending}"
