"""The Triton kernel without a GPU: its results under the interpreter, and what the compiler makes of it for sm_90."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.config import load_size
from model.kernels import lane_add as kernels
from model.kernels.lane_add import lane_add

ROOT = Path(__file__).resolve().parents[2]


def test_results_and_gradients_under_the_interpreter():
    """The operation in three dtypes, whole models in every variant of the exchange, and compiled blocks."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.interpreted_lane_add"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr[-3000:]
    assert finished.stdout.count("of at most") == 3


@pytest.mark.parametrize(
    ("own", "awaited", "says"),
    [
        ((2, 3, 8), None, "mode delayed needs awaited"),
        ((2, 3, 8), (2, 4, 8), "one shape"),
        ((1, 3, 8), (2, 3, 8), "one shape"),
    ],
)
def test_wrong_tensors_are_refused(own: Any, awaited: Any, says: str):
    arriving = None if awaited is None else torch.zeros(awaited)
    with pytest.raises(ValueError, match=says):
        lane_add(torch.zeros(2, 3, 8), torch.zeros(own), arriving, "delayed", 1e-5)


def registers_and_spills(kernel: Any, fixed: dict[str, Any], warps: int, folder: Path) -> tuple[int, int]:
    """Compile for an H100 with bfloat16 tensors: registers and bytes of spilled ones, a thread."""
    types = {"tokens": "i32", "rstd_LT": "*fp32", "shrink_LT": "*fp32"}
    signature = {n: "constexpr" if n in fixed else types.get(n, "*bf16") for n in kernel.arg_names}
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n not in fixed}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    binary = folder / f"{kernel.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", told))
    return int(values["REG"]), int(values["STACK"]) + int(values["LOCAL"])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "warps",
    [
        warps if warps == kernels.DEFAULT_WARPS else pytest.param(warps, marks=pytest.mark.slow)
        for warps in kernels.WARPS
    ],
)
def test_registers_and_spills_for_an_h100(warps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prints the compiler's report at the 2b size; nothing may spill with the warps that need no tuning."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    size = load_size("2b")
    print(f"\n{'mode':8} {'warps':>5}   registers (bytes spilled): forward, backward")
    for mode in kernels.MODES:
        fixed: Any = kernels.constants(size.num_lanes, size.hidden_size, mode)  # pyright: ignore[reportArgumentType]
        report = [
            registers_and_spills(kernels.forward_kernel, fixed | {"EPS": 1e-5}, warps, tmp_path),
            registers_and_spills(kernels.backward_kernel, fixed, warps, tmp_path),
        ]
        row = ", ".join(f"{registers} ({spilled})" for registers, spilled in report)
        print(f"{mode:8} {warps:5}   {row}")
        if warps == kernels.DEFAULT_WARPS:
            assert all(spilled == 0 for _, spilled in report), mode
            # Two programs of 8 warps then fit one multiprocessor.
            assert all(registers <= 128 for registers, _ in report), mode
