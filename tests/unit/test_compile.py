"""Compilation of blocks: whole graphs, few of them, and none after the first step.

With a backend that runs what was traced, because what is tested is when the compiler starts anew, not its code.
fullgraph=True makes a break in a graph an error.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.models.common.attention import FlexAttention

from model.config import LaneformerConfig
from model.laneformer import Laneformer, build_model
from model.masks import mask_function
from model.parallelize import set_checkpointing, set_kernels
from tests.unit.test_model_laneformer import tiny

PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]])
OTHERWISE = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]])
WHOLE = torch.arange(10).expand(2, 10)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def compiled(config: LaneformerConfig, policy: str) -> tuple[Laneformer, Any]:
    """A model whose blocks and final norm are compiled as model/parallelize.py does, counting compilations."""
    model, counter = build_model(config), CompileCounterWithBackend("eager")
    set_kernels(model, "auto", "cpu")
    set_checkpointing(model, policy)
    for module in (*model.layers.values(), model.norm):
        module.compile(backend=counter, fullgraph=True)
    return model, counter


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 10), generator=torch.Generator().manual_seed(seed))


def train(model: Laneformer, seed: int, positions: torch.Tensor) -> None:
    model.zero_grad()
    (model(tokens(seed), positions, model.get_attention_masks(positions)) ** 2).sum().backward()


def validate(model: Laneformer, seed: int, positions: torch.Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(tokens(seed), positions, model.get_attention_masks(positions))
    model.train()


@pytest.mark.parametrize(
    "policy", ["selective", *(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "segments:3"))]
)
def test_nothing_is_compiled_after_the_first_step(policy: str):
    """Packed or not, other documents, other weights, training after validation: no new graph."""
    config = tiny(num_hidden_layers=8, swa_layers=[0, 1, 2, 3, 4])
    model, counter = compiled(config, policy)
    train(model, 0, PACKED)
    kinds = counter.frame_count
    validate(model, 0, PACKED)
    warm = counter.frame_count
    assert warm == 2 * kinds, "one more for each kind, without gradients"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, positions in enumerate((OTHERWISE, WHOLE, PACKED)):
            train(model, seed, positions)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            validate(model, seed, positions)
    assert counter.frame_count == warm


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        # Layer 0; 1 and 2 add early partials, 2 hears the first delayed ones; 3 to 5; 6, unheard; the last.
        ({}, 6),
        ({"broadcast_delay": 1}, 4),
        pytest.param({"broadcast_delay": 0}, 3, marks=pytest.mark.slow),
        pytest.param({"use_attention_comm": False, "use_mlp_comm": False}, 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_of_a_kind_share_their_code(change: dict[str, Any], kinds: int):
    """As many graphs as kinds of block, and the final norm, however many layers there are."""
    for layers in (8, 12):
        torch._dynamo.reset()
        model, counter = compiled(tiny(num_hidden_layers=layers, **change), "none")
        train(model, 0, PACKED)
        assert counter.frame_count == kinds + 1, layers


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_of_other_documents_need_no_new_graph(monkeypatch: pytest.MonkeyPatch):
    """On a GPU each batch brings a mask function of its own; it must not be what the compiler looks at.

    Without gradients, since flex attention has no backward pass on the CPU.
    """
    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))
    config = tiny(num_hidden_layers=8, hidden_size=128, swa_layers=[0, 1, 2, 3, 4])
    model, counter = compiled(config, "none")

    def masks(positions: torch.Tensor) -> Any:
        kinds = {"full": None, "swa": config.sliding_window}
        return {
            name: create_block_mask(mask_function(positions, window), 2, None, 10, 10, device="cpu")
            for name, window in kinds.items()
        }

    with torch.no_grad():
        model(tokens(0), PACKED, masks(PACKED))
        warm = counter.frame_count
        with torch._dynamo.config.patch(error_on_recompile=True):
            for positions in (OTHERWISE, WHOLE):
                model(tokens(0), positions, masks(positions))
    assert counter.frame_count == warm == 7 + 1  # the middle kind with either mask, and the final norm
