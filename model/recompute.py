"""Activation checkpointing: what the backward pass computes again instead of keeping it.

| policy      | computed again                            | kept of a layer, in wide tensors (L, T, D)            |
|-------------|-------------------------------------------|-------------------------------------------------------|
| none        | nothing                                   | residuals and normed states, twice; projections; SwiGLU |
| selective   | norms and SwiGLU products: no matrix      | residuals, twice; projections                         |
| segments:N  | N layers at a time, matrix products too   | between segments: residual, partials under way        |

A lane model has more to keep between layers than its residual: the partial outputs that are still under way. A
segment of one layer therefore saves little; take three layers or more. Uncompiled, at the smoke size's shapes with
12 layers and a delay of 2, `pytest -s tests/unit/test_recompute.py` tells 8.6 wide tensors kept a layer, 3.8 with
selective, and 2.9, 1.8 and 0.8 with segments of one, three and six layers. Those compute 1.26 to 1.32 times as much,
selective not a single product more.

Where our kernel adds and norms (model/kernels/lane_norm.py), selective computes no norm again: the kernel's
backward pass then starts from the normed state, which the linear map keeps anyway, instead of from the residual.
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
