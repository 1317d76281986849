"""Activation checkpointing: what the backward pass computes again instead of keeping it.

| policy      | computed again                            | kept of a layer, in wide tensors (L, T, D)            |
|-------------|-------------------------------------------|-------------------------------------------------------|
| none        | nothing                                   | residuals, twice; projections; SwiGLU                 |
| selective   | SwiGLU products: no matrix product        | residuals, twice; projections                         |
| segments:N  | N layers at a time, matrix products too   | between segments: partials under way, one stream      |

A lane model has more to keep between layers than its residual: the partial outputs that are still under way
(model/segments.py). A segment of one layer therefore saves little; take three layers or more. Uncompiled, at the smoke
size's shapes with 12 layers and a delay of 2, `pytest -s tests/unit/test_recompute.py` tells 4.4 wide tensors kept a
layer, 3.7 with selective, and 2.2, 1.3 and 0.5 with segments of one, three and six layers. Those compute 1.26 to 1.32
times as much, selective not a single product more. Compiled blocks keep what selective keeps with either, and no policy
keeps a normed state (model/add_norm_linear.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), keeping for the backward pass only the inputs; nothing in it may be random.

    A trailing matrix product is not computed again: recomputation ends with the last tensor that backward
    needs, which is the product's input. (Uncompiled float8 products name what they need after they have run.)
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
