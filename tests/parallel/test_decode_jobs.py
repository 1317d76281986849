"""Decoding jobs of several processes: started here or by torchrun, asked several times, and losing a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import file_sha256, parameter_reader, read_architecture
from model.config import LaneformerConfig
from model.decode import Decoder, Sampling
from model.delayed_tp import LaneGroup
from model.engine import Engine, Loading, open_engine
from model.exchange import Alone
from model.hf_import import write_checkpoint
from model.laneformer import build_model
from model.sockets import PeerError
from tests.parallel.test_delayed_tp import BASE
from tests.unit.eval_fixtures import small_tokenizer

PROMPTS = ["the quick brown fox", "lazy"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    tokenizer = small_tokenizer(folder)
    change = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512}
    model = build_model(LaneformerConfig.from_dict(BASE | change))
    write_checkpoint(folder / "step-3", model.sizes, model.state_dict(), tokenizer.path.read_bytes(), {})
    return folder / "step-3"


def opened(checkpoint: Path, processes: int, timeout: float = 60) -> Engine:
    engine = open_engine(Loading(checkpoint=checkpoint, timeout=timeout), processes)
    assert engine is not None
    return engine


@pytest.fixture
def four(checkpoint: Path) -> Iterator[Engine]:
    """Four processes, with little patience for each other."""
    engine = opened(checkpoint, 4, timeout=3)
    yield engine
    for worker in engine.workers:
        worker.kill()
        worker.join()


def ask(engine: Engine, **how: Any) -> list[tuple[list[int], str, str]]:
    prompts = [engine.tokenizer.prompt(text) for text in PROMPTS]
    generations, _ = engine.generate(prompts, **{"max_new_tokens": 40, **how})
    return [(g.tokens, g.text, g.end_reason) for g in generations]


def test_requests_one_after_another(checkpoint: Path, four: Engine) -> None:
    with opened(checkpoint, 1) as alone, four as engine:
        assert ask(engine) == ask(alone)
        drawn = {"sampling": Sampling(temperature=1.0, seed=5), "max_new_tokens": 60}
        free = ask(alone, **drawn)
        assert ask(engine, **drawn) == free
        stop = free[0][1][10:13]
        assert ask(engine, **drawn, stops=[stop]) == ask(alone, **drawn, stops=[stop])
        with pytest.raises(ValueError, match="exceeds max_position_embeddings"):
            engine.generate([[1] * 600], max_new_tokens=4)
        texts: list[list[str]] = []
        cancelled = ask(engine, on_token=lambda t: texts.append(t) or len(texts) == 5)
        assert [reason for _, _, reason in cancelled] == ["cancelled"] * 2
        with pytest.raises(ZeroDivisionError):
            ask(engine, on_token=lambda t: 1 // 0)
        assert ask(engine) == ask(alone)  # all are still in step
    assert [worker.exitcode for worker in engine.workers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is late: nothing came from it for 3 s")],
)
def test_a_lost_process_ends_the_job_by_name(number: int, words: str, four: Engine) -> None:
    lost, steps = four.workers[1], 0

    def strike(texts: list[str]) -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            os.kill(lost.pid, number)

    begin = time.monotonic()
    with pytest.raises(
        PeerError, match=rf"process 2 of 4 \(pid {lost.pid} on .*\) ({words}|is lost, as process [13] says)"
    ):
        ask(four, max_new_tokens=400, on_token=strike)
    assert time.monotonic() - begin < 15
    for worker in (four.workers[0], four.workers[2]):
        worker.join(15)
        assert worker.exitcode == 1


def test_a_process_lost_between_requests_is_named_at_the_next(four: Engine) -> None:
    ask(four)
    assert four.is_whole()
    four.workers[0].kill()
    four.workers[0].join()
    assert not four.is_whole()
    with pytest.raises(PeerError, match=r"process 1 of 4 .* (has ended|is lost)"):
        ask(four)


@pytest.mark.parametrize("weights", ["float32", "float64", "bfloat16", "int8"])
def test_weights_are_rounded_once(weights: str, checkpoint: Path) -> None:
    """What is kept in memory comes straight from what was trained."""
    config = read_architecture(checkpoint)
    read = parameter_reader(checkpoint, config)
    stored = torch.float64 if weights == "float64" else torch.float32
    kind = "as_is" if weights == "float64" else weights

    def weight(name: str) -> torch.Tensor:
        narrow = torch.bfloat16 if weights == "bfloat16" or name == "tok_embeddings.weight" else stored
        return read(name).to(narrow if weights in ("bfloat16", "int8") else stored)

    group = LaneGroup(config, weight, Alone(), stored, kind)
    engine = open_engine(Loading(checkpoint=checkpoint, weights=weights))
    assert engine is not None
    expected, got = (Decoder(each, [[1, 5, 9, 7]], 4).prefill().clone() for each in (group, engine.group))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_lanes_that_do_not_fit(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="3 processes cannot share 8 lanes"):
        open_engine(Loading(checkpoint=checkpoint), 3)


def generate(checkpoint: Path, *words: str, launcher: tuple[str, ...] = (sys.executable,)) -> Any:
    command = [
        *launcher,
        "-m",
        "model",
        "generate",
        f"checkpoint={checkpoint}",
        "prompt=the",
        "--json",
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # one process prints
    return {key: result[key] for key in ("prompt", "prompt_tokens", "tokens", "text", "end_reason")}


def test_the_command_line_spawns_and_joins_torchrun(checkpoint: Path) -> None:
    words = ("max_new_tokens=30", "temperature=1", "seed=4")
    alone = generate(checkpoint, *words)
    assert generate(checkpoint, *words, "lanes=2") == alone
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    assert generate(checkpoint, *words, launcher=torchrun) == alone


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_in_an_answer_ends_all_processes(processes: int, checkpoint: Path) -> None:
    words = (f"checkpoint={checkpoint}", "max_new_tokens=500", "weights=float64", f"lanes={processes}")
    job = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, "generate", "prompt=the", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.read(5)  # of the answer
        os.killpg(job.pid, signal.SIGINT)
        _, told = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT
    assert told == "\npython -m model generate: interrupted\n"


# A tiny model answers in less time than it takes to interrupt it.
SLOWLY = """
import signal, sys, time
import model.text
from model.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
push = model.text.TextStream.push
model.text.TextStream.push = lambda self, text: time.sleep(0.02) or push(self, text)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_a_damaged_checkpoint_is_told_by_every_process_without_a_traceback(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "step-3")
    pieces = tmp_path / "step-3" / "tokenizer.model"
    pieces.write_bytes(bytes(pieces.stat().st_size))
    words = (f"checkpoint={pieces.parent}", "prompt=the", "lanes=2")
    manifest = json.loads((pieces.parent / "manifest.json").read_text())
    manifest["files"]["tokenizer.model"]["sha256"] = file_sha256(pieces)
    (pieces.parent / "manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run(
        [sys.executable, "-m", "model", "generate", *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert "tokenizer.model is not a SentencePiece model" in done.stderr
    assert "Traceback" not in done.stderr
