"""Activation checkpointing: what the backward pass computes again instead of keeping it.

| policy      | computed again                            | kept of a layer, in wide tensors (L, T, D)            |
|-------------|-------------------------------------------|-------------------------------------------------------|
| none        | nothing                                   | residuals and normed states, twice; projections; SwiGLU |
| selective   | norms and SwiGLU products: no matrix      | residuals, twice; projections                         |
| segments:N  | N layers at a time, matrix products too   | between segments: residual, partials under way        |

A lane model has more to keep between layers than its residual: the partial outputs that are still under way. A
segment of one layer therefore saves little; take three layers or more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), keeping for the backward pass only the inputs; nothing in it may be random.

    A trailing matrix product is not computed again: recomputation ends with the last tensor that backward
    needs, which is the product's input.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
