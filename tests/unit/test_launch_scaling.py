"""The model of speed over the number of GPUs: its volumes against what runs exchange, and its limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.scaling import Links, ring, speed, volume, without_waiting
from tests.benchmarks import scaling as bench
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


def test_communication_that_nothing_hides() -> None:
    """Of a micro-batch: its computation, and all its bytes and ring steps."""
    links = Links(nvlink=1e9, network=1e9, latency=1e-3)
    moved, layers = volume(PHASE1, 4), PHASE1.model.num_hidden_layers + 1
    seconds = (moved.gather + moved.reduce) * 3 / 4 / 1e9 + 3 * layers * 3 * 1e-3
    expected = 2 * 4096 / (2 * 4096 / 27000 + seconds)
    assert speed(PHASE1, 4, 4, 27000, links, overlap=False) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "shard", "between_copies"), [(24, 8, 1e9), (8, 4, 4e9)])
def test_copies_by_hand(ranks: int, shard: int, between_copies: float) -> None:
    """Gathers and reductions within a copy, by NVLink; then twice a ring over copies, by it if they share a node."""
    links = Links(nvlink=4e9, network=1e9, latency=1e-3)
    moved, layers, copies = volume(PHASE1, shard), PHASE1.model.num_hidden_layers + 1, ranks // shard
    within = (moved.gather + moved.reduce) * (shard - 1) / shard / 4e9 + 3 * layers * (shard - 1) * 1e-3
    share = moved.reduce / shard
    between = 2 * (share * (copies - 1) / copies / between_copies + layers * (copies - 1) * 1e-3)
    expected = 2 * 4096 / (2 * 4096 / 27000 + within + between)
    assert speed(PHASE1, ranks, shard, 27000, links, overlap=False) == pytest.approx(expected)


def test_communication_that_hides_in_part() -> None:
    """The first gather and the last reduction, where computation takes longer than all others."""
    links, layers = Links(nvlink=1e12, network=1e12, latency=1e-3), PHASE1.model.num_hidden_layers + 1
    moved, forward = volume(PHASE1, 2), 2 * 4096 / 27000 / 3 / layers
    gather, reduce = (size / 2 / 1e12 + 1e-3 for size in (moved.gather / 2 / layers, moved.reduce / layers))
    assert gather + reduce < 2 * forward  # backward hides all but the last reduction
    seconds = gather + 3 * layers * forward + reduce
    assert speed(PHASE1, 2, 2, 27000, links) == pytest.approx(2 * 4096 / seconds)


@pytest.mark.parametrize(("ranks", "shard"), [(192, 192), (192, 8), (8, 8)])
def test_a_measured_speed_tells_the_one_without_waiting(ranks: int, shard: int) -> None:
    measured = speed(PHASE1, ranks, shard, 27000, Links())
    assert measured < 27000
    assert without_waiting(PHASE1, ranks, shard, measured, Links()) == pytest.approx(27000)


def test_a_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    """1.4 s on 192 ranks are 17,554 tokens/s each; the table says the same of the configured layout."""
    assert main(["plan", "experiment=phase1", "seconds_per_step=1.4"]) == 0
    out = capsys.readouterr().out
    assert "17,554 tokens/s a rank, 3.37M in all" in out
    (row,) = [line for line in out.splitlines() if line.startswith("192 ")]
    assert row.split()[1] == "17,554"


def test_a_measured_step_of_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """The table repeats the speed of a copy in each node, however many GPUs a node has."""
    words = ["parallel.replicate=48", "cluster.nodes=48", "cluster.ranks_per_node=4", "seconds_per_step=1.4"]
    assert main(["plan", "experiment=phase1", *words]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("192 ")]
    assert row.split()[4] == "17,554"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seconds_per_step=0.9"], "seconds_per_step=0.9: 27,307 tokens/s a rank were measured on 192 ranks"),
        (["seconds_per_step=1.4", "tokens_per_second_per_rank=17000"], "say the same: give one"),
    ],
)
def test_steps_that_cannot_be(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=phase1", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_benchmark_by_hand() -> None:
    """Links, both predictions and the error from times that are made up."""
    config = bench.configuration(quick=True)
    layers, bytes_ = config.model.num_hidden_layers + 1, 4 * config.model.num_parameters()
    times = {"forward_backward": 0.5, "optimizer": 0.2, "step": 0.8}
    times |= {"gather": 0.010, "reduce": 0.022, "small_gather": 0.002, "small_reduce": 0.005}
    links = bench.links_of(times, 4, size=4000)
    assert links.latency == pytest.approx(0.001)  # a mean of 0.003 over three ring steps
    assert ring(4000, 4, links, within_node=True) == pytest.approx(0.014)
    row = bench.summarise(config, 4, 2, [times])
    tokens = 2 * bench.SEQUENCE
    assert row["alone"] == pytest.approx(tokens / 0.55)
    assert row["measured"] == pytest.approx(tokens / 0.8)
    kept = 4 * config.model.hidden_size * (config.model.vocab_size + 1)  # bytes that are gathered once
    beyond_latency = layers * 3 * (0.014 - 0.003) * (3 * bytes_ - kept) / (3 * bytes_)
    exchange = layers * 3 * 0.003 + beyond_latency
    assert row["communication_seconds"] == pytest.approx(exchange, rel=1e-4)
    assert row["waited_error"] == pytest.approx(0.8 / (0.55 + exchange) - 1, rel=1e-3)
    assert row["waited"] < row["hidden"] < row["alone"]


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    rows = bench.main(["--quick", "--json", str(file)])
    assert json.loads(file.read_text()) == rows
    one, two = rows
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["communication_seconds"] == pytest.approx(0, abs=1e-9)
    assert one["hidden"] == pytest.approx(one["alone"])
    assert two["communication_seconds"] > 0
    assert "| 2 | 1 |" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scaling.png"
    assert main(["plan", "experiment=phase1", f"scaling_plot={file}", "network_gbytes=20"]) == 0
    assert "20 between nodes" in capsys.readouterr().out
    assert file.read_bytes()[:4] == b"\x89PNG"
