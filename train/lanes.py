"""Whether each lane takes part: its gradient, its update and its share of the residual, at logged steps.

A lane that dies has a gradient and an update near zero; one that dominates has a far larger share of the residual than
1/L. Of lane l, over all layers:

    lanes/l/grad_norm        norm of the gradient of its weights (its rows of wqkv, wo, w13, w2), before clipping
    lanes/l/update_ratio     norm of what the optimizer step added to them over their norm before it
    lanes/l/residual_share   its part of the squared norm of the residual streams that enter the final norm

AdamW's update is computed from its moments after the step, so that no copy of the weights is kept; those that Muon
updates are copied at logged steps. Every number is a sum over rows or tokens; ranks add up their shards' sums in one
reduction of 4·L numbers. Steps that are not logged do none of it. A model of one lane has no such metrics.

Shapes: L lanes, T tokens, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from model.blocks import LaneLinear
from model.laneformer import Laneformer

GRADIENTS, WEIGHTS, UPDATES, RESIDUAL = range(4)  # rows of the sums


class LaneMetrics:
    """One rank's. Build it after the model has been parallelised."""

    def __init__(self, model: Laneformer, device: torch.device):
        self.lanes = model.sizes.num_lanes
        self.weights = [module.weight for module in model.modules() if isinstance(module, LaneLinear)]
        self.recording = False
        self.copies: dict[nn.Parameter, torch.Tensor] = {}
        self.sums_4L = torch.zeros(4, self.lanes, dtype=torch.float64, device=device)
        last = list(model.layers.values())[-1]
        last.register_forward_hook(self._residual, prepend=True)  # pyright: ignore[reportAttributeAccessIssue]

    def begin(self, recording: bool) -> None:
        """A step begins, to be recorded or not."""
        self.recording = recording and self.lanes > 1
        self.sums_4L.zero_()

    @torch.compiler.disable
    def _residual(self, block: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        if self.recording and block.training:
            streams_LTD = output[0].detach()
            self.sums_4L[RESIDUAL] += (streams_LTD.float() ** 2).sum((1, 2)).double()

    @torch.no_grad()
    def gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Call when the gradients are complete and not yet clipped."""
        if not self.recording:
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        without_moments = {weight for group in groups if "betas" not in group for weight in group["params"]}
        self.copies = {w: _local(w).clone() for w in self.weights if w in without_moments}
        for weight in self.weights:
            if weight.grad is not None:
                self._add(GRADIENTS, weight, _local(weight.grad))

    @torch.no_grad()
    def updates(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Call after the optimizers' step and before the learning rate changes."""
        if not self.recording:
            return
        ours = set(self.weights)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for weight in ours.intersection(group["params"]):
                    if weight in self.copies:
                        before = self.copies.pop(weight)
                        update = _local(weight) - before
                    else:
                        before, update = adamw_update(weight, group, optimizer.state[weight])
                    self._add(WEIGHTS, weight, before)
                    self._add(UPDATES, weight, update)

    def row(self) -> dict[str, float]:
        """The step's metrics, of all ranks. A collective, at recorded steps; nothing at others."""
        if not self.recording:
            return {}
        self.recording = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.sums_4L)
        sums = self.sums_4L.tolist()
        total = sum(sums[RESIDUAL])
        row = {}
        for lane in range(self.lanes):
            row[f"lanes/{lane}/grad_norm"] = math.sqrt(sums[GRADIENTS][lane])
            weights = max(sums[WEIGHTS][lane], 1e-30)  # not by 0, should a lane's weights be
            row[f"lanes/{lane}/update_ratio"] = math.sqrt(sums[UPDATES][lane] / weights)
            row[f"lanes/{lane}/residual_share"] = sums[RESIDUAL][lane] / total
        return row

    def _add(self, row: int, weight: nn.Parameter, local: torch.Tensor) -> None:
        """Add squares of this rank's rows of a weight to their lanes. `local` is the part that the rank holds."""
        squares = (local.float() ** 2).sum(1).double()
        first, copies = _place(weight)
        lane = (first + torch.arange(len(squares), device=squares.device)) // (weight.shape[0] // self.lanes)
        # A product rather than index_add_, whose order of additions is not fixed on a GPU.
        is_lane = lane == torch.arange(self.lanes, device=squares.device)[:, None]
        self.sums_4L[row] += is_lane.double() @ squares / copies


def adamw_update(
    weight: nn.Parameter, group: dict[str, Any], state: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What AdamW's last step found and what it added, of the part of the weight that this rank holds.

    From w' = (1 − lr·decay)·w − lr·u, with u = m̂ / (√v̂ + eps) of the moments after the step
    (https://arxiv.org/abs/1711.05101).
    """
    beta1, beta2 = group["betas"]
    step, lr, decay = float(state["step"]), float(group["lr"]), group["weight_decay"]
    mean = _local(state["exp_avg"]) / (1 - beta1**step)
    spread = (_local(state["exp_avg_sq"]) / (1 - beta2**step)).sqrt_().add_(group["eps"])
    direction = mean.div_(spread)
    before = (_local(weight) + lr * direction) / (1 - lr * decay)
    return before, -lr * (direction + decay * before)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(weight: torch.Tensor) -> tuple[int, int]:
    """The first row that this rank holds of a weight cut along its rows, and how many ranks hold the same."""
    if not isinstance(weight, DTensor):
        return 0, 1
    mesh = weight.device_mesh
    copies = math.prod(
        mesh.size(axis) for axis, kind in enumerate(weight.placements) if isinstance(kind, Replicate)
    )
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    return offset[0], copies
