"""Small prepared sources and tokenizers for the tests of the data package."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from data_mixtures.shards import ShardWriter, token_dtype, write_manifest
from data_mixtures.tokenizer import Tokenizer, train_tokenizer

VOCAB_SIZE = 500
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def lane(x, y):\n    return x * y + 42\n",
    "Numbers 1234567890 are split into digits. <|user|> <|assistant|> <|system|>",
    "é ü ß 日本語 \t tabs and   spaces",
] * 20


def small_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer like the smoke run's, trained in milliseconds."""
    return train_tokenizer(SENTENCES, path, vocab_size=VOCAB_SIZE)


def llama_like_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer with Llama 2's settings: it puts a space before each text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([line for text in SENTENCES for line in text.split("\n")]),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return Tokenizer(path)


def write_source(
    root: Path,
    source: str,
    documents: Sequence[Sequence[int]],
    *,
    split: str = "train",
    masks: Sequence[Sequence[int]] | None = None,
    per_shard: int = 1_000_000,
    tokenizer_sha256: str = "t" * 64,
) -> Path:
    """Store documents given as token ids; `per_shard` documents to a shard."""
    directory = root / source / split
    directory.mkdir(parents=True)
    entries = []
    for k, first in enumerate(range(0, len(documents), per_shard)):
        writer = ShardWriter(directory, f"shard-{k:05d}", token_dtype(32000))
        for i in range(first, min(first + per_shard, len(documents))):
            writer.add(documents[i], byte_length=3 * len(documents[i]), mask=masks[i] if masks else None)
        entries.append(writer.close())
    write_manifest(
        directory,
        source=source,
        split=split,
        origin={"licence": "none"},
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=32000,
        shards=entries,
        dropped={},
    )
    return directory


def random_documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """BOS + random ids + EOS, of random lengths from 2 on."""
    rng = np.random.default_rng(seed)
    return [[1, *rng.integers(3, 32000, rng.integers(0, longest)).tolist(), 2] for _ in range(count)]
