"""The training loss: cross entropy told by row, whole or in chunks of the sequence, with an optional z-loss.

Shapes: B sequences of a micro-batch, S tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig


def row_losses(
    pred_BSV: torch.Tensor, labels_BS: torch.Tensor, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sums over each row's tokens, float32 (B,): cross entropy in nats, and what is minimised.

    Tokens whose label is -100 count in neither. The second is the cross entropy plus z_loss times the squared
    logarithm of the softmax's normaliser, which keeps logits from drifting (https://arxiv.org/abs/2204.02311).
    """
    logits_TV, labels_T = pred_BSV.flatten(0, 1).float(), labels_BS.flatten()
    nats_T = F.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORE_INDEX)
    rows_B = nats_T.view_as(labels_BS).sum(1)
    if not z_loss:
        return rows_B, rows_B
    squares_T = (logits_TV.logsumexp(-1) ** 2).masked_fill(labels_T == IGNORE_INDEX, 0)
    return rows_B, rows_B + z_loss * squares_T.view_as(labels_BS).sum(1)


class RowCrossEntropy(BaseLoss):
    """Also gives each row's cross entropy, without the z-loss, so that losses can be told per source."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        z_loss: float = 0.0

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None):
        self.fn: Any = partial(row_losses, z_loss=config.z_loss)
        self._maybe_compile(compile_config)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows_B, minimised_B = self.fn(pred, labels)
        loss = minimised_B.sum()
        if global_valid_tokens is not None:
            loss = loss / global_valid_tokens
        return loss, {"rows": rows_B.detach()}


class ChunkedRowCrossEntropy(ChunkedLossWrapper):
    """The same with the head applied to one chunk of the sequence after the other, forward and backward.

    No more than (B, S / num_chunks, V) logits exist at a time. The trainer leaves the head to this loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass

    @staticmethod
    def _combine_chunk_metrics(
        current: dict[str, torch.Tensor], values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"rows": current["rows"] + values["rows"]} if current else values


def loss_config(chunks: int, z_loss: float) -> BaseLoss.Config:
    """The loss over the whole sequence for chunks = 1."""
    whole = RowCrossEntropy.Config(z_loss=z_loss)
    return whole if chunks == 1 else ChunkedRowCrossEntropy.Config(num_chunks=chunks, loss_fn=whole)
