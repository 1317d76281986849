"""Linear maps with narrow weights: against float64, on every path, and how the kernel is built."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import native, weights
from model.weights import WEIGHT_KINDS, lane_weight

ROOT = Path(__file__).resolve().parents[2]
CPU_KINDS = WEIGHT_KINDS[1:]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler cc in PATH")
SIZES = [(8, 12, 64), (2, 5, 33), (3, 4, 128), (1, 1, 7), (1, 131, 100), (4, 3, 1)]
"""(lanes, outputs, inputs): with and without remainders of four rows and of every vector width."""
VECTORS = (1, 2, 3, 4, 5, 7, 8, 9, 33, 70)
"""Every remainder of the kernel's groups, and both sides of where torch takes over."""
EPSILON = torch.finfo(torch.float32).eps


def random_case(lanes: int, outputs: int, inputs: int, vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(lanes + 10 * outputs + 1000 * inputs + vectors)
    weight = torch.randn(lanes * outputs, inputs, generator=generator, dtype=torch.float64)
    # Rows and vectors of very different size, so that a scale in the wrong place shows.
    weight *= torch.logspace(-3, 3, len(weight), dtype=torch.float64)[:, None]
    x = torch.randn(lanes, vectors, inputs, generator=generator)
    return weight, x * torch.logspace(-2, 2, vectors)[:, None]


def reference(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.double(), weight.double().view(len(x), -1, weight.shape[1]).transpose(1, 2))


def bound(weight: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Largest error of each result: that of storing each weight, and float32's of products and sums.

    Storing: half a unit in the last place of the 24 bits that float32 keeps, and of the 8 that bfloat16 keeps
    (it is rounded from float32), or half an int8 step, 1/127 of the row's largest weight, and float32's error of
    the scale and the division. A sum of n products, in any order, errs by at most n + 1 roundings of the sum of
    magnitudes.
    """
    inputs = weight.shape[1]
    magnitudes = reference(weight.abs(), x.abs())
    if kind == "int8":
        steps = (weight.abs().amax(1) / 127).view(len(x), 1, -1)
        storing = steps * (0.5 + 127 * 3 * EPSILON) * x.double().abs().sum(-1, keepdim=True)
    else:
        storing = magnitudes * (2.0**-24 + (kind == "bfloat16") * 2.0**-8)
    return storing + 1.02 * (inputs + 2) * EPSILON / 2 * (magnitudes + storing)


def assert_within_bound(result: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    error = (result.double() - reference(weight, x)).abs()
    assert (error <= bound(weight, x, kind)).all(), (kind, (error / bound(weight, x, kind)).max())


def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "library", lambda: None)


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("kind", CPU_KINDS)
@pytest.mark.parametrize(("lanes", "outputs", "inputs"), SIZES)
def test_error_is_rounding(
    lanes: int, outputs: int, inputs: int, kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "torch":
        use_torch(monkeypatch)
        monkeypatch.setattr(weights, "BLOCK", 64)  # several blocks, the last one smaller
    elif shutil.which("cc") is None:
        pytest.skip("no C compiler cc in PATH")
    for vectors in VECTORS:
        weight, x = random_case(lanes, outputs, inputs, vectors)
        result = lane_weight(weight, lanes, kind)(x)
        assert result.dtype == torch.float32
        assert result.shape == (lanes, vectors, outputs)
        assert_within_bound(result, weight, x, kind)


def test_bound_is_tight_enough_to_see_a_wrong_kind() -> None:
    weight, x = random_case(2, 8, 64, 3)
    rounded = lane_weight(weight, 2, "bfloat16")(x)
    error = (rounded.double() - reference(weight, x)).abs()
    assert (error > bound(weight, x, "float32")).any()


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    lanes=st.integers(1, 4),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 70),
    vectors=st.integers(1, 12),
    kind=st.sampled_from(CPU_KINDS),
    threads=st.integers(1, 3),
)
def test_results_do_not_depend_on_company(
    lanes: int, outputs: int, inputs: int, vectors: int, kind: str, threads: int
) -> None:
    """One lane and one vector alone give the bits they give among others, on any number of threads."""
    weight, x = random_case(lanes, outputs, inputs, vectors)
    vectors = min(vectors, weights.FEW[torch.float32])
    lane, vector = lanes - 1, vectors // 2
    alone = lane_weight(weight.view(lanes, outputs, inputs)[lane], 1, kind)(x[lane, None, vector, None])
    least, weights.LEAST_SHARE = weights.LEAST_SHARE, 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = lane_weight(weight, lanes, kind)(x[:, :vectors])
    finally:
        torch.set_num_threads(before)
        weights.LEAST_SHARE = least
    assert torch.equal(together[lane, vector], alone[0, 0])


@needs_compiler
@pytest.mark.parametrize("instructions", ["haswell", "x86-64"])
def test_older_processors(instructions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in native._cpu():
        pytest.skip("these instructions need an x86 processor with AVX2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = tuple(f"-march={instructions}" if f == "-march=native" else f for f in native.FLAGS)
    library = native._built(["cc"], flags)
    monkeypatch.setattr(weights, "library", lambda: library)
    for kind in CPU_KINDS:
        for vectors in VECTORS[:8]:
            weight, x = random_case(3, 11, 45, vectors)
            assert_within_bound(lane_weight(weight, 3, kind)(x), weight, x, kind)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("vectors", [1, 4, 40])
@pytest.mark.parametrize("lanes", [1, 3])
def test_out_is_written(lanes: int, vectors: int, kind: str) -> None:
    weight, x = random_case(lanes, 8, 32, vectors)
    weight = weight.float()
    linear = lane_weight(weight, lanes, kind)
    whole = torch.full((lanes, vectors + 2, 8 + 3), 7.0)
    out = whole[:, 1:-1, 2:-1] if kind != "as_is" else torch.empty(lanes, vectors, 8)
    assert linear(x, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, linear(x))
    if kind != "as_is":
        out.fill_(7.0)
        assert (whole == 7).all(), "wrote beside out"


@needs_compiler
def test_few_vectors_allocate_nothing() -> None:
    weight, x = random_case(2, 8, 32, 1)
    linear, out = lane_weight(weight, 2, "int8"), torch.empty(2, 1, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        linear(x, out)
    assert not [event for event in profile.key_averages() if event.self_cpu_memory_usage > 0]


@pytest.mark.parametrize("kind", CPU_KINDS)
@pytest.mark.parametrize("vectors", [1, 3, 40])
def test_any_strides_of_x(vectors: int, kind: str) -> None:
    weight, x = random_case(2, 8, 32, vectors)
    linear = lane_weight(weight, 2, kind)
    wider = torch.zeros(vectors, 2, 40)
    wider[:, :, 3:35] = x.transpose(0, 1)
    for same in (x.transpose(1, 2).contiguous().transpose(1, 2), wider[:, :, 3:35].transpose(0, 1)):
        assert torch.equal(same, x)
        assert_within_bound(linear(same), weight, x, kind)
    shared = x[:1].expand(2, -1, -1)
    assert_within_bound(linear(shared), weight, shared, kind)


def test_as_is_is_the_weights_own_arithmetic() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight, x = random_case(2, 8, 32, 3)
        weight, x = weight.to(dtype), x.to(dtype)
        linear = lane_weight(weight, 2, "as_is")
        assert linear(x).dtype == dtype
        assert linear.nbytes == weight.nbytes
        torch.testing.assert_close(linear(x).double(), reference(weight, x), rtol=0.02, atol=1)


def test_bytes_and_sharing() -> None:
    weight = torch.randn(24, 32)
    assert [lane_weight(weight, 2, kind).nbytes for kind in CPU_KINDS] == [3072, 1536, 768 + 24 * 4]
    linear, x = lane_weight(weight, 2, "float32"), torch.ones(2, 1, 32)
    weight.zero_()
    assert (linear(x) == 0).all(), "a float32 weight was copied"


def test_int8_keeps_what_it_can_hold() -> None:
    """Whole numbers up to 127, a row of zeros, and half-precision weights beyond int8's range."""
    weight = torch.tensor([[127.0, -127, 3, -1], [0, 0, 0, 0], [60000, -60000, 0, 0]], dtype=torch.float16)
    x = torch.eye(4)[None]
    assert torch.allclose(lane_weight(weight, 1, "int8")(x)[0].T, weight.float(), rtol=1e-6)


def test_refusals() -> None:
    weight, x = random_case(2, 8, 32, 1)
    linear = lane_weight(weight, 2, "int8")
    with pytest.raises(ValueError, match="int4"):
        lane_weight(weight, 2, "int4")
    with pytest.raises(ValueError, match="as_is"):
        lane_weight(weight.to("meta"), 2, "bfloat16")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            lane_weight(torch.full((2, 2), bad), 1, "int8")
    for wrong in (x.double(), x[:1], x[:, :, :-1]):
        with pytest.raises(ValueError, match=r"float32 \(2, 1, 32\)"):
            linear(wrong)
    for wrong in (torch.empty(2, 1, 9), torch.empty(2, 1, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"out must be float32 \(2, 1, 8\)"):
            linear(x, wrong)
    with pytest.raises(ValueError, match="contiguous rows"):
        linear(x, torch.empty(2, 1, 16)[:, :, ::2])


SHOW = "from model.native import backend; print(backend())"


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CC", "XDG_CACHE_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", SHOW], env=kept | environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return text.strip()


@needs_compiler
def test_compiles_once_even_when_many_start(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    processes = [start(cache) for _ in range(2)]
    assert [output(process) for process in processes] == ["compiled"] * 2
    (library,) = (tmp_path / "laneformer").iterdir()
    built = library.stat().st_mtime_ns
    assert output(start(cache | {"PATH": ""})) == "compiled", "the cache needs no compiler"
    assert library.stat().st_mtime_ns == built


def test_without_a_compiler(tmp_path: Path) -> None:
    assert output(start({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})) == "torch: no C compiler 'cc' in PATH"


def test_compiler_that_fails(tmp_path: Path) -> None:
    found = output(start({"XDG_CACHE_HOME": str(tmp_path), "CC": "false"}))
    assert found.startswith("torch: false failed")
    assert not list((tmp_path / "laneformer").iterdir()), "left files behind"


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert output(start({"XDG_CACHE_HOME": str(tmp_path / "file")})).startswith("torch: ")


@needs_compiler
def test_backend_here() -> None:
    assert native.backend() == "compiled"
    assert isinstance(native.library(), ctypes.CDLL)
