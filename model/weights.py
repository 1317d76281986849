"""Linear maps of lanes for decoding, with weights stored as float32, bfloat16 or int8.

Decoding one sequence reads every weight once per token and does almost nothing else, so that a smaller weight is
a faster one. "as_is" computes with torch in the weight's own dtype, on any device. The other kinds run on the
CPU and take and return float32; only the stored weights are rounded. int8 has one scale per output row.

For a few vectors (decoding) they call model/kernels/lane_gemv.c, which model/native.py compiles at first use.
Without a compiler torch computes the same in blocks, for bfloat16 and int8 no faster than float32. For many vectors
(prefill) torch multiplies, and bfloat16 and int8 weights are widened block by block, so that no float32 copy of a
weight exists.

Shape suffixes: L lanes   T vectors (tokens)   I, O a map's inputs and outputs per lane   R rows (L·O)
"""

from __future__ import annotations

from typing import Protocol

import torch

from model.native import library

WEIGHT_KINDS = ("as_is", "float32", "bfloat16", "int8")
STORED = (torch.float32, torch.bfloat16, torch.int8)  # in the order of the C file's enum
FEW = {torch.float32: 8, torch.bfloat16: 32, torch.int8: 32}
"""Up to so many vectors the compiled kernel is at least as fast as torch's matrix multiplication."""
BLOCK = 2**19
"""Weights widened at once: 2 MiB as float32, so that a block stays in the cache and is worth a call of torch."""
LEAST_SHARE = 2**16
"""Bytes of weights that are worth a thread of their own."""


class LaneWeight(Protocol):
    """One linear map per lane: (L, T, I) → (L, T, O)."""

    nbytes: int
    """What one application reads: weights and scales."""

    def __call__(self, x_LTI: torch.Tensor, out_LTO: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the maps; the result is written to out where given, without an allocation for few vectors."""
        ...


def lane_weight(weight: torch.Tensor, lanes: int, kind: str) -> LaneWeight:
    """The maps of a weight (L·O, I), lane after lane, of any floating dtype; kind is one of WEIGHT_KINDS.

    The weight itself is kept where kind stores it as it is, else a rounded copy. Raises ValueError for an unknown
    kind, and for one of the CPU's kinds where the weight lies elsewhere or has values that are not finite.
    """
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"weight kind {kind!r} must be one of {', '.join(WEIGHT_KINDS)}")
    weight = weight.detach()
    if kind == "as_is":
        return _TorchWeight(weight, lanes)
    if weight.device.type != "cpu":
        raise ValueError(
            f"weight kind {kind!r} needs weights on the CPU, not on {weight.device}: use 'as_is'"
        )
    if kind == "int8":
        return _CpuWeight(*_quantised(weight), lanes)
    return _CpuWeight(weight.to(getattr(torch, kind)).contiguous(), None, lanes)


class _TorchWeight:
    def __init__(self, weight: torch.Tensor, lanes: int):
        self.nbytes = weight.nbytes
        self._weight_LIO = weight.view(lanes, -1, weight.shape[1]).transpose(1, 2)

    def __call__(self, x_LTI: torch.Tensor, out_LTO: torch.Tensor | None = None) -> torch.Tensor:
        if len(x_LTI) == 1:
            out_TO = None if out_LTO is None else out_LTO[0]
            return torch.mm(x_LTI[0], self._weight_LIO[0], out=out_TO)[None]
        return torch.bmm(x_LTI, self._weight_LIO, out=out_LTO)


class _CpuWeight:
    def __init__(self, weight_RI: torch.Tensor, scale_R: torch.Tensor | None, lanes: int):
        self.nbytes = weight_RI.nbytes + (0 if scale_R is None else scale_R.nbytes)
        rows, self._inputs = weight_RI.shape
        self._lanes, self._outputs = lanes, rows // lanes
        self._weight_LOI = weight_RI.view(lanes, -1, self._inputs)
        self._scale_LO = None if scale_R is None else scale_R.view(lanes, -1)
        self._few = FEW[weight_RI.dtype]
        self._shares = max(1, weight_RI.nbytes // LEAST_SHARE)
        compiled = library()
        self._kernel = None if compiled is None else compiled.lane_gemv
        self._pointers = (
            STORED.index(weight_RI.dtype),
            weight_RI.data_ptr(),
            None if scale_R is None else scale_R.data_ptr(),
        )

    def __call__(self, x_LTI: torch.Tensor, out_LTO: torch.Tensor | None = None) -> torch.Tensor:
        vectors = x_LTI.shape[1]
        if out_LTO is None:
            out_LTO = x_LTI.new_empty(self._lanes, vectors, self._outputs)
        # The kernel trusts what it gets.
        self._check("x", x_LTI, (self._lanes, vectors, self._inputs))
        self._check("out", out_LTO, (self._lanes, vectors, self._outputs))
        if out_LTO.stride(2) != 1:
            raise ValueError(f"out must have contiguous rows, but its strides are {out_LTO.stride()}")
        if vectors > self._few or self._kernel is None:
            self._multiply_blocks(x_LTI, out_LTO)
            return out_LTO
        if x_LTI.stride(2) != 1:
            x_LTI = x_LTI.contiguous()
        self._kernel(
            *self._pointers,
            x_LTI.data_ptr(),
            out_LTO.data_ptr(),
            self._lanes,
            vectors,
            self._outputs,
            self._inputs,
            *x_LTI.stride()[:2],
            *out_LTO.stride()[:2],
            min(torch.get_num_threads(), self._shares),
        )
        return out_LTO

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} must be float32 {shape} on the CPU, got {tensor.dtype} {tuple(tensor.shape)} "
                f"on {tensor.device}"
            )

    def _multiply_blocks(self, x_LTI: torch.Tensor, out_LTO: torch.Tensor) -> None:
        if self._weight_LOI.dtype == torch.float32:
            torch.bmm(x_LTI, self._weight_LOI.transpose(1, 2), out=out_LTO)
            return
        rows = max(1, BLOCK // self._inputs)
        scratch_OI = torch.empty(min(rows, self._outputs), self._inputs)
        for x_TI, weight_OI, out_TO in zip(x_LTI, self._weight_LOI, out_LTO, strict=True):
            for narrow_OI, part_TO in zip(weight_OI.split(rows), out_TO.split(rows, dim=1), strict=True):
                wide_OI = scratch_OI[: len(narrow_OI)].copy_(narrow_OI)
                torch.mm(x_TI, wide_OI.T, out=part_TO)
        if self._scale_LO is not None:
            out_LTO *= self._scale_LO[:, None]


def _quantised(weight_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weights and float32 scales (R,): a row's largest magnitude becomes 127, halves round to even."""
    narrow_RI = torch.empty(weight_RI.shape, dtype=torch.int8)
    scale_R = torch.empty(len(weight_RI))
    rows = max(1, BLOCK // weight_RI.shape[1])
    for block, narrow, scale in zip(
        weight_RI.split(rows), narrow_RI.split(rows), scale_R.split(rows), strict=True
    ):
        block = block.float()
        scale.copy_(block.abs().amax(1) / 127)
        if not scale.isfinite().all():
            raise ValueError("int8 weights need finite values")
        # A row of zeros has scale 0; tiny keeps the division defined there and changes no other row that matters.
        smallest = torch.finfo(torch.float32).tiny
        narrow.copy_((block / scale.clamp_min(smallest)[:, None]).round())
    return narrow_RI, scale_R
