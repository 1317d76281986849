"""Thirty random faults over one training run: it ends as if nothing had happened.

Attempts are started as the launcher starts them, one after another; the ranks are forks of one server, so that a
restart takes two seconds instead of the twenty of a Slurm job (tests/slurm has each kind of fault once).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from launch.progress import read_progress
from tests.parallel.test_failures import logged, start
from tests.runs import consumed, numbers, train
from tests.tiny import tiny_config
from train.config import RunConfig
from train.run_dir import RunDir, read_lines

pytestmark = pytest.mark.slow

FAULTS = 30
STEPS = 400
Ranks = Sequence[BaseProcess]


def send(rank: BaseProcess, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if rank.pid is not None and rank.is_alive():
            os.kill(rank.pid, number)


def kill_all(ranks: Ranks) -> None:
    for rank in ranks:
        send(rank, signal.SIGKILL)
    for rank in ranks:
        rank.join()


def wait_until(ready: Callable[[], bool], ranks: Ranks, seconds: float = 60) -> None:
    """Until `ready`, or until no rank is left."""
    deadline = time.monotonic() + seconds
    while not ready() and any(rank.is_alive() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.002)


# Each fault is given a running attempt and leaves none.


def kill_one_rank(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    send(draw.choice(ranks), signal.SIGKILL)
    time.sleep(draw.uniform(0, 0.3))  # the others wait for it, until srun ends them
    kill_all(ranks)


def lose_the_node(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    kill_all(ranks)


def kill_in_a_save(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    wait_until(lambda: any(run.checkpoints.glob(".step-*.tmp")), ranks)
    kill_all(ranks)


def stop_on_request(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    run.stop_file.parent.mkdir(exist_ok=True)
    run.stop_file.touch()
    for rank in ranks:
        rank.join(60)


def hang(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    victim = draw.choice(ranks)
    send(victim, signal.SIGSTOP)
    for rank in ranks:
        if rank is not victim:
            rank.join(60)
            assert rank.exitcode == 5
    kill_all(ranks)


def fill_the_disk(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    before = run.metric_rows("train")[-1]["step"]
    step = 5 * (before // 5 + 2)  # a save that has not begun
    folder = run.checkpoints / f".step-{step}.tmp"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").symlink_to("/dev/full")
    wait_until(lambda: logged(run, step + 6), ranks)  # told of at the next save
    kill_all(ranks)


def damage_the_newest_checkpoint(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    kill_all(ranks)
    complete = run.complete_checkpoints()
    if complete:
        file = draw.choice(sorted(complete[-1][1].glob("*.distcp")))
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1
        file.write_bytes(content)


def tear_a_line(run: RunDir, ranks: Ranks, draw: random.Random) -> None:
    kill_all(ranks)
    with run.metrics.open("a") as stream:
        stream.write('{"kind": "train", "step": 99')


KINDS = (
    kill_one_rank,
    lose_the_node,
    kill_in_a_save,
    stop_on_request,
    hang,
    fill_the_disk,
    damage_the_newest_checkpoint,
    tear_a_line,
)


def one_fault(
    config: RunConfig, draw: random.Random, kind: Callable[[RunDir, Ranks, random.Random], None]
) -> RunDir:
    run = RunDir(Path(config.runs) / config.name)
    rows = run.metric_rows("train")
    resumed = rows[-1]["step"] if rows else 0
    run, ranks = start(config)
    steps = draw.randint(1, 12)
    try:
        wait_until(lambda: logged_after(run, resumed, steps), ranks)
        assert any(rank.is_alive() for rank in ranks), "it ended before the fault"
        kind(run, ranks, draw)
    finally:
        kill_all(ranks)
    return run


def logged_after(run: RunDir, step: int, more: int) -> bool:
    rows = run.metric_rows("train")
    return bool(rows) and rows[-1]["step"] >= step + more


def test_thirty_random_faults_change_nothing(tiny_data: Path, tmp_path: Path) -> None:
    words = ["cluster.hang_factor=10", "cluster.hang_seconds=2", "data.max_epochs=100"]
    calm = train(tiny_config(tiny_data, tmp_path, *words, "name=calm", ranks=2, steps=STEPS))
    config = tiny_config(tiny_data, tmp_path, *words, "name=chaos", ranks=2, steps=STEPS)
    draw = random.Random(7)
    kinds = [KINDS[n % len(KINDS)] for n in range(FAULTS)]
    draw.shuffle(kinds)
    for kind in kinds:
        run = one_fault(config, draw, kind)
        assert not run.done, "all steps were trained on before all faults had struck"
    run = train(config)
    assert run.done
    assert numbers(run) == numbers(calm)  # bitwise
    assert consumed(run) == consumed(calm)
    attempts = [line for line in read_lines(run.attempts) if line["event"] == "start"]
    assert len(attempts) == FAULTS + 1
    goodput = read_progress(run).goodput
    assert goodput is not None
    print(f"\n{dict(Counter(kind.__name__ for kind in kinds))}\ngoodput {100 * goodput:.1f} %")
