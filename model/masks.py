"""Which tokens see which: causal, within one document, and within a sliding window.

One mask function serves flex attention on a GPU, as a BlockMask, and fused attention elsewhere, as a boolean
tensor, which additive_masks turns into the numbers that it adds to scores.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from model.config import LaneformerConfig

Mask = BlockMask | torch.Tensor
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Uncompiled, it fills a (B, S, S) tensor before it looks for blocks.
_compiled_block_mask = torch.compile(create_block_mask)


def mask_function(positions: torch.Tensor, window: int | None) -> MaskFunction:
    """(batch, head, query index, key index) → whether the query sees the key; any shapes that broadcast.

    positions (B, S) start again at 0 in every document. window counts the query itself; None means no limit.
    """
    document = (positions == 0).cumsum(1)

    def sees(b: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        allowed = (key <= query) & (document[b, query] == document[b, key])
        return allowed if window is None else allowed & (query - key < window)

    return sees


def attention_masks(positions: torch.Tensor, config: LaneformerConfig) -> dict[str, Mask]:
    """The masks of full ("full") and sliding-window ("swa") layers, as far as there are such layers.

    A BlockMask if positions (B, S) lie on a GPU, else a boolean (B, 1, S, S).
    """
    window = config.sliding_window
    if window is not None and window >= positions.shape[1]:
        window = None  # it hides nothing
    masks = {}
    if len(config.swa_layers) < config.num_hidden_layers:
        masks["full"] = _materialise(positions, None)
    if config.swa_layers:
        shared = window is None and "full" in masks
        masks["swa"] = masks["full"] if shared else _materialise(positions, window)
    return masks


def _materialise(positions: torch.Tensor, window: int | None) -> Mask:
    batch, seq = positions.shape
    sees = mask_function(positions, window)
    if positions.device.type == "cuda":
        return _compiled_block_mask(sees, batch, None, seq, seq, device=positions.device)
    row = torch.arange(batch, device=positions.device)[:, None, None, None]
    index = torch.arange(seq, device=positions.device)
    return sees(row, row, index[:, None], index[None, :])


def additive_masks(masks: Mapping[str, Mask], dtype: torch.dtype) -> dict[str, Mask]:
    """Boolean masks as 0 and −inf of the activations' dtype, once for all layers; BlockMasks as they are."""
    numbers = {id(mask): _additive(mask, dtype) for mask in masks.values()}
    return {name: numbers[id(mask)] for name, mask in masks.items()}


def _additive(mask: Mask, dtype: torch.dtype) -> Mask:
    if isinstance(mask, BlockMask):
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
