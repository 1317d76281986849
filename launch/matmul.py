"""`python -m launch.matmul FLOOR`: this node's matrix products against a floor in TFLOP/s; called by health.sh.

Every GPU multiplies bfloat16 matrices of 8192; a node without GPUs multiplies float32 ones of 1024 on its CPU. Exits
with 1 and names the devices below the floor. The GPU path has not been run by this repository's tests.
"""

from __future__ import annotations

import sys
import time

ROUNDS = 20


def teraflops(device: str) -> float:
    """The best of three measurements, after one to warm up."""
    import torch

    cuda = device.startswith("cuda")
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    def measure() -> float:
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            torch.mm(a, b)
        if cuda:
            torch.cuda.synchronize(device)
        return 2 * size**3 * ROUNDS / (time.perf_counter() - begun) / 1e12

    measure()
    return max(measure() for _ in range(3))


def main(arguments: list[str]) -> int:
    import torch

    floor = float(arguments[0])
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]
    speeds = {device: teraflops(device) for device in devices}
    slow = [
        f"{d} at {speed:.3g} TFLOP/s, less than {floor:g}" for d, speed in speeds.items() if speed < floor
    ]
    print("; ".join(slow) if slow else f"slowest {min(speeds.values()):.3g} TFLOP/s")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
