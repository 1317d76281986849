"""Sharing beginnings changes nothing: trees of sequences score as the sequences do one by one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.adapter import LaneformerScorer
from eval.core_prompts import Span
from eval.packing import batches, pack
from tests.unit.eval_fixtures import VOCABULARY, small_model, small_tokenizer


def some_spans(seed: int, longest: int) -> list[Span]:
    """Groups with long common beginnings, sequences of their own, duplicates, and one-token endings."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCABULARY) for _ in range(count))

    spans = []
    for _ in range(6):
        common = (1, *tokens(draw.randint(5, longest // 2)))
        endings = [tokens(draw.randint(1, 6)) for _ in range(draw.randint(2, 4))]
        spans += [Span(common + ending, len(common)) for ending in endings]
        longer = common + endings[0] + tokens(9)  # goes on where another sequence ends
        spans.append(Span(longer, len(common) + 2))
        spans.append(spans[-1])
    spans += [Span((1, *tokens(n)), n) for n in (1, 2, longest - 1)]
    return spans


def one_by_one(model: torch.nn.Module, span: Span) -> tuple[float, bool]:
    """−Σ log p and greedy agreement from a plain forward over the whole sequence."""
    logits = model(torch.tensor([span.tokens]))[0].double().log_softmax(-1)
    targets = torch.tensor(span.tokens[span.start :])
    predicted = logits[span.start - 1 : -1]
    return -predicted.gather(1, targets[:, None]).sum().item(), bool((predicted.argmax(-1) == targets).all())


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("share", [True, False])
def test_scores_equal_one_by_one(tmp_path: Path, window: int | None, share: bool) -> None:
    model = small_model(longest=64, window=window)
    spans = some_spans(0, 64)
    scorer = LaneformerScorer(model, small_tokenizer(tmp_path), batch_tokens=200, share=share)
    scores = scorer.score(spans)
    with torch.inference_mode():
        for span, score in zip(spans, scores, strict=True):
            nll, greedy = one_by_one(model, span)
            assert abs(score.nll - nll) < 1e-5 * max(1.0, nll)
            assert score.count == len(span.tokens) - span.start
            assert score.greedy == greedy


def test_greedy_is_seen(tmp_path: Path) -> None:
    model = small_model(longest=64)
    tokens = [1, 7, 9]
    with torch.inference_mode():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    scorer = LaneformerScorer(model, small_tokenizer(tmp_path))
    wrong = [*tokens[:-1], (tokens[-1] + 1) % VOCABULARY]
    scores = scorer.score([Span(tuple(tokens), 3), Span(tuple(wrong), 3)])
    assert [score.greedy for score in scores] == [True, False]


def test_row_is_a_tree() -> None:
    spans = [Span((1, 5, 6, 7, 8), 4), Span((1, 5, 6, 9, 8), 3), Span((1, 5, 6, 7, 2), 4)]
    (row,) = pack(spans, 64)
    # Inputs are the sequences without their last token: 1 5 6 7 (twice the same) and 1 5 6 9.
    assert row.tokens == [1, 5, 6, 7, 9]
    assert row.positions == [0, 1, 2, 3, 3]
    assert dict(zip(row.spans, row.paths, strict=True)) == {0: [0, 1, 2, 3], 2: [0, 1, 2, 3], 1: [0, 1, 2, 4]}
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert np.array_equal(row.visible(), np.array(seen, dtype=bool))


def test_rows_and_batches_keep_their_limits() -> None:
    spans = some_spans(1, 64)
    rows = pack(spans, 64)
    assert sorted(number for row in rows for number in row.spans) == list(range(len(spans)))
    assert max(len(row.tokens) for row in rows) <= 64
    assert len(rows) < len(spans) / 2, "little was shared"
    for batch in batches(rows, 150):
        widest = max(len(row.tokens) for row in batch)
        assert len(batch) == 1 or widest * len(batch) <= 150


def test_unrelated_sequences_get_rows_of_their_own() -> None:
    assert len(pack([Span((1, 2, 3, 4), 1), Span((1, 8, 9, 10), 1)], 64)) == 2


def test_too_long_for_a_row() -> None:
    with pytest.raises(ValueError, match="10 tokens does not fit a row of 8"):
        pack([Span(tuple(range(11)), 1)], 8)
