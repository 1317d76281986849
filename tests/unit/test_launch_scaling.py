"""The model of speed over the number of GPUs: its volumes against what runs exchange, and its limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.scaling import Links, ring, speed, volume
from tests.runs import train
from tests.tiny import tiny_config
from train.config import RunConfig, compose
from train.profiling import RECORDED, SKIPPED

PHASE1 = compose(["experiment=phase1"])
COLLECTIVES = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce",
    "c10d::allreduce_": "replicate",
}


def exchanged(config: RunConfig) -> dict[str, float]:
    """Bytes of weights and gradients in rank 0's collectives in one micro-batch, from the profile of a run."""
    run = train(config)
    (folder,) = (run.path / "profile").iterdir()
    with gzip.open(folder / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    found = dict.fromkeys(COLLECTIVES.values(), 0)
    for event in events:
        kind = COLLECTIVES.get(event.get("name"))
        if kind is None:
            continue
        dims = event["args"]["Input Dims"]
        (size,) = dims[1] if kind == "reduce" else dims[0] if kind == "gather" else (dims[0][0] or [0])[:1]
        if size > 1000:  # the others are metrics
            found[kind] += 4 * size
    micro_batches = config.train.global_batch_size // config.train.local_batch_size // config.cluster.ranks
    return {kind: size / RECORDED / micro_batches for kind, size in found.items()}


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [(1, 1), (2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_volumes_are_those_of_runs(ranks: int, replicas: int, tiny_data: Path, tmp_path: Path) -> None:
    words = ("profile=on", f"parallel.replicate={replicas}", "checkpoint.every_steps=1000")
    config = tiny_config(tiny_data, tmp_path, *words, ranks=ranks, steps=SKIPPED + RECORDED)
    expected = volume(config, shard=ranks // replicas)
    found = exchanged(config)
    if ranks == 1:
        assert set(found.values()) == {0}, "one rank exchanges nothing, as a ring of one has no links"
        return
    assert (found["gather"], found["reduce"]) == (expected.gather, expected.reduce)
    assert found["replicate"] == (expected.replicate if replicas > 1 else 0)


def test_a_ring_by_hand() -> None:
    links = Links(nvlink=100.0, network=10.0, latency=0.5)
    assert ring(80.0, 1, links, within_node=True) == 0
    assert ring(80.0, 8, links, within_node=True) == pytest.approx(80 * 7 / 8 / 100 + 7 * 0.5)
    assert ring(80.0, 16, links, within_node=False) == pytest.approx(80 * 15 / 16 / 10 + 15 * 0.5)


def test_the_limits() -> None:
    free = Links(nvlink=1e18, network=1e18, latency=0.0)
    assert speed(PHASE1, 1024, 1024, 27000, free) == pytest.approx(27000, rel=1e-6)
    slow = Links(nvlink=1e6, network=1e6, latency=0.0)
    moved = volume(PHASE1, 192)
    bound = 2 * 4096 / ((moved.gather + moved.reduce) * 191 / 192 / 1e6)
    assert speed(PHASE1, 192, 192, 27000, slow) == pytest.approx(bound, rel=0.02)


def test_more_gpus_are_never_faster_each_and_copies_in_nodes_help() -> None:
    links = Links()
    flat = [speed(PHASE1, n, n, 27000, links) for n in (8, 64, 192, 1024)]
    nodes = [speed(PHASE1, n, 8, 27000, links) for n in (8, 64, 192, 1024)]
    assert flat == sorted(flat, reverse=True)
    assert nodes == sorted(nodes, reverse=True)
    assert all(a >= b for a, b in zip(nodes, flat, strict=True))
    assert speed(PHASE1, 192, 192, 27000, links, sequences=8) > flat[2]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scaling.png"
    assert main(["plan", "experiment=phase1", f"scaling_plot={file}", "network_gbytes=20"]) == 0
    assert "20 between nodes" in capsys.readouterr().out
    assert file.read_bytes()[:4] == b"\x89PNG"
