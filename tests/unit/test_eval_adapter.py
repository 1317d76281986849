"""Loading models: run checkpoints, Hugging Face folders (behind a stand-in for transformers), and neither."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval import adapter
from eval.adapter import (
    HuggingFaceEncoder,
    LaneformerScorer,
    Score,
    checkpoint_facts,
    checkpoint_step,
    load_scorer,
)
from eval.core_prompts import Span
from tests.unit.eval_fixtures import fake_checkpoint, small_model, small_tokenizer, write_checkpoint
from tests.unit.test_eval_packing import some_spans


def test_a_checkpoint_is_read_without_conversion(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    folder = write_checkpoint(tmp_path / "run", 3, tokenizer, longest=64)
    loaded = load_scorer(folder)
    direct = LaneformerScorer(small_model(64), tokenizer)
    spans = some_spans(2, 64)
    assert loaded.score(spans) == direct.score(spans)
    assert loaded.encoder.longest == 64
    assert loaded.encoder.encode_start("the fox") == [tokenizer.bos_id, *tokenizer.encode("the fox")]
    assert loaded.encoder.encode("the fox") == tokenizer.encode("the fox")
    assert checkpoint_step(folder) == 3


def test_the_head_is_put_back(tmp_path: Path) -> None:
    model = small_model(64)
    LaneformerScorer(model, small_tokenizer(tmp_path)).score([Span((1, 2, 3), 1)])
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, model.sizes.vocab_size)


def test_neither_kind_of_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a complete checkpoint .* nor a Hugging Face folder"):
        load_scorer(tmp_path)


def test_no_token_scored_never_wins() -> None:
    assert Score(0.0, 0, True).mean == float("inf")


class StandIn:
    """What transformers gives for a folder: a model that returns logits, and a tokenizer that adds both ends."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.asked: list[dict[str, Any]] = []
        self.AutoModelForCausalLM = SimpleNamespace(from_pretrained=self.load)
        self.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *a, **k: Ends())

    def load(self, folder: Path, **options: Any) -> Any:
        self.asked.append(options)
        return Causal(self.model)


class Causal(torch.nn.Module):
    config = SimpleNamespace(max_position_embeddings=64)

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        assert attention_mask.shape == tokens.shape
        return SimpleNamespace(logits=self.inner(tokens))


class Ends:
    bos_token_id, eos_token_id, name_or_path = 1, 2, "stand-in"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(c) for c in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_hugging_face_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(64)
    stand_in = StandIn(model)
    monkeypatch.setattr(adapter.importlib, "import_module", lambda name: stand_in)
    (tmp_path / "config.json").write_text("{}")
    scorer = load_scorer(tmp_path, batch_tokens=300)
    assert stand_in.asked[0]["trust_remote_code"] is False
    spans = some_spans(4, 64)
    expected = LaneformerScorer(model, small_tokenizer(tmp_path)).score(spans)
    for ours, theirs in zip(scorer.score(spans), expected, strict=True):
        assert ours.nll == pytest.approx(theirs.nll, abs=1e-4)
        assert (ours.count, ours.greedy) == (theirs.count, theirs.greedy)
    # The end token that this tokenizer puts behind every text must not stand in the middle of a prompt.
    assert scorer.encoder.encode_start("ab") == [1, 97, 98]
    assert scorer.encoder.encode("ab") == [97, 98]
    assert scorer.encoder.longest == 64


def test_transformers_is_asked_for_only_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(adapter.importlib, "import_module", missing)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="needs transformers: pip install transformers"):
        load_scorer(tmp_path)
    assert checkpoint_step(fake_checkpoint(tmp_path, 2)) == 2
    assert checkpoint_step(tmp_path) == 0


def test_a_tokenizer_without_bos_starts_with_eos() -> None:
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=7, name_or_path="x")
    assert HuggingFaceEncoder(tokenizer, SimpleNamespace()).bos_id == 7
    assert HuggingFaceEncoder(tokenizer, SimpleNamespace()).longest == 2048
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="neither BOS nor EOS"):
        HuggingFaceEncoder(tokenizer, SimpleNamespace())


def test_weights_are_identified(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = checkpoint_facts(tmp_path)
    (tmp_path / "README.md").write_text("about")
    assert checkpoint_facts(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert checkpoint_facts(tmp_path)["sha256"] != first["sha256"]
