"""Decoding between hosts that are milliseconds apart: network namespaces joined by a switch that delays packets.

The switch is a tool beside the repository; the test needs it, root, gcc and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from model.config import LaneformerConfig, load_size
from model.exchange import SocketExchange
from model.hf_import import write_checkpoint
from model.laneformer import build_model
from model.sockets import connect
from tests.benchmarks import decode_lanes
from tests.parallel.test_delayed_tp import BASE
from tests.unit.eval_fixtures import small_tokenizer

LAG_NET = Path(__file__).resolve().parents[2].parent / "shared" / "tools" / "lag_net"
HOSTS, NEW = 4, 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LAG_NET.exists(), reason=f"{LAG_NET} is not there"),
    pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("gcc")), reason="iproute2 or gcc is missing"),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which `lag_net run` finds its hosts."""
    environment = os.environ | {"LAG_NET_STATE": str(tmp_path / "net"), "OMP_NUM_THREADS": "1"}
    subprocess.run([LAG_NET, "up", str(HOSTS), "0"], env=environment, check=True)
    yield environment
    subprocess.run([LAG_NET, "down"], env=environment, check=True)


def run(environment: dict[str, str], delay: float, *words: str) -> dict[str, Any]:
    """One Python program on all hosts, packets taking `delay` seconds; what the first process prints."""
    subprocess.run([LAG_NET, "delay", str(round(delay * 1e6))], env=environment, check=True)
    ranks = [
        subprocess.Popen(
            [LAG_NET, "run", str(rank), sys.executable, *words],
            env=environment
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS),
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29411",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(HOSTS)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * HOSTS
    assert outputs[1:] == [""] * (HOSTS - 1)
    return json.loads(outputs[0])


def test_a_real_delay_is_hidden(hosts: dict[str, str], tmp_path: Path) -> None:
    """The same tokens at any delay; of the twenty messages of a token, the wait for those that travel two layers is
    shared with what else is on its way, so that a token waits for fewer than half of its messages."""
    tokenizer = small_tokenizer(tmp_path)
    change = {
        "vocab_size": tokenizer.vocab_size,
        "num_hidden_layers": 10,
        "swa_layers": [0, 1],
        "max_position_embeddings": 256,
    }
    model = build_model(LaneformerConfig.from_dict(BASE | change))
    checkpoint = tmp_path / "step-1"
    write_checkpoint(checkpoint, model.sizes, model.state_dict(), tokenizer.path.read_bytes(), {})
    words = ["-m", "model", "generate", f"checkpoint={checkpoint}", "prompt=the", f"max_new_tokens={NEW}"]
    results = {d: run(hosts, d, *words, "temperature=1", "--json") for d in (0.0, 0.001, 0.005)}
    assert len({tuple(result["tokens"]) for result in results.values()}) == 1
    seconds = {delay: 1 / result["tokens_per_second"] for delay, result in results.items()}
    print({delay: f"{1e3 * value:.1f} ms a token" for delay, value in seconds.items()})
    # 16 of the 20 partials are awaited, two layers later: 16 / 4 delays one after another at least, and the three
    # exchanges that are waited for at once. A tensor-parallel model waits 20 + 3 times.
    assert seconds[0.005] - seconds[0.0] < 0.005 * (20 + 3) / 2


def schedules() -> None:
    """On every host: milliseconds a token of each schedule, with modules that sleep and with real weights."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, *_ = next(dist.rendezvous("env://", rank, size))
    exchange = SocketExchange(connect(store, rank, size, timeout=60))
    plan = decode_lanes.Plan(load_size("smoke"), (), repeats=3, tokens=10, module_seconds=0.001, real=True)
    groups = decode_lanes.real_groups(plan.config, exchange)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(plan.repeats):
        for name in decode_lanes.SCHEDULES:
            times[f"sleep {name}"].append(decode_lanes.sleeping_token(exchange, name, plan))
            times[f"weights {name}"].append(decode_lanes.real_token(groups[name], plan.tokens))
    exchange.close()
    if rank == 0:
        print(json.dumps({name: 1e3 * min(values) for name, values in times.items()}))


@pytest.mark.parametrize(("delay", "gain"), [(0.001, 1.3), (0.005, 2.5)])
def test_waiting_at_once_one_module_late_and_two_layers_late(
    delay: float, gain: float, hosts: dict[str, str]
) -> None:
    """The same weights under tensor parallelism, Ladder and DTP. The bounds leave room for a busy machine."""
    found = run(hosts, delay, "-c", f"from {__name__} import schedules; schedules()")
    print(f"{1e3 * delay:g} ms:", {name: f"{value:.1f} ms a token" for name, value in found.items()})
    for compute in ("sleep", "weights"):
        assert found[f"{compute} TP"] > gain * found[f"{compute} DTP"]
        assert found[f"{compute} TP"] > found[f"{compute} Ladder"]
