"""A small tokenizer, a small random Laneformer and hand-made tasks, for tests of evaluation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from data_mixtures.tokenizer import Tokenizer, train_tokenizer
from eval.adapter import Score
from eval.core_prompts import Span
from eval.core_tasks import Item, Kind, Task, TaskData
from eval.results import sha256_file
from model.laneformer import Laneformer, build_model
from tests.architectures import architecture

CORE_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "core"
NO_CORE_DATA = "the DCLM CORE task files are not in ../shared/data/core"

VOCABULARY = 384
TEXT = "the quick brown fox jumps over the lazy dog and a cat sat on the mat. Answer: question choice "


def small_tokenizer(folder: Path) -> Tokenizer:
    words = TEXT.split()
    lines = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    return train_tokenizer(lines, folder / "tokenizer.model", VOCABULARY)


def small_model(longest: int = 128, window: int | None = 12, vocab_size: int = VOCABULARY) -> Laneformer:
    """Four layers with delayed exchange, two of them with a sliding window; weights large enough that
    contexts matter."""
    sizes = architecture(
        vocab_size=vocab_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_lanes=2,
        broadcast_delay=1,
        sliding_window=window,
        swa_layers=(0, 2) if window else (),
        max_position_embeddings=longest,
    )
    model = build_model(sizes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15, generator=generator)
    return model


class CharEncoder:
    """One token for each character (its code point); BOS is 1. " a" is two tokens: no space is added."""

    bos_id = 1

    def __init__(self, longest: int = 100_000):
        self.longest = longest

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_start(self, text: str) -> list[int]:
        return [self.bos_id, *self.encode(text)]

    @staticmethod
    def text(tokens: tuple[int, ...] | list[int]) -> str:
        return "".join("^" if t == 1 else chr(t) if t < 0x110000 else " " + chr(t - 0x110000) for t in tokens)


class SpaceEncoder(CharEncoder):
    """Like CharEncoder, but a space and the letter after it are one token, as in byte-pair vocabularies."""

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for c in text:
            if tokens and tokens[-1] == ord(" ") and c.isalpha():
                tokens[-1] = 0x110000 + ord(c)
            else:
                tokens.append(ord(c))
        return tokens


def make_task(kind: Kind, items: list[Item], **changes: Any) -> TaskData:
    values: dict[str, Any] = {
        "name": "hand_made",
        "kind": kind,
        "shots": 0,
        "items": len(items),
        "baseline": 0.0,
        "baseline_v2": 0.0,
        "file": "hand_made",
    }
    return TaskData(Task(**values | changes), Path("hand_made.jsonl"), tuple(items), "0" * 64)


def write_items(file: Path, items: list[Item], opener: Callable[..., Any] = open) -> None:
    with opener(file, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(item) + "\n" for item in items)


class HashScorer:
    """A scorer without a model: a span's score is drawn from its tokens, so the same span scores the same.

    `die_after` calls of score, it raises Killed.
    """

    def __init__(self, die_after: int | None = None):
        self.encoder = SpaceEncoder()
        self.die_after = die_after
        self.scored = 0

    def score(self, spans: Sequence[Span]) -> list[Score]:
        if self.die_after is not None:
            self.die_after -= 1
            if self.die_after < 0:
                raise Killed
        self.scored += len(spans)
        scores = []
        for span in spans:
            draw = random.Random(repr(span))
            count = len(span.tokens) - span.start
            scores.append(Score(draw.random() * count, count, draw.random() < 0.4))
        return scores


class Killed(BaseException):
    """Like SIGKILL, nothing catches it."""


def write_core_data(folder: Path, copies: int = 1) -> None:
    """Small task files: copa (2 options), winograd (schema), lambada_openai and jeopardy_all (two categories)."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(20 * copies)
    write_items(
        folder / "copa.jsonl",
        [{"query": f"q {i}", "choices": [f"left {i}", "right"], "gold": i % 2} for i in numbers],
    )
    write_items(
        folder / "winograd_wsc.jsonl",
        [
            {"context_options": [f"a {i}", f"b {i}"], "continuation": "was it.", "gold": i % 2}
            for i in numbers
        ],
    )
    write_items(
        folder / "lambada_openai.jsonl", [{"context": f"w {i}", "continuation": "end"} for i in numbers]
    )
    write_items(
        folder / "jeopardy_all.jsonl",
        [{"context": f"j {i}", "continuation": "x", "category": "ab"[i % 4 == 0]} for i in numbers],
    )


def fake_checkpoint(run: Path, step: int) -> Path:
    """A directory that counts as a complete checkpoint, without weights."""
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    for name in ("model.json", "tokenizer.model", ".metadata"):
        (folder / name).write_bytes(b"")
    return _with_manifest(folder, step)


def _with_manifest(folder: Path, step: int) -> Path:
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in folder.iterdir()
    }
    manifest = {"format": "laneformer-checkpoint", "version": 1, "step": step, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_checkpoint(run: Path, step: int, tokenizer: Tokenizer, longest: int = 128) -> Path:
    """A complete checkpoint of `small_model` in the format of a training run."""
    model = small_model(longest)
    folder = run / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
    (folder / "model.json").write_text(json.dumps(model.sizes.to_dict()))
    (folder / "tokenizer.model").write_bytes(tokenizer.path.read_bytes())
    return _with_manifest(folder, step)
