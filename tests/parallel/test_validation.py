"""Held-out losses: independent of the ranks, and equal to what the plain model gives sequence by sequence."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data_mixtures.loader import ValidationSet
from data_mixtures.tokenizer import Tokenizer
from model.laneformer import build_model
from tests.runs import train
from tests.tiny import tiny_config
from train.run_dir import RunDir

WORDS = ["validation.every_steps=10", "validation.sequences_per_source=7"]


@pytest.fixture(scope="module")
def one_rank(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return train(tiny_config(tiny_data, tmp_path_factory.mktemp("one"), *WORDS))


def values(run: RunDir) -> dict[int, dict[str, float]]:
    return {
        row["step"]: {key: value for key, value in row.items() if key.startswith("validation/")}
        for row in run.metric_rows("validation")
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_validation_does_not_depend_on_the_ranks(
    ranks: int, one_rank: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    """7 sequences do not divide by 2 or 4: the padding must not count."""
    expected, got = values(one_rank), values(train(tiny_config(tiny_data, tmp_path, *WORDS, ranks=ranks)))
    assert list(got) == list(expected) == [1, 10, 20]
    for step, row in expected.items():
        assert got[step] == pytest.approx(row, rel=1e-5)


def test_validation_does_not_disturb_training(one_rank: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    without = train(tiny_config(tiny_data, tmp_path))
    losses = [[row["loss"] for row in run.metric_rows("train")] for run in (one_rank, without)]
    assert losses[0] == losses[1]


def test_first_validation_equals_a_plain_computation(
    tiny_data: Path, tmp_path: Path, one_rank: RunDir
) -> None:
    """With a learning rate of nearly 0 the first validation sees the initial weights, which anyone can rebuild."""
    config = tiny_config(tiny_data, tmp_path, *WORDS, "optim.lr=1e-12", "optim.weight_decay=0")
    row = values(train(config))[1]
    model = build_model(config.model)
    bytes_V = torch.from_numpy(Tokenizer(tiny_data / "tokenizer.model").bytes_per_token())
    for source in ("prose", "code"):
        nats, tokens, size = 0.0, 0, 0
        for inputs, positions, labels in map(ValidationSet(tiny_data, source, 32, 7).__getitem__, range(7)):
            with torch.no_grad():
                logits = model(inputs[None], positions[None])[0]
            nats += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            predicted = labels[labels != -100]
            tokens += len(predicted)
            size += int(bytes_V[predicted].sum())
        assert row[f"validation/{source}/loss"] == pytest.approx(nats / tokens, rel=1e-5)
        assert row[f"validation/{source}/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
