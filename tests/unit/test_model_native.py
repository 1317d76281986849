"""The C functions of a decoding step against torch in float64, and the decoder with them against without."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from model import lane_steps, native
from model.config import LaneformerConfig
from model.decode import Decoder
from model.delayed_tp import LaneGroup
from model.kv_cache import KeyValueCache
from model.lane_steps import Buffers, Norm, attention, swiglu
from model.laneformer import build_model
from tests.unit.test_delayed_tp import BASE, architectures, ids

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler cc in PATH")
CPU = torch.device("cpu")


def both() -> tuple[Buffers, Buffers]:
    """Buffers with the compiled functions, and of float64, for which there are none."""
    fast, exact = Buffers(torch.float32, CPU), Buffers(torch.float64, CPU)
    assert fast.compiled is not None
    assert exact.compiled is None
    return fast, exact


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 7), (2, 5, 64), (8, 1, 100)])
@pytest.mark.parametrize("per_lane", [False, True])
def test_norm(shape: tuple[int, int, int], per_lane: bool) -> None:
    lanes, _, width = shape
    torch.manual_seed(width)
    x, scale = 3 * torch.randn(shape), torch.rand(width * (lanes if per_lane else 1)) + 0.5
    fast, exact = both()
    expected = Norm(scale.double(), width, 1e-3)(x.double(), exact)
    torch.testing.assert_close(Norm(scale, width, 1e-3)(x, fast).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 15, 16, 100])
def test_swiglu(width: int) -> None:
    """Gates far beyond where the exponential overflows included."""
    torch.manual_seed(width)
    x = torch.randn(2, 3, 2 * width)
    x[..., :width] *= torch.tensor([1.0, 20.0, 200.0])[:, None]
    fast, exact = both()
    expected = swiglu(x.double(), exact)
    torch.testing.assert_close(swiglu(x, fast).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(expected, F.silu(x.double()[..., :width]) * x.double()[..., width:])


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    lanes=st.integers(1, 3),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    half=st.sampled_from([1, 3, 8, 32]),
    before=st.integers(0, 13),
    window=st.sampled_from([None, 1, 5, 8]),
    padded=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_attention_of_one_column(
    batch: int,
    lanes: int,
    heads: int,
    group: int,
    half: int,
    before: int,
    window: int | None,
    padded: bool,
    threads: int,
    seed: int,
) -> None:
    """What it returns, and what the cache holds afterwards."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * half
    change = {
        "hidden_size": width * group * heads * lanes,
        "num_attention_heads": group * heads * lanes,
        "num_key_value_heads": heads * lanes,
        "num_lanes": lanes,
        "intermediate_size": 8 * lanes,
        "broadcast_delay": 0,
        "lm_head_type": "replicate",
        "num_hidden_layers": 1,
        "sliding_window": window,
        "swa_layers": [] if window is None else [0],
    }
    config = LaneformerConfig.from_dict(BASE | change)
    padding_B = torch.arange(batch) % (before + 1) if padded else torch.zeros(batch, dtype=torch.long)
    split = (width * group * heads, width * heads, width * heads)
    results, caches = [], []
    inputs = [
        torch.randn(lanes, batch * count, sum(split), generator=generator, dtype=torch.float64)
        for count in ([before, 1, 1] if before else [1, 1])
    ]
    threads_before, share = torch.get_num_threads(), lane_steps.SHARE
    torch.set_num_threads(threads)
    lane_steps.SHARE = 1
    try:
        for buffers in both():
            cache = KeyValueCache(config, padding_B, before + 2, torch.empty(0, dtype=buffers.dtype), lanes)
            out = torch.empty(0)
            table = torch.linspace(-1, 1, 20 * half, dtype=torch.float64).view(20, half)
            for x in inputs:
                at = cache.begin(x.shape[1] // batch)
                cos, sin = table.cos()[at].to(buffers.dtype), table.sin()[at].to(buffers.dtype)
                out = attention(x.to(buffers.dtype), cos, sin, cache.layers[0], split, buffers)
            results.append(out.double())
            caches.append((cache.layers[0].keys.double(), cache.layers[0].values.double()))
    finally:
        torch.set_num_threads(threads_before)
        lane_steps.SHARE = share
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(change=architectures(), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_decoder_with_and_without(change: dict[str, Any], lengths: list[int]) -> None:
    model = build_model(LaneformerConfig.from_dict(BASE | change)).requires_grad_(False).eval()
    vocabulary = model.sizes.vocab_size
    prompts = [[i % vocabulary for i in ids(length, seed)] for seed, length in enumerate(lengths)]
    logits: list[list[torch.Tensor]] = []
    for compiled in (True, False):
        group = LaneGroup.of(model)
        assert group.buffers.compiled is not None
        if not compiled:
            group.buffers.compiled = None
        decoder = Decoder(group, prompts, 8)
        seen = [decoder.prefill().clone()]
        for step in range(6):
            tokens = torch.full((len(prompts), 1), (7 * step) % vocabulary)
            seen.append(decoder.advance(tokens).clone())
        logits.append(seen)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


def test_functions_are_the_declared_ones() -> None:
    text = "".join(source.read_text() for source in native.SOURCES)
    for name in native.FUNCTIONS:
        assert f"void {name}(" in text
