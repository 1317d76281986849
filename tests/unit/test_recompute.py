"""Activation checkpointing: the same gradients, what it keeps and what it computes again.

Run with -s for the table of what each policy keeps.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from model.config import LaneformerConfig, load_size
from model.laneformer import Laneformer, build_model
from model.parallelize import configure_compiler, set_checkpointing

POLICIES = ["none", "selective", "segments:1", "segments:2", "segments:3", "segments:4", "segments:6"]
TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
LAYERS = 12


def sizes(**change: Any) -> LaneformerConfig:
    shape = {"num_hidden_layers": LAYERS, "vocab_size": 64, "swa_layers": [0, 1, 2, 3]}
    return LaneformerConfig.from_dict({**load_size("smoke").to_dict(), **shape, **change})


def built(policy: str, config: LaneformerConfig, dtype: torch.dtype = torch.float32) -> Laneformer:
    model = build_model(config, dtype)
    set_checkpointing(model, policy)
    return model


def gradients(model: Laneformer) -> list[torch.Tensor]:
    (model(TOKENS) ** 2).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"broadcast_delay": 0},
        {"broadcast_delay": 1, "use_early_comm": True},
        {"broadcast_delay": 3, "use_attention_comm": False},
        {"broadcast_delay": 5, "use_mlp_comm": False, "replicated_rmsn_scale": False},
        {"broadcast_delay": 12},
        {"broadcast_delay": 2, "use_early_comm": True, "use_attention_comm": False},
        {"broadcast_delay": 2, "use_attention_comm": False, "use_mlp_comm": False},
        {"num_lanes": 1, "broadcast_delay": 0},
    ],
    ids=str,
)
def test_gradients_are_those_without_checkpointing(change: dict[str, Any]):
    """To the bit; with segments, which put the residual together anew, to what float64 rounds."""
    config = sizes(**change)
    for dtype, policies in (
        (torch.float32, ["selective"]),
        (torch.float64, ["segments:1", "segments:3", "segments:5", "segments:99"]),
    ):
        expected = gradients(built("none", config, dtype))
        assert len(expected) == len(list(built("none", config).parameters()))
        for policy in policies:
            got = gradients(built(policy, config, dtype))
            for a, b in zip(got, expected, strict=True):
                bound = 0 if policy == "selective" else 1e-12 * b.abs().max()
                assert (a - b).abs().max() <= bound, policy


def test_segments_compute_the_same_bits_again():
    """What backward computes again starts from the tensors that forward started from."""
    model, seen = built("segments:3", sizes()), []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
        for block in model.layers.values()
    ]
    gradients(model)
    assert len(seen) == 2 * len(hooks)
    forward, again = seen[:LAYERS], seen[LAYERS:]
    for i, x in enumerate(again):  # the last segment first
        segment = LAYERS // 3 - 1 - i // 3
        assert torch.equal(x, forward[3 * segment + i % 3])


def kept_bytes(model: Laneformer, run: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Bytes of activations that autograd keeps, each storage once and parameters left out; and the output."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holding them keeps addresses from being used again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    return sum(storage.nbytes() for storage in kept.values()), output


def test_what_is_kept_and_what_is_computed_again():
    """Kept, in wide tensors (L, T, D) a layer, and floating-point operations against no checkpointing."""
    config = sizes()
    wide = config.num_lanes * TOKENS.numel() * config.hidden_size * 4
    kept, work = {}, {}
    for policy in POLICIES:
        model = built(policy, config)
        with FlopCounterMode(display=False) as counter:
            size, logits = kept_bytes(model, lambda model=model: model(TOKENS))
            (logits**2).mean().backward()
        kept[policy], work[policy] = size / wide / LAYERS, counter.get_total_flops()
        print(f"{policy:12} {kept[policy]:5.2f} wide tensors a layer, work {work[policy] / work['none']:.3f}")
    assert work["selective"] == work["none"], "a matrix product was computed again"
    # Two residuals a layer, qkv and its rotation and result, and the SwiGLU's projections without its product.
    assert kept["selective"] == pytest.approx(2 + (4 + 3) / 8 + 2 * 3 / 8, rel=0.05)
    assert kept["none"] == pytest.approx(kept["selective"] + 2 * 3 / 8, rel=0.02)
    order = [kept[policy] for policy in POLICIES]
    assert order == sorted(order, reverse=True)
    # A boundary between segments of three carries four partials under way and one stream for all lanes; beside them
    # stand the embedding, the lanes' own rest, which changes in the first two segments, and the last residual.
    assert kept["segments:3"] == pytest.approx((3 * (4 + 1 / 8) + 1 / 8 + 2 + 1) / LAYERS, rel=0.05)
    assert 1.25 < work["segments:3"] / work["none"] < 1.34


def test_partials_that_nobody_awaits_are_not_kept():
    """Without exchange of SwiGLU outputs a boundary carries none, but the rest that they leave in each lane."""
    size = {}
    for comm in (True, False):
        config = sizes(use_mlp_comm=comm)
        model = built("segments:3", config)
        size[comm], _ = kept_bytes(model, lambda model=model: model(TOKENS))
    wide = config.num_lanes * TOKENS.numel() * config.hidden_size * 4
    # At three boundaries: two SwiGLU outputs under way; a rest that changes in two segments, or in all three.
    assert size[True] - size[False] == 3 * 2 * wide + 2 * wide - 3 * wide


def test_compiled_blocks_keep_no_scaled_weights_and_compute_no_product_again():
    """With the compiler's settings: what it keeps without checkpointing is what `selective` keeps."""
    configure_compiler()
    config = sizes(num_hidden_layers=4)
    uncompiled, _ = kept_bytes(model := built("selective", config), lambda: model(TOKENS))
    for policy in ("none", "selective"):
        torch._dynamo.reset()
        model = built(policy, config)
        for layer in model.layers.values():
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        kept, logits = kept_bytes(model, lambda model=model: model(TOKENS))
        with profile() as record:
            logits.sum().backward()
        names = ("aten::bmm", "aten::baddbmm")
        products = sum(event.count for event in record.key_averages() if event.key in names)
        assert kept == pytest.approx(uncompiled, rel=0.03), policy
        assert products == 4 * 4 * 2  # layers, linear maps, input and weight


def test_nothing_is_kept_or_computed_again_without_gradients():
    model = built("segments:3", sizes())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(TOKENS)
    plain = built("none", sizes())
    with torch.no_grad(), FlopCounterMode(display=False) as expected:
        plain(TOKENS)
    assert counter.get_total_flops() == expected.get_total_flops()


@pytest.mark.parametrize("policy", ["full", "segments", "segments:0", "segments:-1", "segments:two", ""])
def test_other_policies_are_refused(policy: str):
    with pytest.raises(ValueError, match="must be none, selective or segments:N"):
        set_checkpointing(build_model(sizes()), policy)
