"""The built model: sizes, costs, initial weights, masks, and what TorchTitan asks of it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FlexAttention

from model.config import LaneformerConfig, load_size, size_names
from model.hf import internal_names, released_shapes
from model.initialisation import draw, standard_deviation
from model.laneformer import Laneformer, MaskedAttention, build_model
from model.lanes import increment, rotate
from model.masks import attention_masks, mask_function
from model.titan_spec import model_spec
from tests.architectures import SMALL

TINY: dict[str, Any] = SMALL | {
    "vocab_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "sliding_window": 4,
    "swa_layers": [0, 1],
    "max_position_embeddings": 16,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"lm_head_type": "lane"},
    {"lm_head_type": "vocab_parallel"},
    {"replicated_rmsn_scale": False},
    {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True},
    {"tie_word_embeddings": True},
    {"num_lanes": 1, "broadcast_delay": 0, "num_key_value_heads": 8},
]


def tiny(**change: Any) -> LaneformerConfig:
    return LaneformerConfig.from_dict({**TINY, **change})


def on_meta(config: LaneformerConfig) -> Laneformer:
    with torch.device("meta"):
        return Laneformer.Config.from_sizes(config).build()


# Sizes and costs


@pytest.mark.parametrize("name", size_names())
def test_parameter_count_of_shipped_sizes(name: str):
    config = load_size(name)
    model = on_meta(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()
    assert all(p.device.type == "meta" for p in model.parameters())
    if name == "2b":
        assert round(config.num_parameters() / 1e9, 2) == 2.32


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_parameter_count_and_names_of_variants(change: dict[str, Any]):
    config = tiny(**change)
    model = on_meta(config)
    model.verify_module_protocol()
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()
    assert set(model.state_dict()) == set(internal_names(config))
    # The released tensors hold the same numbers, a tied matrix once.
    assert sum(torch.Size(s).numel() for s in released_shapes(config).values()) == config.num_parameters()
    assert Laneformer.Config.from_sizes(config).get_nparams_and_flops(model, 16) == (
        config.num_parameters(),
        config.flops_per_token(16),
    )


@pytest.mark.parametrize("change", [*VARIANTS, {"broadcast_delay": 0}], ids=str)
def test_flops_match_what_runs(change: dict[str, Any]):
    config, seq = tiny(**change), 12
    model = build_model(config)
    masks = boolean_masks(torch.arange(seq)[None], config)

    def counted(backend: SDPBackend) -> int:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(backend):
            model(torch.zeros(1, seq, dtype=torch.long), attention_masks=masks).sum().backward()
        return counter.get_total_flops()

    # torch counts the unfused attention, as if every query saw every key, and the fused one not at all.
    weights = counted(SDPBackend.FLASH_ATTENTION)
    attention_of_one_layer = (counted(SDPBackend.MATH) - weights) / config.num_hidden_layers
    seen = [masks["swa" if i in config.swa_layers else "full"].float().mean().item() for i in range(4)]
    assert weights + attention_of_one_layer * sum(seen) == pytest.approx(config.flops_per_token(seq) * seq)
    assert config.flops_per_token(seq) * seq > weights


# Initial weights


def test_initial_weights_have_the_documented_spread():
    config = load_size("smoke")
    parameters = dict(build_model(config, init_seed=1).named_parameters())
    for name, parameter in parameters.items():
        std = standard_deviation(name, config)
        if std is None:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std
    assert parameters["layers.0.attention.wo.weight"].std().item() == pytest.approx(
        (128 * 12) ** -0.5, rel=0.03
    )
    assert parameters["layers.5.feed_forward.w2.weight"].std().item() == pytest.approx(
        (384 * 12) ** -0.5, rel=0.03
    )


def test_initial_weights_depend_on_seed_and_name_alone():
    config = tiny()
    first = build_model(config, init_seed=1).state_dict()
    torch.manual_seed(123)
    again = build_model(config, dtype=torch.float64, init_seed=1).state_dict()
    other = build_model(config, init_seed=2).state_dict()
    assert all(torch.equal(first[name].double(), again[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert not torch.equal(first["layers.0.attention.wo.weight"], first["layers.1.attention.wo.weight"])
    with pytest.raises(ValueError, match=r"no initial distribution .* layers\.0\.router\.weight"):
        draw("layers.0.router.weight", torch.Size([2]), config, 0)


def test_residual_variance_is_the_same_in_every_exchange():
    """Why initial weights need no factor for lanes: each exchange adds as much as the dense twin does."""
    spreads = []
    for change in (
        {"broadcast_delay": 0},
        {"broadcast_delay": 1},
        {"broadcast_delay": 2},
        {"broadcast_delay": 6},
        {"num_lanes": 1, "broadcast_delay": 0},
    ):
        sizes = load_size("smoke").to_dict() | {"replicated_rmsn_scale": False, **change}
        model = build_model(LaneformerConfig.from_dict(sizes))
        seen: list[torch.Tensor] = []
        model.norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            model(torch.randint(0, 4096, (4, 64), generator=torch.Generator().manual_seed(0)))
        embedded = model.tok_embeddings.weight.var().item()
        spreads.append(seen[0].var().item() - embedded)
    assert max(spreads) / min(spreads) < 1.15, spreads
    assert min(spreads) > 0.05


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """This process as rank 1 of 2, with collectives that do nothing; yields the mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    dist.destroy_process_group()


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_a_rank_keeps_its_shard_of_the_same_weights(two_ranks: Any, change: dict[str, Any]):
    config = tiny(**change)
    whole = build_model(config, init_seed=5).state_dict()
    model = Laneformer.Config.from_sizes(config, init_seed=5)
    with torch.device("meta"):
        sharded = model.build()
    fully_shard(sharded, mesh=two_ranks)
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        sharded.init_states()
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), whole[name].chunk(2)[1]), name


@pytest.mark.parametrize("policy", ["none", "selective", "segments:3"])
def test_parallelize_shards_every_block_and_keeps_weights(two_ranks: Any, policy: str):
    config = tiny()
    spec = model_spec(config, "tiny", init_seed=5, activation_checkpoint=policy)
    model = on_meta(config)
    parallel_dims = SimpleNamespace(dp_replicate_enabled=False, get_mesh=lambda axes: two_ranks)
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    assert all(isinstance(layer, FSDPModule) for layer in model.layers.values())
    states = {m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)}
    groups = [group for state in states for group in state._fsdp_param_groups]
    assert len(groups) == 4 + 2  # the blocks, the embedding, and norm with head
    # gloo cannot scale in a reduction, and the trainer divides gradients by the number of tokens itself.
    assert all(
        group.force_sum_reduction_for_comms and group.gradient_divide_factor == 1.0 for group in groups
    )
    model.to_empty(device="cpu")
    model.init_seed = 5
    with torch.no_grad():
        model.init_states()
    weight = model.get_parameter("layers.0.attention.wqkv.weight")
    whole = build_model(config, init_seed=5).state_dict()["layers.0.attention.wqkv.weight"]
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.to_local(), whole.chunk(2)[1])


# Masks and attention


def boolean_masks(positions: torch.Tensor, config: LaneformerConfig) -> dict[str, torch.Tensor]:
    masks = attention_masks(positions, config)
    assert all(isinstance(mask, torch.Tensor) for mask in masks.values())
    return masks  # type: ignore[return-value]


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize("window", [1, 3, 9])
def test_mask_by_hand(window: int):
    seen = boolean_masks(POSITIONS, tiny(sliding_window=window))
    assert set(seen) == {"full", "swa"}
    for name, reach in (("full", 99), ("swa", window)):
        for row, starts in enumerate([[0] * 10, [0, 0, 0, 3, 3, 5, 5, 5, 5, 5]]):
            for query in range(10):
                expected = [starts[query] <= key <= query and query - key < reach for key in range(10)]
                assert seen[name][row, 0, query].tolist() == expected


def test_only_masks_in_use_are_made():
    assert set(boolean_masks(POSITIONS, tiny(swa_layers=[], sliding_window=None))) == {"full"}
    assert set(boolean_masks(POSITIONS, tiny(swa_layers=[0, 1, 2, 3]))) == {"swa"}
    wide = boolean_masks(POSITIONS, tiny(sliding_window=10))
    assert wide["full"] is wide["swa"]
    all_wide = boolean_masks(POSITIONS, tiny(swa_layers=[0, 1, 2, 3], sliding_window=10))
    assert torch.equal(all_wide["swa"], wide["full"])


def test_block_mask_comes_from_the_same_function():
    for window in (None, 3):
        sees = mask_function(POSITIONS, window)
        dense = boolean_masks(POSITIONS, tiny(sliding_window=3))["full" if window is None else "swa"]
        assert torch.equal(create_mask(sees, 2, None, 10, 10, device="cpu"), dense)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_fused_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 10, 16, generator=generator) for heads in (8, 4, 4))
    attention = MaskedAttention.Config().build()
    sees = mask_function(POSITIONS, 3)
    block_mask = create_block_mask(sees, 2, None, 10, 10, device="cpu", BLOCK_SIZE=4)
    dense = boolean_masks(POSITIONS, tiny(sliding_window=3))["swa"]
    torch.testing.assert_close(attention(q, k, v, block_mask), attention(q, k, v, dense), rtol=0, atol=1e-6)


def test_masks_can_be_passed_in_and_order_does_not_leak():
    """Later tokens and other documents never change a token's logits."""
    model = build_model(tiny())
    tokens = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens, POSITIONS)
        given = model(tokens, POSITIONS, model.get_attention_masks(POSITIONS))
        changed = tokens.clone()
        changed[1, 5:] = (changed[1, 5:] + 1) % 32  # the last document of row 1
        after = model(changed, POSITIONS)
        alone = model(tokens[1:, 3:5])
    assert torch.equal(logits, given)
    assert torch.equal(after[0], logits[0])
    assert torch.equal(after[1, :5], logits[1, :5])
    assert not torch.equal(after[1, 5:], logits[1, 5:])
    torch.testing.assert_close(alone, logits[1:, 3:5], rtol=0, atol=1e-5)


def test_blocks_compile_whole_and_few_times():
    """One graph for each kind of block, none broken, with equal gradients.

    The kinds with a delay of 2: layers 0 (no partials to add), 1 and 2 (early ones to add; attention in the
    middle from 2 on), 3 to 5, 6 (its attention is not awaited), 7 (adds its own SwiGLU output).
    """
    config = tiny(num_hidden_layers=8, swa_layers=[0, 1, 4])
    tokens = torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(0))
    eager, compiled = build_model(config), build_model(config)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for layer in compiled.layers.values():
        layer.compile(backend=counter, fullgraph=True)
    for model in (eager, compiled):
        (model(tokens, POSITIONS) ** 2).sum().backward()
    assert counter.frame_count == 6
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-5, msg=name)


# TorchTitan


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2"),
        ({"context_parallel_degree": 2}, "context_parallel_degree is 2"),
        ({"pipeline_parallel_degree": 4}, "pipeline_parallel_degree is 4"),
        ({"expert_parallel_degree": 2}, "expert_parallel_degree is 2"),
        ({"spmd_backend": "spmd_types"}, "spmd_backend is spmd_types, but must be partial_dtensor"),
    ],
)
def test_unsupported_parallelism_is_refused_by_name(settings: dict[str, Any], says: str):
    parallelism = ParallelismConfig(**{"spmd_backend": "partial_dtensor", **settings})
    config = SimpleNamespace(parallelism=parallelism, training=TrainingConfig(seq_len=16))
    with pytest.raises(ValueError, match=says):
        Laneformer.Config.from_sizes(tiny()).update_from_config(config=config)


@pytest.mark.parametrize("mode", ["sum", "local", "delayed"])
def test_increment_of_some_lanes(mode: Any):
    generator = torch.Generator().manual_seed(0)
    own, awaited = (torch.randn(4, 3, 8, generator=generator) for _ in range(2))
    whole = increment(mode, own, awaited)
    for lanes in (slice(1), slice(1, 3)):
        some = increment(mode, own, awaited, lanes)
        torch.testing.assert_close(some, whole if mode == "sum" else whole[lanes], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_by_hand_compiled_or_not(dtype: torch.dtype):
    """Neighbouring pairs turn by their angles, as complex numbers do; the compiler has a branch of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, generator=generator).to(dtype)
    angles = torch.randn(5, 4, generator=generator)
    turned = torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * torch.exp(1j * angles.double())
    expected = torch.view_as_real(turned).flatten(-2).to(dtype)
    bound = 1e-6 if dtype == torch.float32 else 2**-6  # a tie may round either way
    for function in (rotate, torch.compile(rotate, backend="aot_eager", fullgraph=True)):
        got = function(x, angles.cos(), angles.sin())
        torch.testing.assert_close(got, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("change", [{}, {"replicated_rmsn_scale": False}, {"lm_head_type": "lane"}])
def test_the_final_norm_returns_the_dtype_of_its_input(change: dict[str, Any]):
    model = build_model(tiny(**change), torch.bfloat16)
    assert model.norm(torch.randn(4, 3, 32).bfloat16()).dtype == torch.bfloat16


def test_too_long_sequences_are_refused():
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    spec = Laneformer.Config.from_sizes(tiny())
    spec.update_from_config(
        config=SimpleNamespace(parallelism=parallelism, training=TrainingConfig(seq_len=16))
    )
    with pytest.raises(ValueError, match="seq_len 17 exceeds max_position_embeddings 16"):
        spec.update_from_config(
            config=SimpleNamespace(parallelism=parallelism, training=TrainingConfig(seq_len=17))
        )
    with pytest.raises(ValueError, match="17 tokens exceed max_position_embeddings 16"):
        build_model(tiny())(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_head_can_be_left_to_the_loss(change: dict[str, Any]):
    """A chunked loss skips the head and applies it to pieces of the sequence."""
    model = build_model(tiny(**change))
    tokens = torch.arange(16).view(2, 8)
    logits = model(tokens)
    model._skip_lm_head = True
    pieces = [model.lm_head(piece) for piece in model(tokens).split(3, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits, rtol=0, atol=1e-5)


def test_tied_weights_are_one_parameter():
    model = build_model(tiny(tie_word_embeddings=True))
    assert model.tok_embeddings.weight is model.lm_head.weight
