"""Initial weights that depend on the seed and a parameter's name alone, not on the world size or device.

Each parameter is drawn in full on the CPU, in float32, from a generator seeded by (seed, name); a rank then
keeps its shard. (Drawing shard by shard gives every gloo rank the same numbers, and other numbers at every
world size.)

| parameter                    | distribution                                                          |
|------------------------------|-----------------------------------------------------------------------|
| tok_embeddings               | N(0, 1), or N(0, 1/D) when tied: it is then the head                  |
| wqkv, w13                    | N(0, 1/D): unit variance after a norm                                 |
| wo                           | N(0, 1/(D · 2n)): D inputs over all lanes, n layers                   |
| w2                           | N(0, 1/(F · 2n)): F inputs over all lanes                             |
| lm_head replicate, lane slice| N(0, 1/D); for `lane`, which adds up the lanes' states, N(0, 1/(L·D)) |
| norm scales                  | 1                                                                     |

The factor 1/2n (two modules in each of n layers) keeps the residual stream's variance from growing with
depth. It needs no factor for lanes, because every exchange adds the same variance. A lane's partial output
has fan-in D/L in wo, and so a variance v that is 1/L of a dense layer's. Summing L independent partials gives
L·v; a lane on its own adds √L · o, again L·v; and the delayed exchange adds one own and L−1 earlier partials,
(1 + L−1)·v. So fan-in counts all lanes' inputs, as in the dense twin. (With use_early_comm the first sums arrive
once more, `delay` layers later: the stream then grows by what two more layers per early one would add.)
"""

import hashlib
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from model.config import LaneformerConfig

# Wrappers that activation checkpointing and compilation insert into names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def standard_deviation(name: str, config: LaneformerConfig) -> float | None:
    """The table above for a parameter's plain name; None for a scale, which is set to 1."""
    depth = 2 * config.num_hidden_layers
    match name.split(".")[-2]:
        case "tok_embeddings":
            return config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0
        case "wqkv" | "w13":
            return config.hidden_size**-0.5
        case "wo":
            return (config.hidden_size * depth) ** -0.5
        case "w2":
            return (config.intermediate_size * depth) ** -0.5
        case "lm_head":
            inputs = config.hidden_size * (config.num_lanes if config.lm_head_type == "lane" else 1)
            return inputs**-0.5
        case "norm" | "attention_norm" | "ffn_norm":
            return None
    raise ValueError(f"no initial distribution is defined for parameter {name}")


def draw(name: str, shape: torch.Size, config: LaneformerConfig, seed: int) -> torch.Tensor:
    """The whole initial value of one parameter, float32 on the CPU."""
    std = standard_deviation(name, config)
    if std is None:
        return torch.ones(shape, device="cpu")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: LaneformerConfig, seed: int
) -> None:
    """Fill the parameters in place, plain or sharded over a device mesh."""
    for name, parameter in named_parameters:
        value = draw(plain_name(name), parameter.shape, config, seed)
        if isinstance(parameter, DTensor):
            # Every rank has drawn the same: nothing to broadcast.
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(value.to_local())
        else:
            parameter.copy_(value)
