"""Keys and values of the tokens so far, in buffers that are made once.

A full layer has a slot for every column; a sliding-window layer has a ring of as many slots as its window, in
which column c lies in slot c mod window. Keys are rotated before they are written, so the order of slots does not
matter.

Rows of a batch may have prompts of different lengths. They are padded on the left, so that all rows end in the
same column; row b's first padding_B[b] columns hold nothing, and its positions count from there.

One new column is the steady state: it takes no new memory. With `graphs` it also keeps every address and, up to
the rounding of `held`, every shape, so that a CUDA graph of the step stays valid.

Shape suffixes:
  B batch   L lanes   K key/value heads of a lane   C columns of the new tokens   M slots that they may see
  E head width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.config import LaneformerConfig

GRAPH_SLOTS = 256  # a CUDA graph serves all steps whose number of slots rounds up to the same multiple


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
    """(1 or B, 1, C, M), True where seen; of a single column, what is added to the scores; None: all is seen."""


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

    def __init__(self, batch: int, lanes: int, heads: int, slots: int, width: int, like: torch.Tensor):
        self.keys = torch.zeros(batch, lanes, heads, slots, width, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.step: Step | None = None

    @property
    def slots(self) -> int:
        return self.keys.shape[3]

    def extend(
        self, k_BLKCE: torch.Tensor, v_BLKCE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Store the new keys and values; returns keys and values (B, L·K, M, E) and the mask of what is seen."""
        step = self.step
        assert step is not None, "KeyValueCache.begin comes first"
        if step.after_writing:
            self._write(step, k_BLKCE, v_BLKCE)
            keys, values = self.keys[..., : step.held, :], self.values[..., : step.held, :]
        else:
            keys = torch.cat([self.keys[..., : step.held, :], k_BLKCE], dim=3)
            values = torch.cat([self.values[..., : step.held, :], v_BLKCE], dim=3)
            self._write(step, k_BLKCE[..., -self.slots :, :], v_BLKCE[..., -self.slots :, :])
        return keys.flatten(1, 2), values.flatten(1, 2), step.mask

    def _write(self, step: Step, k_BLKCE: torch.Tensor, v_BLKCE: torch.Tensor) -> None:
        for buffer, new in ((self.keys, k_BLKCE), (self.values, v_BLKCE)):
            if isinstance(step.slots, slice):
                buffer[..., step.slots, :].copy_(new)
            else:
                buffer.index_copy_(3, step.slots, new)


class OneColumn:
    """The steps of single columns in all layers with equally many slots, without new memory."""

    def __init__(self, slots: int, padding_B: torch.Tensor, like: torch.Tensor, graphs: bool):
        device = padding_B.device
        self.slots = slots
        self.padding_B = padding_B
        self.graphs = graphs
        self.slot_1 = torch.zeros(1, dtype=torch.long, device=device)
        # 0 for a slot that holds a column other than padding, else -inf. A ring holds no column that is too old.
        self.bias_BM = torch.zeros(padding_B.shape[0], slots, dtype=like.dtype, device=device)

    def follow(self, columns: int) -> None:
        """Take note of the slots after a step of several columns; columns is how many there are now."""
        slot_M = torch.arange(self.slots, device=self.padding_B.device)
        newest_M = columns - 1 - (columns - 1 - slot_M) % self.slots
        hidden_BM = (newest_M < 0) | (newest_M < self.padding_B[:, None])
        self.bias_BM.zero_().masked_fill_(hidden_BM, -torch.inf)

    def step(self, first: int, masked: bool) -> Step:
        """The step of column `first`; unmasked, all slots held are seen."""
        slot, held = first % self.slots, min(first + 1, self.slots)
        self.bias_BM[:, slot].zero_()
        if not self.graphs:
            mask = self.bias_BM[:, None, None, :held] if masked else None
            return Step(slots=slice(slot, slot + 1), held=held, after_writing=True, mask=mask)
        held = min(-(-held // GRAPH_SLOTS) * GRAPH_SLOTS, self.slots)
        mask = self.bias_BM[:, None, None, :held]
        return Step(slots=self.slot_1.fill_(slot), held=held, after_writing=True, mask=mask)


class KeyValueCache:
    """The caches of all layers, of some or all of a model's lanes.

    capacity is the most columns, padding included, that will ever be written; padding_B, on the model's device,
    holds the rows' empty columns; like gives dtype and device.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        padding_B: torch.Tensor,
        capacity: int,
        like: torch.Tensor,
        lanes: int,
        graphs: bool = False,
    ):
        self.windows = [config.window(i) for i in range(config.num_hidden_layers)]
        heads = config.num_key_value_heads // config.num_lanes
        self.layers = [
            LayerCache(
                padding_B.shape[0],
                lanes,
                heads,
                min(window or capacity, capacity),
                config.head_dim,
                like,
            )
            for window in self.windows
        ]
        self.capacity = capacity
        self.columns = 0
        self.graphs = graphs
        self._take_rows(padding_B)

    def _take_rows(self, padding_B: torch.Tensor) -> None:
        self.padding_B = padding_B
        self.longest_padding = int(padding_B.max())
        self.singles = {
            slots: OneColumn(slots, padding_B, self.layers[0].keys, self.graphs)
            for slots in {layer.slots for layer in self.layers}
        }
        self.position_B1 = torch.empty_like(padding_B)[:, None]
        for single in self.singles.values():
            single.follow(self.columns)

    def begin(self, count: int) -> torch.Tensor:
        """Make ready for count new columns; returns their positions (B, count). Raises ValueError if full."""
        first = self.columns
        if first + count > self.capacity:
            raise ValueError(f"{first} + {count} columns exceed the cache's {self.capacity}")
        self.columns += count
        # A single column of padding, in a prompt read one by one, is left to the general case.
        padded = self.longest_padding > 0
        if count == 1 and first >= self.longest_padding:
            steps = {slots: single.step(first, padded) for slots, single in self.singles.items()}
            for layer in self.layers:
                layer.step = steps[layer.slots]
            torch.sub(first, self.padding_B[:, None], out=self.position_B1)
            return self.position_B1.clamp_(min=0)
        device = self.padding_B.device
        planned: dict[tuple[int, int | None], Step] = {}
        for layer, window in zip(self.layers, self.windows, strict=True):
            kind = (layer.slots, window)
            if kind not in planned:
                padding_B = self.padding_B if padded else None
                planned[kind] = plan_step(first, count, *kind, padding_B, device)
            layer.step = planned[kind]
        for single in self.singles.values():
            single.follow(self.columns)
        columns_C = torch.arange(first, first + count, device=device)
        return (columns_C - self.padding_B[:, None]).clamp(min=0)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these (indices), in this order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self._take_rows(self.padding_B[rows])

    def bytes(self) -> int:
        """Bytes of all buffers of keys and values."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
