"""What decodes one sequence in one process: rows of the first table of tests/benchmarks/decode.py.

Ours, the exported model and the bare linear maps have one set of random weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from model.config import LaneformerConfig
from model.decode import generate
from model.delayed_tp import LaneGroup
from model.exchange import Alone
from model.hf import to_released


@dataclass(frozen=True)
class Run:
    seconds_per_token: float
    """After the first one."""
    seconds_to_first: float | None = None


@dataclass(frozen=True)
class Contestant:
    name: str
    bytes_per_token: int
    """Weights read for one token."""
    run: Callable[[list[int], int], Run]
    """Continue a prompt by so many tokens."""


def reader(size: int) -> Contestant:
    """A read of `size` bytes as fast as this machine does it: the square of a vector's length, by MKL."""
    x = torch.ones(size // 4)

    def run(prompt: list[int], tokens: int) -> Run:
        begin = time.perf_counter()
        torch.dot(x, x)
        return Run(time.perf_counter() - begin)

    return Contestant("memory read", x.nbytes, run)


def linear_maps(config: LaneformerConfig, state: dict[str, torch.Tensor], dtype: torch.dtype) -> Contestant:
    """F.linear with all weights but the embedding, each in the shape that one lane would have, and nothing else."""
    weights = [
        # A lane's output maps are (L·D, I); of one lane they would be (D, L·I).
        tensor.reshape(config.hidden_size, -1) if name.endswith(("wo.weight", "w2.weight")) else tensor
        for name, tensor in state.items()
        if tensor.ndim == 2 and "tok_embeddings" not in name
    ]
    weights = [weight.to(dtype) for weight in weights]
    inputs = {weight.shape[1]: torch.ones(1, weight.shape[1], dtype=dtype) for weight in weights}

    @torch.inference_mode()
    def run(prompt: list[int], tokens: int) -> Run:
        begin = time.perf_counter()
        for _ in range(tokens):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
        return Run((time.perf_counter() - begin) / tokens)

    name = f"F.linear alone, {short(dtype)}"
    return Contestant(name, sum(weight.nbytes for weight in weights), run)


def ours(config: LaneformerConfig, state: dict[str, torch.Tensor], kind: str) -> Contestant:
    group = LaneGroup(config, lambda name: state[name], Alone(), torch.float32, kind)

    def run(prompt: list[int], tokens: int) -> Run:
        _, timing = generate(group, [prompt], lambda ids: "", max_new_tokens=tokens)
        return Run(1 / timing.tokens_per_second, timing.seconds_to_first_token)

    return Contestant(f"ours, {kind}", group.weight_bytes() - group.embedding_VD.nbytes, run)


def exported(
    config: LaneformerConfig, state: dict[str, torch.Tensor], dtype: torch.dtype, name: str
) -> Contestant:
    """The code and weights of an exported folder, under transformers' generate with its cache."""
    from transformers.generation.streamers import BaseStreamer

    from model.hf_files.configuration_laneformer import LaneformerConfig as ExportedConfig
    from model.hf_files.modeling_laneformer import LaneformerForCausalLM

    with torch.device("meta"):
        model: Any = LaneformerForCausalLM(ExportedConfig(**config.to_dict()))
    model = model.to(dtype).to_empty(device="cpu")
    released = to_released(state, config)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            parameter.copy_(released.pop(key))
    model.eval()

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:  # the prompt, then each token
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompt: list[int], tokens: int) -> Run:
        clock, begin = Clock(), time.perf_counter()
        ids = torch.tensor([prompt])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        _, first, *_, last = clock.times
        return Run((last - first) / (tokens - 1), first - begin)

    return Contestant(name, config.decode_bytes(dtype.itemsize), run)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
