"""Training sequences of one prepared source: item i → tokens, positions, labels.

Packing `concat`: item i is the window [i·S, (i+1)·S) of the stream of documents; the rest at the end that
fills no window is not used. Documents are cut where a window ends, none is padded.

In both packings positions restart at 0 with each document (and with each window), which is how attention is
kept within documents. A label is the next token of the same document; -100 where there is none or it is not
trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures.packing import PackFile, read_packing
from data_mixtures.recipe import Packing
from data_mixtures.shards import manifest_sha256, read_manifest
from data_mixtures.token_stream import TokenStream

IGNORE = -100  # the label that no loss is taken on, as in PyTorch


def source_items(directory: Path, seq_len: int, packing: Packing) -> tuple[int, str, dict[str, Any]]:
    """Items in one epoch of a split, a hash of what decides their content, and the split's manifest.

    Reads manifests only. Raises ShardError when the split is not prepared, or not packed for `seq_len`.
    """
    manifest = read_manifest(directory)
    sha256 = manifest_sha256(manifest)
    if packing == "concat":
        return manifest["tokens"] // seq_len, sha256, manifest
    packed = read_packing(directory, seq_len, sha256)
    return packed["items"], packed["sha256"], manifest


class SequenceReader:
    """Reads the items of one split. `items` is how many there are."""

    def __init__(self, directory: str | Path, seq_len: int, packing: Packing = "concat") -> None:
        self.directory = Path(directory)
        self.stream = TokenStream(self.directory)
        self.items, _, _ = source_items(self.directory, seq_len, packing)
        self._seq_len = seq_len
        self._packs = PackFile(self.directory, seq_len, self.items) if packing == "best_fit" else None

    def read(self, item: int, tokens_S: np.ndarray, positions_S: np.ndarray, labels_S: np.ndarray) -> None:
        """Fill three int64 rows with item `item`. Raises ShardError naming file and offset."""
        if not 0 <= item < self.items:
            raise IndexError(f"{self.directory} has {self.items} items, item {item} was asked for")
        if self._packs is None:
            first = item * self._seq_len
            self._fill(first, first + self._seq_len, tokens_S, positions_S, labels_S)
            return
        filled = 0
        for start, length in self._packs.pieces(item):
            piece = slice(filled, filled + length)
            self._fill(start, start + length, tokens_S[piece], positions_S[piece], labels_S[piece])
            filled += length
        # Padding is a document of its own that nothing is learned from.
        tokens_S[filled:] = 0
        positions_S[filled:] = np.arange(self._seq_len - filled)
        labels_S[filled:] = IGNORE

    def _fill(
        self, start: int, stop: int, tokens_N: np.ndarray, positions_N: np.ndarray, labels_N: np.ndarray
    ) -> None:
        """Fill rows with tokens [start, stop) of the stream; one more is read for the last label."""
        n = stop - start
        read, starts, mask = self.stream.read(start, min(stop + 1, self.stream.tokens))
        tokens_N[:] = read[:n]
        labels_N[: len(read) - 1] = read[1:]
        labels_N[len(read) - 1 :] = IGNORE
        if mask is not None:
            labels_N[: len(read) - 1][mask[1:] == 0] = IGNORE
        if len(starts) and starts[0] == 0:
            starts = starts[1:]
        labels_N[starts - 1] = IGNORE
        positions_N[:] = np.arange(n)
        inner = starts[starts < n]
        if len(inner):
            lengths = np.diff(inner, append=n)
            positions_N[inner[0] :] -= np.repeat(inner, lengths)
