"""A tiny prepared data set and run configurations over it, for tests of training.

Sources: `prose` (words in a row) and `code` (arithmetic statements), from a seeded generator, with a 384-piece
tokenizer trained on them. A run takes 20 steps of 4 sequences of 32 tokens with a model of 4 layers and 4 lanes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from data_mixtures.shards import ShardWriter, token_dtype, write_manifest
from data_mixtures.tokenizer import Tokenizer, train_tokenizer
from train.config import RunConfig, compose

SENTENCE = "the lane hears its neighbours two layers late and adds what they said to its own stream"
WORDS = SENTENCE.split()
VOCABULARY = 384

MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "num_lanes": 4,
    "sliding_window": 16,
    "swa_layers": "[0,1]",
    "max_position_embeddings": 64,
}


def documents(source: str, count: int, seed: int) -> list[str]:
    draw = random.Random(f"{source}/{seed}")
    if source == "prose":
        return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + "." for _ in range(count)]
    lines = [
        [f"x{draw.randint(0, 9)} = {draw.randint(0, 99)} + {draw.randint(0, 99)}"] * 1
        for _ in range(9 * count)
    ]
    return ["\n".join(line[0] for line in lines[9 * i : 9 * i + draw.randint(2, 9)]) for i in range(count)]


def write_split(directory: Path, source: str, split: str, texts: list[str], tokenizer: Tokenizer) -> None:
    directory.mkdir(parents=True)
    writer = ShardWriter(directory, "shard-00000", token_dtype(tokenizer.vocab_size))
    for text in texts:
        writer.add(tokenizer.encode(text, bos=True, eos=True), len(text.encode()))
    write_manifest(
        directory,
        source=source,
        split=split,
        origin={"licence": "made for tests"},
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        shards=[writer.close()],
        dropped={},
    )


def write_data(root: Path) -> Path:
    """Prepare both sources under `root`; returns it."""
    texts = {source: documents(source, 150, 0) for source in ("prose", "code")}
    tokenizer = train_tokenizer(
        [t for group in texts.values() for t in group], root / "tokenizer.model", VOCABULARY
    )
    for source, group in texts.items():
        write_split(root / source / "train", source, "train", group, tokenizer)
        write_split(root / source / "validation", source, "validation", documents(source, 20, 1), tokenizer)
    return root


def tiny_config(data: Path, runs: Path, *overrides: str, ranks: int = 1, steps: int = 20) -> RunConfig:
    """A run over `write_data`'s sources: 4 sequences of 32 tokens a step, a checkpoint every 5 steps."""
    return compose([*tiny_words(data, runs, ranks, steps), *overrides])


def tiny_words(data: Path, runs: Path, ranks: int = 1, steps: int = 20) -> list[str]:
    """`tiny_config` as a user would type it."""
    return [
        "experiment=smoke_phase1",
        "name=tiny",
        f"runs={runs}",
        *(f"model.{key}={value}" for key, value in MODEL.items()),
        f"data.root={data}",
        f"data.tokens={steps * 4 * 32}",
        "data.max_epochs=20",
        "~data.weights",
        "+data.weights={prose:0.7,code:0.3}",
        "train.seq_len=32",
        "train.global_batch_size=4",
        f"train.local_batch_size={min(2, 4 // ranks)}",
        "optim.warmup_tokens=512",
        "optim.decay_tokens=512",
        "checkpoint.every_steps=5",
        "checkpoint.keep_latest=10",
        "validation.every_steps=0",
        "metrics.every_steps=1",
        "metrics.tensorboard=false",
        "metrics.wandb=false",
        f"cluster.ranks_per_node={ranks}",
        "cluster.threads_per_rank=1",
        "cluster.step_timeout_seconds=60",
    ]
