"""The C functions of model/kernels, which decoding on the CPU uses where it can.

They are compiled at first use, for the processor at hand, with the system's C compiler (`cc`, or $CC) into the user's
cache directory, so that the package installs without one. `library()` is None where that does not work; torch then
computes the same, more slowly, and `backend()` says why.

They use torch.get_num_threads() threads at most, from OpenMP's pool, which torch shares where both come from GCC. Its
threads spin for a moment after their work: processes that share cores should have one thread each, which never
spins.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401 - its OpenMP must be loaded first, so that ours is the same

SOURCES = tuple(sorted(Path(__file__).with_name("kernels").glob("*.c")))
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_long, ctypes.c_float, ctypes.c_void_p
FUNCTIONS = {
    "lane_gemv": (_INT, *[_POINTER] * 4, *[_LONG] * 8, _INT),
    "rms_norm": (*[_POINTER] * 3, *[_LONG] * 4, _FLOAT),
    "swiglu": (*[_POINTER] * 2, *[_LONG] * 2),
    "add_delayed": (*[_POINTER] * 4, *[_LONG] * 2),
    "attend_column": (*[_POINTER] * 8, *[_LONG] * 9, _INT),
}
"""Their arguments; none returns anything."""


def library() -> ctypes.CDLL | None:
    found = _library()
    return found if isinstance(found, ctypes.CDLL) else None


def backend() -> str:
    """What decoding on the CPU runs on: "compiled", or "torch: <why>"."""
    found = _library()
    return "compiled" if isinstance(found, ctypes.CDLL) else f"torch: {found}"


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, built if need be, or why there is none."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        return _built(compiler, FLAGS)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _built(compiler: list[str], flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compile unless the cache has it. Raises OSError or SubprocessError that says what failed.

    Processes may do so at once: each renames a file of its own into place.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"
    identity = "\0".join((*(source.read_text() for source in SOURCES), *compiler, *flags, _cpu()))
    target = cache / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return _loaded(target)
    if not compiler or shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C compiler {shlex.join(compiler)!r} in PATH")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        fresh = Path(scratch) / target.name
        done = subprocess.run(
            [*compiler, *flags, *map(str, SOURCES), "-o", str(fresh), "-lm"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise OSError(f"{shlex.join(compiler)} failed: {done.stderr.strip()[-500:]}")
        fresh.rename(target)
    return _loaded(target)


def _loaded(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _cpu() -> str:
    """What -march=native depends on: a home directory may serve several kinds of machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *sorted(set(features))])
