"""Let torchtitan 0.3.0 run without a GPU, and on torch 2.13.

torchtitan picks an accelerator when it is imported, so `prepare_torchtitan` must run before any other
torchtitan module is. On CPU it puts a stand-in in the place of `torch.cuda`.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from types import SimpleNamespace
from typing import Any

import torch


class CpuDeviceModule:
    """The part of `torch.cuda`'s interface that torchtitan calls, for a process that computes on the CPU."""

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return platform.processor() or platform.machine()

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def set_device(device: Any) -> None: ...

    @staticmethod
    def synchronize(device: Any = None) -> None: ...


def prepare_torchtitan(device: str) -> None:
    """Make torchtitan use `device` ("cpu" or "cuda"). Call before importing anything else of torchtitan.

    Raises RuntimeError when torchtitan was imported before with another device.
    """
    early = "torchtitan.distributed.utils" in sys.modules
    import torchtitan.tools.utils as titan_utils

    if early and titan_utils.device_type != device:
        raise RuntimeError(
            f"torchtitan was imported for {titan_utils.device_type} before cluster.device={device} was known: "
            "start the run in a process of its own"
        )
    if device == "cpu":
        titan_utils.device_type = "cpu"
        titan_utils.device_module = CpuDeviceModule  # pyright: ignore[reportAttributeAccessIssue]
        _let_muon_use_the_cpu()
    elif not torch.cuda.is_available():
        raise RuntimeError(
            "cluster.device=cuda but torch sees no GPU on this node: use cluster=local for CPU"
        )
    if not hasattr(torch.distributed, "set_timeout"):
        # torch 2.13 has the function under its private name only; torchtitan was written for 2.14.
        torch.distributed.set_timeout = (  # pyright: ignore[reportAttributeAccessIssue]
            torch.distributed.distributed_c10d._set_pg_timeout
        )


def _let_muon_use_the_cpu() -> None:
    """torchtitan's Muon refuses all but CUDA, though torch.cpu has the streams and events that it needs, as no-ops."""
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    DistMuon._validate_parameter_storage = lambda self: torch.device("cpu")
    torch.cpu.Stream = _CpuStream


class _CpuStream(torch.cpu.Stream):
    """torch.cpu.Stream, which takes no device, with the arguments of the other devices' streams."""

    def __init__(self, device: torch.device | None = None, priority: int = -1):
        super().__init__(priority)
