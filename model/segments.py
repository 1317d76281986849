"""Layers in a row, whole or in segments of which the backward pass keeps only what enters them.

What enters a segment need not be all residual streams. A partial output o is added to its own lane at once, and to
the others d layers later; from then on all lanes hold the same sum. So lane l's residual is

    x_l = c + r_l + Σ a · o_l        over the partial outputs under way

with a stream c that all lanes share, L times as narrow, and the partial outputs under way, which the segment needs in
any case. The weight a is how o was added to its own lane: 1 as a rule, √L where lanes did not exchange, 0 where they
did at once. What it was more or less than 1 stays with the lane, in r: that of the first d layers, and of partial
outputs that are never sent. r changes where these arrive or are made, and nowhere else; lane 0's is counted as 0.

Segments therefore start from a residual that is put together anew, forward as in the backward pass. It differs from
the one that layers pass on in rounding alone.

Shape suffixes: L lanes   T tokens   D hidden width   B batch   S sequence   H half the head width
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import nn

from model.config import KINDS, LaneformerConfig
from model.lanes import increment
from model.masks import Mask
from model.recompute import recomputed

Layers = Sequence[tuple[nn.Module, Mask]]


def run_layers(
    layers: Layers,
    cos_BSH: torch.Tensor,
    sin_BSH: torch.Tensor,
    x_LTD: torch.Tensor,
    mlp_LTD: torch.Tensor | None,
    awaited_mlp_LTD: torch.Tensor | None,
    *under_way: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Layers in a row, each with its mask. Takes and returns what passes between layers, flat:

    the residual streams, the SwiGLU outputs still to be added, what arrives with them, and the partial outputs
    under way, of attention and SwiGLU in turn, the oldest first; None for those that nobody awaits.
    """
    queue = list(under_way)
    for layer, mask in layers:
        arrived = (queue.pop(0), queue.pop(0)) if queue else (None, None)
        last = arrived[1] if layer.last_exchange is not None else None
        x_LTD, attention_LTD, own_LTD = layer(
            x_LTD, mlp_LTD, awaited_mlp_LTD, arrived[0], last, cos_BSH, sin_BSH, mask
        )
        mlp_LTD, awaited_mlp_LTD = own_LTD, arrived[1]
        if under_way:
            queue += [attention_LTD, own_LTD if layer.mlp_awaited else None]
    return x_LTD, mlp_LTD, awaited_mlp_LTD, *queue


def run_in_segments(
    layers: Layers,
    length: int,
    sizes: LaneformerConfig,
    cos_BSH: torch.Tensor,
    sin_BSH: torch.Tensor,
    embedded_1TD: torch.Tensor,
) -> torch.Tensor:
    """The residual streams (L, T, D) after all layers, computed `length` layers at a time, and again backward."""
    state: tuple[torch.Tensor | None, ...] = (embedded_1TD, None, *[None] * (2 * sizes.broadcast_delay))
    for first in range(0, len(layers), length):
        # The segment as an argument, since each one is computed again after the loop has gone on.
        segment = layers[first : first + length]
        state = recomputed(_run_segment, sizes, first, segment, cos_BSH, sin_BSH, *state)
    x_LTD = state[0]
    assert x_LTD is not None
    return x_LTD


def _run_segment(
    sizes: LaneformerConfig,
    first: int,
    layers: Layers,
    cos_BSH: torch.Tensor,
    sin_BSH: torch.Tensor,
    common_1TD: torch.Tensor,
    rest_LTD: torch.Tensor | None,
    *under_way: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Takes and returns c, r (None for 0) and the partial outputs under way; the last one, the residual streams."""
    x_LTD = common_1TD.repeat(sizes.num_lanes, 1, 1)
    if rest_LTD is not None:
        x_LTD.add_(rest_LTD)
    for weight, partial_LTD in _weighted(sizes, first, under_way):
        x_LTD.add_(partial_LTD, alpha=weight)
    new_LTD, mlp_LTD, awaited_LTD, *under_way_after = run_layers(
        layers, cos_BSH, sin_BSH, x_LTD, None, None, *under_way
    )
    end = first + len(layers)
    if end == sizes.num_hidden_layers:
        return new_LTD, None, *under_way_after
    assert new_LTD is not None
    assert mlp_LTD is not None
    changes = sizes.changes_rest(range(first, end))
    lanes = slice(None) if changes else slice(1)
    shared_and_rest = new_LTD[lanes] + increment(sizes.exchange(end - 1, "mlp"), mlp_LTD, awaited_LTD, lanes)
    for weight, partial_LTD in _weighted(sizes, end, under_way_after):
        shared_and_rest = shared_and_rest.sub(partial_LTD[lanes], alpha=weight)
    common_1TD = shared_and_rest[:1].clone()  # not a view, which would keep all lanes
    return common_1TD, shared_and_rest - common_1TD if changes else rest_LTD, *under_way_after


def _weighted(
    sizes: LaneformerConfig, layer: int, under_way: Sequence[torch.Tensor | None]
) -> Iterator[tuple[float, torch.Tensor]]:
    """The partial outputs under way before a layer, each with the weight that its own lane added it by."""
    weights = {"delayed": 1.0, "local": sizes.num_lanes**0.5, "sum": 0.0}
    made = product(range(layer - sizes.broadcast_delay, layer), KINDS)
    for (earlier, kind), partial_LTD in zip(made, under_way, strict=True):
        if partial_LTD is not None and (weight := weights[sizes.exchange(earlier, kind)]):
            yield weight, partial_LTD
