"""Activation checkpointing: the same bits, what it keeps and what it computes again.

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
from model.parallelize import set_checkpointing

POLICIES = ["none", "selective", "segments:1", "segments:2", "segments:3", "segments:4", "segments:6"]
TOKENS = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
LAYERS = 12


def sizes(**change: Any) -> LaneformerConfig:
    shape = {"num_hidden_layers": LAYERS, "vocab_size": 64, "swa_layers": [0, 1, 2, 3]}
    return LaneformerConfig.from_dict({**load_size("smoke").to_dict(), **shape, **change})


def built(policy: str, config: LaneformerConfig) -> Laneformer:
    model = build_model(config)
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
        {"num_lanes": 1, "broadcast_delay": 0},
    ],
    ids=str,
)
def test_gradients_are_those_without_checkpointing_to_the_bit(change: dict[str, Any]):
    config = sizes(**change)
    expected = gradients(built("none", config))
    assert len(expected) == len(list(built("none", config).parameters()))
    for policy in ("selective", "segments:1", "segments:3", "segments:5", "segments:99"):
        got = gradients(built(policy, config))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), policy


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
    assert kept["selective"] < 0.5 * kept["none"]
    order = [kept[policy] for policy in POLICIES]
    assert order == sorted(order, reverse=True)
    # A boundary between segments of three carries the residual, four partials under way, and those that arrive
    # with the SwiGLU output still to be added: six wide tensors at three boundaries (and one at the start).
    assert kept["segments:3"] == pytest.approx((3 * 6 + 1) / LAYERS, rel=0.2)
    assert 1.25 < work["segments:3"] / work["none"] < 1.34


def test_partials_that_nobody_awaits_are_not_kept():
    """Without exchange of SwiGLU outputs a boundary carries one of them, still to be added, and not three more."""
    size = {}
    for comm in (True, False):
        config = sizes(use_mlp_comm=comm)
        model = built("segments:3", config)
        size[comm], _ = kept_bytes(model, lambda model=model: model(TOKENS))
    wide = config.num_lanes * TOKENS.numel() * config.hidden_size * 4
    assert size[True] - size[False] == 3 * 2 * wide  # at three boundaries: one under way, and one arriving


def test_compiled_blocks_keep_less_and_compute_no_product_again():
    config = sizes(num_hidden_layers=4)
    kept, products = {}, {}
    for policy in ("none", "selective"):
        torch._dynamo.reset()
        model = built(policy, config)
        for layer in model.layers.values():
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        kept[policy], logits = kept_bytes(model, lambda model=model: model(TOKENS))
        with profile() as record:
            logits.sum().backward()
        products[policy] = sum(event.count for event in record.key_averages() if event.key == "aten::bmm")
    assert kept["selective"] < 0.75 * kept["none"], kept
    assert products["selective"] == products["none"] == 4 * 4 * 2  # layers, linear maps, input and weight


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
