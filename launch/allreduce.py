"""`python -m launch.allreduce FLOOR LINK-FLOOR`: this node's all-reduces against floors in GB/s; called by health.sh.

First the node's own devices reduce among each other. Then each pair of neighbours in the ring of the job's nodes does,
with all devices of both, in rounds in which no node is in two pairs. An all-reduce over all nodes would find that
something is slow and not where; in the ring each node has two neighbours, so that a node none of whose pairs works is
the one at fault, and a pair that fails between two nodes whose other pairs work is a weak link, told and not acted on.
Of two nodes there is one pair: both are named when it fails, unless one does not get through its own all-reduce.

GB/s are those of the bus, 2 (n-1)/n × bytes / seconds, as nccl-tests gives them. Every GPU is one rank over NCCL; a
node without GPUs has two ranks on its CPU over gloo. Prints `weak link …` lines and one last line; exits with 1 when
this node is at fault. NCCL has not been run by this repository's tests.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

ROUNDS = 5
CPU_RANKS = 2
PATIENCE_SECONDS = (
    60  # in the first round; longer in later ones, whose neighbour may be held up by its other one
)


def pairs_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs that make up the ring 0–1–…–(nodes-1)–0, no node twice in a round."""
    if nodes < 2:
        return []
    even = [(n, n + 1) for n in range(0, nodes - 1, 2)]
    odd = [(n, n + 1) for n in range(1, nodes - 1, 2)]
    closing = [(nodes - 1, 0)] if nodes > 2 else []
    if nodes % 2:
        return [even, odd, closing]
    return [pairs for pairs in (even, odd + closing) if pairs]


def patience(round_number: int) -> float:
    """More than all earlier rounds' together, so that who comes late from a failed pair is still met."""
    return PATIENCE_SECONDS * (1 + 1.5 * round_number)


def measure(backend: str, local: int, host: str, port: int, rank: int, ranks: int) -> float:
    """The best bus bandwidth in GB/s of a few all-reduces among `ranks`, of which rank 0 on `host` has the port."""
    import torch
    import torch.distributed as dist

    size = 256 * 2**20 if backend == "nccl" else 4 * 2**20
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    values = torch.ones(size // 4, device=device)
    store = dist.TCPStore(host, port, ranks, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    best = float("inf")
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(values)
        float(values[0])  # waits for a GPU
        best = min(best, time.perf_counter() - begun)
    dist.barrier()  # rank 0 has the store
    return 2 * (ranks - 1) / ranks * size / best / 1e9


def measured(seconds: float, *arguments: Any) -> float | str:
    """`measure` in a process of its own, which is killed after `seconds`; what went wrong in place of a result.

    A failed group leaves traces in its process, and a hung one may never come back.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        try:
            theirs.send(measure(*arguments))
        except Exception as error:
            theirs.send(str(error).splitlines()[0])

    process = multiprocessing.get_context("fork").Process(target=child)  # torch is imported already
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else f"no answer in {seconds:.0f} s"
    except EOFError:
        return "its process died"
    finally:
        process.kill()
        process.join()


def worker(arguments: Sequence[str]) -> int:
    """One device of the node: `backend, local rank, ranks a node, node, port, floor, link floor, name=address …`.

    Only local rank 0 speaks. Ports follow `port`, one for each group, for the sake of nodes on one machine.
    """
    import torch.distributed  # noqa: F401 - for the processes that are forked

    backend, (local, ranks, node, port) = arguments[0], (int(word) for word in arguments[1:5])
    floor, link_floor = (float(word) for word in arguments[5:7])
    names, _, addresses = zip(*(word.partition("=") for word in arguments[7:]), strict=True)

    def tell(words: str) -> None:
        if local == 0:
            print(words, flush=True)

    def judge(found: float | str, least: float) -> str:
        """What is wrong with a measurement; empty for nothing."""
        if isinstance(found, str):
            return f"failed: {found}"
        return f"at {found:.3g} GB/s, less than {least:g}" if found < least else ""

    own, speeds = "", []
    if ranks > 1:
        found = measured(patience(0), backend, local, "127.0.0.1", port + node, local, ranks)
        own = judge(found, floor)  # it still meets its neighbours, who would wait for it
        speeds += [] if own else [f"own devices {found:.3g} GB/s"]
    works: list[bool] = []
    for number, pairs in enumerate(pairs_of(len(names))):
        for left, right in pairs:
            if node not in (left, right):
                continue
            rank, place = local + (ranks if node == right else 0), port + len(names) + left
            found = measured(patience(number), backend, local, addresses[left], place, rank, 2 * ranks)
            what, problem = f"{names[left]}–{names[right]}", judge(found, link_floor)
            works.append(not problem)
            if problem:
                tell(f"weak link: {what} {problem}")
            else:
                speeds.append(f"{what} {found:.3g} GB/s")
    alone = bool(works) and not any(works)
    if own:
        tell(f"its own {ranks} devices {own}")
    else:
        tell(f"none of its {len(works)} links works" if alone else ", ".join(speeds))
    return 1 if own or alone else 0


def main(arguments: Sequence[str]) -> int:
    import torch

    own = os.environ.get("SLURMD_NODENAME", "localhost")
    nodes = os.environ.get("HEALTH_NODES", f"{own}=127.0.0.1").split()  # name=address, in the job's order
    node = [word.partition("=")[0] for word in nodes].index(own)
    port = 30000 + int(os.environ.get("SLURM_JOB_ID", "0")) * 64 % 20000
    gpus = torch.cuda.device_count()
    ranks = gpus or CPU_RANKS
    words = [str(ranks), str(node), str(port), *arguments, *nodes]
    command = [sys.executable, "-m", "launch.allreduce", "worker", "nccl" if gpus else "gloo"]
    workers = [subprocess.Popen([*command, str(local), *words]) for local in range(ranks)]
    try:
        return max(abs(process.wait()) for process in workers)
    finally:
        for process in workers:
            process.kill()


if __name__ == "__main__":
    rest = sys.argv[1:]
    sys.exit(worker(rest[1:]) if rest[0] == "worker" else main(rest))
