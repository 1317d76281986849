"""Keys and values of the tokens so far, in buffers that are made once.

A full layer has a slot for every column; a sliding-window layer has a ring of as many slots as its window, in
which column c lies in slot c mod window. Keys are rotated before they are written, so the order of slots does not
matter.

Rows of a batch may have prompts of different lengths. They are padded on the left, so that all rows end in the
same column; row b's first padding_B[b] columns hold nothing, and its positions count from there.

Shape suffixes:
  B batch   K key/value heads   C columns of the new tokens   M slots that they may see   E head width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.config import LaneformerConfig


@dataclass(frozen=True)
class Step:
    """Where some new columns go and what they see: the same in all layers with equally many slots."""

    slots: slice | torch.Tensor
    """Where the new columns are written; only the last of them, if there are more than slots."""
    held: int
    """How many slots, from the first, hold something that the new columns may see."""
    after_writing: bool
    """Whether they see the slots after they are written, or the slots before that and themselves."""
    mask: torch.Tensor | None
    """Boolean (1 or B, 1, C, M); None where every query sees all."""


def plan_step(
    first: int,
    count: int,
    slots: int,
    window: int | None,
    padding_B: torch.Tensor | None,
    device: torch.device,
) -> Step:
    """The step of the columns first … first + count - 1 in buffers of this many slots."""
    last = first + count - 1
    new_C = torch.arange(first, last + 1, device=device)
    begin = first % slots
    # A ring's new tokens overwrite what the first of them may still see, unless there is only one.
    after_writing = count == 1 or first + count <= slots
    held = min(last + 1 if after_writing else first, slots)
    newest = last if after_writing else first - 1
    in_slots_M = newest - (newest - torch.arange(held, device=device)) % slots  # each slot's newest column
    columns_M = in_slots_M if after_writing else torch.cat([in_slots_M, new_C])
    mask = None
    if count > 1 or padding_B is not None:
        age_CM = new_C[:, None] - columns_M
        seen_BCM = (age_CM >= 0)[None]
        if window is not None:
            seen_BCM = seen_BCM & (age_CM < window)
        if padding_B is not None:
            # A padding column sees itself, so that its softmax is defined; nobody else sees it.
            seen_BCM = (seen_BCM & (columns_M >= padding_B[:, None])[:, None]) | (age_CM == 0)
        mask = seen_BCM[:, None]
    where = slice(begin, begin + count) if begin + count <= slots else new_C[-slots:] % slots
    return Step(slots=where, held=held, after_writing=after_writing, mask=mask)


class LayerCache:
    """One layer's keys and values; KeyValueCache.begin gives it the next step."""

    def __init__(self, batch: int, heads: int, slots: int, width: int, like: torch.Tensor):
        self.keys = torch.zeros(batch, heads, slots, width, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.step: Step | None = None

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    def extend(
        self, k_BKCE: torch.Tensor, v_BKCE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Store the new keys and values; returns keys and values (B, K, M, E) and the mask of what is seen."""
        step = self.step
        assert step is not None, "KeyValueCache.begin comes first"
        if step.after_writing:
            self.keys[:, :, step.slots] = k_BKCE
            self.values[:, :, step.slots] = v_BKCE
            return self.keys[:, :, : step.held], self.values[:, :, : step.held], step.mask
        keys = torch.cat([self.keys[:, :, : step.held], k_BKCE], dim=2)
        values = torch.cat([self.values[:, :, : step.held], v_BKCE], dim=2)
        self.keys[:, :, step.slots] = k_BKCE[:, :, -self.slots :]
        self.values[:, :, step.slots] = v_BKCE[:, :, -self.slots :]
        return keys, values, step.mask


class KeyValueCache:
    """The caches of all layers.

    capacity is the most columns, padding included, that will ever be written; padding_B, on the model's device,
    holds the rows' empty columns; like gives dtype and device.
    """

    def __init__(self, config: LaneformerConfig, padding_B: torch.Tensor, capacity: int, like: torch.Tensor):
        self.windows = [config.window(i) for i in range(config.num_hidden_layers)]
        self.layers = [
            LayerCache(
                padding_B.shape[0],
                config.num_key_value_heads,
                min(window or capacity, capacity),
                config.head_dim,
                like,
            )
            for window in self.windows
        ]
        self.padding_B = padding_B
        self.padded = bool(padding_B.any())
        self.capacity = capacity
        self.columns = 0

    def begin(self, count: int) -> torch.Tensor:
        """Make ready for count new columns; returns their positions (B, count). Raises ValueError if full."""
        first = self.columns
        if first + count > self.capacity:
            raise ValueError(f"{first} + {count} columns exceed the cache's {self.capacity}")
        device = self.padding_B.device
        steps: dict[tuple[int, int | None], Step] = {}
        for layer, window in zip(self.layers, self.windows, strict=True):
            kind = (layer.slots, window)
            if kind not in steps:
                steps[kind] = plan_step(first, count, *kind, self.padding_B if self.padded else None, device)
            layer.step = steps[kind]
        self.columns += count
        columns_C = torch.arange(first, first + count, device=device)
        return (columns_C - self.padding_B[:, None]).clamp(min=0)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these (indices), in this order."""
        self.padding_B = self.padding_B[rows]
        self.padded = bool(self.padding_B.any())
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
