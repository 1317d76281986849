"""Keys and values of the tokens so far, in buffers that are made once.

A full layer keeps every token; a sliding-window layer keeps a ring of as many slots as its window, in which the token
of column c lies in slot c mod window. Keys are rotated before they are written, so the order of slots does not matter.

Rows of a batch may have prompts of different lengths: they are padded on the left, so that all rows end in the same
column. Row b's first `padding_B[b]` columns hold nothing; its positions count from there.

Shape suffixes: B batch   K key/value heads   C columns of the new tokens   M slots that can be seen   E head width
"""

from __future__ import annotations

import torch

from model.config import LaneformerConfig


class LayerCache:
    """One layer's keys and values."""

    def __init__(
        self, heads: int, width: int, capacity: int, window: int | None, like: torch.Tensor, batch: int
    ):
        self.window = window
        slots = capacity if window is None else min(window, capacity)
        self.keys = torch.zeros(batch, heads, slots, width, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    def extend(
        self, first: int, k_BKCE: torch.Tensor, v_BKCE: torch.Tensor, padding_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store the tokens of columns first … first + C - 1 and return what they see.

        Returns keys and values (B, K, M, E) and a boolean mask (B, 1, C, M). The old slots are read before the
        new tokens overwrite them, because the first new tokens may still see the oldest ones.
        """
        device = self.keys.device
        count = k_BKCE.shape[2]
        new_C = torch.arange(first, first + count, device=device)
        held = min(first, self.slots)
        # The newest column before `first` that fell into each slot.
        slot = torch.arange(held, device=device)
        old = first - 1 - (first - 1 - slot) % self.slots
        columns_M = torch.cat([old, new_C])
        keys = torch.cat([self.keys[:, :, :held], k_BKCE], dim=2)
        values = torch.cat([self.values[:, :, :held], v_BKCE], dim=2)
        kept = new_C[-self.slots :]
        self.keys[:, :, kept % self.slots] = k_BKCE[:, :, -self.slots :]
        self.values[:, :, kept % self.slots] = v_BKCE[:, :, -self.slots :]

        age_CM = new_C[:, None] - columns_M[None, :]
        seen_CM = age_CM >= 0
        if self.window is not None:
            seen_CM &= age_CM < self.window
        # A padding column sees itself, so that its softmax is defined; nobody else sees it.
        seen_BCM = (seen_CM & (columns_M >= padding_B[:, None])[:, None]) | (age_CM == 0)
        return keys, values, seen_BCM[:, None]


class KeyValueCache:
    """The caches of all layers, and the next free column.

    `capacity` is the most columns (padding included) that will be written; `like` gives dtype and device.
    """

    def __init__(self, config: LaneformerConfig, padding_B: torch.Tensor, capacity: int, like: torch.Tensor):
        heads, width, batch = config.num_key_value_heads, config.head_dim, padding_B.shape[0]
        self.layers = [
            LayerCache(heads, width, capacity, config.window(i), like, batch)
            for i in range(config.num_hidden_layers)
        ]
        self.padding_B = padding_B
        self.capacity = capacity
        self.columns = 0

    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
