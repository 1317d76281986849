"""The health check's all-reduces: who is paired with whom, and who is named. Real gloo groups; a rank is a node."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from launch.allreduce import pairs_of
from tests.ranks import free_port, start_ranks


@pytest.mark.parametrize("nodes", range(2, 26))
def test_the_rounds_are_a_ring_in_which_no_node_waits_for_two(nodes: int) -> None:
    rounds = pairs_of(nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)
    links = [frozenset(pair) for pairs in rounds for pair in pairs]
    ring = [frozenset((n, (n + 1) % nodes)) for n in range(nodes)]
    assert sorted(map(sorted, links)) == sorted(map(sorted, set(ring)))
    assert len({left for pairs in rounds for left, _ in pairs}) == len(links), "two pairs would share a port"


def node(port: int, nodes: int, slow: int, silent: int) -> int:
    """A node of one device; `slow` takes 0.25 s for each all-reduce, `silent` does not take part."""
    import torch.distributed as dist

    from launch import allreduce

    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    allreduce.PATIENCE_SECONDS = 4
    if rank == silent:
        return 0
    if rank == slow:
        reduce = dist.all_reduce

        def delayed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.25)
            return reduce(*args, **kwargs)

        dist.all_reduce = delayed
    words = [
        "gloo",
        "0",
        "1",
        str(rank),
        str(port),
        "0.02",
        "0.02",
        *(f"n{n + 1}=127.0.0.1" for n in range(nodes)),
    ]
    return allreduce.worker(words)


@pytest.mark.parametrize(
    ("nodes", "slow", "silent", "at_fault", "weak"),
    [
        (3, 1, -1, [1], {"n1–n2", "n2–n3"}),
        (4, -1, 1, [], {"n1–n2", "n2–n3"}),  # named by its silence: launch/lib.sh
        (2, -1, -1, [], set()),
    ],
)
def test_the_node_at_fault_is_named_and_its_neighbours_are_not(
    nodes: int, slow: int, silent: int, at_fault: list[int], weak: set[str], tmp_path: Path
) -> None:
    ranks = start_ranks(nodes, tmp_path / "log", node, free_port(), nodes, slow, silent)
    for rank in ranks:
        rank.join(60)
    told = (tmp_path / "log").read_text()
    assert [n for n, rank in enumerate(ranks) if rank.exitcode] == at_fault, told
    assert set(re.findall(r"weak link: (\S+)", told)) == weak
