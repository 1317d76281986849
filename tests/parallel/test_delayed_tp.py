"""Decoding over several processes gives what one process gives, for every variant of the architecture.

The reference is the training model's forward over whole sequences, which has no cache and no exchange. Greedy
tokens are checked against it by teacher forcing: if every token is the likeliest after those before it, the
sequence is what greedy decoding with the reference gives.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.config import LaneformerConfig
from model.decode import Decoder, Sampling
from model.delayed_tp import LaneGroup
from model.exchange import Alone, Exchange, GroupExchange, SocketExchange
from model.laneformer import Laneformer, build_model
from model.sockets import connect
from tests.architectures import SMALL
from tests.ranks import run_ranks

BASE: dict[str, Any] = SMALL | {
    "vocab_size": 97,  # not divisible by the processes
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_lanes": 8,
    "sliding_window": 24,
    "max_position_embeddings": 320,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "no delay": {"broadcast_delay": 0},
    "delay of one": {"broadcast_delay": 1},
    "delay of three": {"broadcast_delay": 3},
    "delay of the depth": {"broadcast_delay": 5},
    "early comm": {"use_early_comm": True},
    "no attention comm": {"use_attention_comm": False},
    "no mlp comm": {"use_mlp_comm": False},
    "lane head": {"lm_head_type": "lane"},
    "vocab parallel head": {"lm_head_type": "vocab_parallel", "vocab_size": 96},
    "lane norms": {"replicated_rmsn_scale": False},
    "norm of the sum": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
    "tied": {"tie_word_embeddings": True},
    "no windows": {"sliding_window": None, "swa_layers": []},
    "all heads": {"num_key_value_heads": 16},
}
# Shorter and longer than the window of 24, and, with the new tokens, up to the whole context.
SHORT, LONG, FULL = 5, 61, 320 - 256
BATCHES = {"one": [FULL], "four": [SHORT, LONG, 1, FULL]}


def config_of(variant: str) -> LaneformerConfig:
    return LaneformerConfig.from_dict(BASE | VARIANTS[variant])


def model_of(variant: str) -> Laneformer:
    return build_model(config_of(variant), init_seed=3).requires_grad_(False).eval()


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def this_exchange(carrier: str) -> Exchange:
    """The exchange of this rank, by the environment that torchrun gives."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return Alone()
    if carrier == "gloo":
        dist.init_process_group("gloo")
        return GroupExchange()
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=60)))
    return SocketExchange(connect(store, rank, size, timeout=60))


def decode(group: LaneGroup, lengths: list[int], new: int, sampling: Sampling) -> dict[str, torch.Tensor]:
    """The tokens drawn (B, new) and this process's slice of the logits before each (new, B, V)."""
    decoder = Decoder(group, [prompt_of(length) for length in lengths], new)
    generators, tokens, logits = sampling.generators(len(lengths)), [], []
    logits_BV = decoder.prefill(None if len(lengths) == 1 else 7)
    for i in range(new):
        logits.append(logits_BV.clone())
        tokens_B, _ = decoder.draw(logits_BV, sampling, generators, cancel=False)
        tokens.append(tokens_B.clone())
        if i < new - 1:
            logits_BV = decoder.advance(tokens_B[:, None])
    return {"tokens": torch.stack(tokens, 1), "logits": torch.stack(logits)}


def decode_all(out: Path, variants: list[str], new: int, carrier: str, temperature: float) -> None:
    """On every rank: all variants and batches; results go to files."""
    exchange = this_exchange(carrier)
    sampling = Sampling(temperature=temperature, top_p=0.9 if temperature else 1.0, seed=11)
    for variant in variants:
        group = LaneGroup.of(model_of(variant), exchange)
        results = {name: decode(group, lengths, new, sampling) for name, lengths in BATCHES.items()}
        torch.save(results, out / f"{variant}-{exchange.rank}.pt")
    exchange.close()


def results_of(out: Path, variant: str, size: int, batch: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, new), the same on all ranks, and whole logits (new, B, V)."""
    ranks = [torch.load(out / f"{variant}-{rank}.pt")[batch] for rank in range(size)]
    for rank in ranks[1:]:
        torch.testing.assert_close(rank["tokens"], ranks[0]["tokens"], rtol=0, atol=0)
    return ranks[0]["tokens"], torch.cat([rank["logits"] for rank in ranks], dim=-1)


def check(out: Path, variant: str, size: int, greedy: bool = True) -> None:
    model = model_of(variant)
    for batch, lengths in BATCHES.items():
        tokens, logits = results_of(out, variant, size, batch)
        for row, length in enumerate(lengths):
            whole = prompt_of(length) + tokens[row].tolist()
            expected = model(torch.tensor([whole[:-1]]))[0, length - 1 :]
            torch.testing.assert_close(logits[:, row], expected, rtol=0, atol=1e-4)
            if greedy:
                assert tokens[row].tolist() == expected.argmax(-1).tolist(), (variant, batch, row)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_tokens_and_logits_of_the_single_process_model(size: int, tmp_path: Path) -> None:
    """All variants for 24 tokens, and the released one for 256, up to the last position of the context."""
    run_ranks(size, tmp_path / "log", decode_all, tmp_path, list(VARIANTS), 24, "sockets", 0.0)
    for variant in VARIANTS:
        check(tmp_path, variant, size)
    (whole := tmp_path / "256").mkdir()
    run_ranks(size, tmp_path / "log", decode_all, whole, ["as released"], 256, "sockets", 0.0)
    check(whole, "as released", size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_256_tokens_of_every_variant(size: int, tmp_path: Path) -> None:
    run_ranks(size, tmp_path / "log", decode_all, tmp_path, list(VARIANTS), 256, "sockets", 0.0, timeout=1200)
    for variant in VARIANTS:
        check(tmp_path, variant, size)


def test_gloo_carries_the_same(tmp_path: Path) -> None:
    """The carrier that GPUs use through NCCL."""
    variants = ["as released", "early comm", "lane head"]
    run_ranks(2, tmp_path / "log", decode_all, tmp_path, variants, 24, "gloo", 0.0)
    for variant in variants:
        check(tmp_path, variant, 2)


def test_sampled_tokens_are_those_of_one_process(tmp_path: Path) -> None:
    variants = ["as released", "vocab parallel head"]
    run_ranks(4, tmp_path / "log", decode_all, tmp_path, variants, 40, "sockets", 1.0)
    for variant in variants:
        check(tmp_path, variant, 4, greedy=False)
        group, sampling = LaneGroup.of(model_of(variant)), Sampling(temperature=1.0, top_p=0.9, seed=11)
        for batch, lengths in BATCHES.items():
            alone = decode(group, lengths, 40, sampling)["tokens"]
            tokens, _ = results_of(tmp_path, variant, 4, batch)
            assert tokens.tolist() == alone.tolist()
            assert tokens[0].unique().numel() > 20  # it did sample
