"""Sequences that begin alike share one row: their tokens form a tree, and each token sees its own branch.

The options of a multiple-choice item differ in their last few tokens only. Laid out as a tree, the shots and
the question are computed once, in the same forward pass as all endings, with no cache to keep: a token's
position is its depth, and the mask lets it see its ancestors and itself. That is the same arithmetic as one
sequence at a time, up to the order of floating-point sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eval.core_prompts import Span

WORTH = 0.5  # share a row when at least this part of the longer sequence is common


@dataclass
class Row:
    """A tree of sequences, its nodes in the order in which they were added; S nodes."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    """For each sequence, the nodes of its tokens but the last, which nothing reads."""
    shared: list[int] = field(default_factory=list)
    """For each sequence, how many of its nodes it shares with the one before."""
    spans: list[int] = field(default_factory=list)
    """For each sequence, its number among the requests."""

    def add(self, number: int, tokens: Sequence[int], shared: int) -> None:
        """Append a sequence whose first `shared` nodes are those of the sequence added last."""
        new = range(len(self.tokens), len(self.tokens) + len(tokens) - shared)
        path = (self.paths[-1][:shared] if self.paths else []) + list(new)
        self.tokens.extend(tokens[shared:])
        self.positions.extend(range(shared, len(tokens)))
        self.paths.append(path)
        self.shared.append(shared)
        self.spans.append(number)

    def visible(self) -> np.ndarray:
        """(S, S) bool: whether node q sees node k, that is, k is q or an ancestor of q."""
        size = len(self.tokens)
        visible_SS = np.zeros((size, size), dtype=bool)
        for path, shared in zip(self.paths, self.shared, strict=True):
            new = path[shared:]
            if new:
                first, end = new[0], new[-1] + 1
                visible_SS[first:end, path[:shared]] = True
                visible_SS[first:end, first:end] = np.tri(end - first, dtype=bool)
        return visible_SS


def pack(spans: Sequence[Span], longest_row: int, share: bool = True) -> list[Row]:
    """Rows of at most `longest_row` nodes that hold every span. Without `share`, one row for each."""
    inputs = [span.tokens[:-1] for span in spans]
    rows: list[Row] = []
    previous: Sequence[int] = ()
    for number in sorted(range(len(spans)), key=inputs.__getitem__):
        tokens = inputs[number]
        if len(tokens) > longest_row:
            raise ValueError(f"a sequence of {len(tokens)} tokens does not fit a row of {longest_row}")
        common = _common(previous, tokens) if share and rows else 0
        fits = bool(rows) and len(rows[-1].tokens) + len(tokens) - common <= longest_row
        if not fits or common < WORTH * max(len(tokens), len(previous)) or common == 0:
            rows.append(Row())
            common = 0
        rows[-1].add(number, tokens, common)
        previous = tokens
    return rows


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of similar length together; a batch, padded to its longest row, has at most `max_tokens` tokens
    (or one row)."""
    result: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        width = len(result[-1][0].tokens) if result else 0
        if result and width * (len(result[-1]) + 1) <= max_tokens:
            result[-1].append(row)
        else:
            result.append([row])
    return result
