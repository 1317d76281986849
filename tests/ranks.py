"""Run a function on N ranks of one machine, quickly.

Importing torchtitan costs ten seconds of CPU. A fork server imports it once for the whole test session; each
rank is then a fork of that server, which holds no threads and no process group.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _enter(
    rank: int,
    world_size: int,
    port: int,
    log: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple,
) -> None:
    os.environ.update(environment)  # a fork of the server has the server's
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    stream = Path(log).open("a", buffering=1)  # noqa: SIM115 - open for the life of the process
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    try:
        status = function(*args)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(70)
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0)


def start_ranks(
    world_size: int, log: Path, function: Callable[..., Any], *args: Any
) -> Sequence[BaseProcess]:
    """Start `function(*args)` on every rank; its output is appended to `log`."""
    port = free_port()
    ranks = [
        _context.Process(
            target=_enter, args=(rank, world_size, port, str(log), dict(os.environ), function, args)
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_ranks(
    world_size: int, log: Path, function: Callable[..., Any], *args: Any, timeout: float = 300
) -> None:
    """`start_ranks`, wait, and fail with the log's end unless every rank returned 0 or None."""
    ranks = start_ranks(world_size, log, function, *args)
    for process in ranks:
        process.join(timeout)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert codes == [0] * world_size, f"exit codes {codes}; {log}:\n{log.read_text()[-6000:]}"
