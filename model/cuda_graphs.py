"""Single-token steps as CUDA graphs: one launch instead of some hundred.

A graph is captured per number of slots that attention sees, rounded up (model/kv_cache.py); all that changes
within one, tokens, positions, slots and masks, lies at fixed addresses. Not run yet: no GPU was at hand. What a graph
captures, the step with fixed shapes, is tested on the CPU without one.

Shape suffixes: B batch   V vocabulary slice of this process
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model.delayed_tp import LaneGroup
from model.kv_cache import LayerCache

WARM_UP = 2  # runs before a capture, so that libraries have their workspaces and messages their buffers


class GraphedSteps:
    """The steps of one batch. Rows must not change: a new batch needs new graphs."""

    def __init__(self, group: LaneGroup, tokens_B1: torch.Tensor, positions_B1: torch.Tensor):
        self.group = group
        self.tokens_B1 = tokens_B1.clone()
        self.positions_B1 = positions_B1
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __call__(self, tokens_B1: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Logits (B, V) after these tokens, whose positions are in positions_B1 already."""
        self.tokens_B1.copy_(tokens_B1)
        held = tuple(sorted({cache.step.held for cache in caches if cache.step}))
        if held not in self.graphs:
            self.graphs[held] = self._capture(caches)
        graph, logits_BV = self.graphs[held]
        graph.replay()
        return logits_BV

    def _capture(self, caches: Sequence[LayerCache]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Writing the same keys and values into the same slots again changes nothing, so running early is harmless.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.group.logits(self.tokens_B1, self.positions_B1, caches)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits_BV = self.group.logits(self.tokens_B1, self.positions_B1, caches)
        return graph, logits_BV
