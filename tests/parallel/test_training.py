"""One run, however it is executed: ranks, accumulation, interruptions. Real training over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import consumed, numbers, train, train_and_kill
from tests.tiny import tiny_config
from train.run_dir import RunDir, read_lines

# (ranks, local batch, overrides): the same global batch of 4 sequences every time.
LAYOUTS = {
    "2 ranks, accumulation 2": (2, 1, []),
    "2 ranks": (2, 2, []),
    "4 ranks": (4, 1, []),
    "1 rank, accumulation 4": (1, 1, []),
    "HSDP 2x2": (4, 1, ["parallel.replicate=2", "parallel.shard=2"]),
    "2 ranks, segments recomputed": (2, 2, ["parallel.activation_checkpoint=segments:3"]),
    "1 rank, selective recomputation": (1, 4, ["parallel.activation_checkpoint=selective"]),
    "2 ranks, chunked loss": (2, 2, ["parallel.loss_chunks=4"]),
}


@pytest.fixture(scope="module")
def reference(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """20 uninterrupted steps on one rank, one micro-batch a step."""
    runs = tmp_path_factory.mktemp("reference")
    return train(tiny_config(tiny_data, runs, "train.local_batch_size=4"))


@pytest.fixture(scope="module")
def two_ranks(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same on two ranks."""
    return train(tiny_config(tiny_data, tmp_path_factory.mktemp("two"), ranks=2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_do_not_depend_on_the_layout(
    layout: str, reference: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    ranks, local, overrides = LAYOUTS[layout]
    config = tiny_config(tiny_data, tmp_path, f"train.local_batch_size={local}", *overrides, ranks=ranks)
    run = train(config)
    expected, got = numbers(reference), numbers(run)
    assert list(got) == list(expected) == list(range(1, 21))
    for step, values in expected.items():
        assert got[step] == pytest.approx(values, rel=1e-5), f"step {step}"
    assert consumed(run) == consumed(reference)


def test_gradients_added_up_in_bfloat16(two_ranks: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    """Half the communication, and losses that stay within 1 % of those added up in float32."""
    run = train(tiny_config(tiny_data, tmp_path, "parallel.reduce_dtype=bfloat16", ranks=2))
    expected, got = numbers(two_ranks), numbers(run)
    assert got != expected
    for step, values in expected.items():
        assert got[step][0] == pytest.approx(values[0], rel=1e-2), f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "segments:2"])
def test_compiled_training(policy: str, tiny_data: Path, tmp_path: Path) -> None:
    """Blocks, final norm and loss compiled, under FSDP, with validation in between."""
    words = ["validation.every_steps=4", "validation.sequences_per_source=4"]
    fast = ["parallel.compile=true", "parallel.loss_chunks=4", f"parallel.activation_checkpoint={policy}"]
    eager = train(tiny_config(tiny_data, tmp_path / "eager", *words, ranks=2, steps=8))
    compiled = train(tiny_config(tiny_data, tmp_path / "compiled", *words, *fast, ranks=2, steps=8))
    for step, values in numbers(eager).items():
        assert numbers(compiled)[step] == pytest.approx(values, rel=1e-5), f"step {step}"


def test_the_run_learns(reference: RunDir) -> None:
    losses = [value[0] for value in numbers(reference).values()]
    assert losses[-1] < 0.6 * losses[0]


def test_a_repeated_run_is_bitwise_equal(reference: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    run = train(tiny_config(tiny_data, tmp_path, "train.local_batch_size=4"))
    assert numbers(run) == numbers(reference)


def step_logged(step: int):
    def reached(run: RunDir) -> bool:
        return run.metrics.exists() and any(row["step"] >= step for row in read_lines(run.metrics))

    return reached


def save_begun(step: int):
    def reached(run: RunDir) -> bool:
        return (run.checkpoints / f".step-{step}.tmp").exists()

    return reached


@pytest.mark.parametrize("moment", ["in a step", "in a save"])
@pytest.mark.parametrize("ranks_after", [2, 1, 4])
def test_killed_and_resumed(
    moment: str, ranks_after: int, two_ranks: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    """kill -9 of two ranks, then resume on two, one and four: the same losses, data order and learning rate."""
    when = step_logged(8) if moment == "in a step" else save_begun(10)
    run = train_and_kill(tiny_config(tiny_data, tmp_path, ranks=2), when)
    assert not run.done
    resumed_from = run.complete_checkpoints()[-1][0]
    assert resumed_from >= 5
    before = numbers(run)
    train(tiny_config(tiny_data, tmp_path, ranks=ranks_after))
    expected, got = numbers(two_ranks), numbers(run)
    assert run.done
    assert list(got) == list(range(1, 21))
    if ranks_after == 2:
        assert got == expected  # bitwise
    for step, values in expected.items():
        assert got[step] == pytest.approx(values, rel=1e-5), f"step {step}"
    assert consumed(run) == consumed(two_ranks)
    assert all(before[step] == expected[step] for step in before)
    assert not list(run.checkpoints.glob(".*.tmp")), "what the kill left behind was not removed"


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    two_ranks: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    run = train_and_kill(tiny_config(tiny_data, tmp_path, ranks=2), step_logged(12))
    newest = run.complete_checkpoints()[-1][1]
    victim = sorted(newest.glob("*.distcp"))[-1]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    train(tiny_config(tiny_data, tmp_path, ranks=2))
    assert numbers(run) == numbers(two_ranks)
    log = (run.logs / "2" / "rank-0.log").read_text()
    assert f"{victim}: SHA-256 differs" in log
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_stop_file_saves_and_ends_and_the_run_goes_on(
    two_ranks: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    from train.cli import prepare

    config = tiny_config(tiny_data, tmp_path, ranks=2)
    run = prepare(config)
    run.stop_file.parent.mkdir()
    run.stop_file.touch()
    train(config)
    assert not run.done
    assert [step for step, _ in run.complete_checkpoints()] == [1]
    assert not run.stop_file.exists()
    train(config)
    assert run.done
    assert numbers(run) == numbers(two_ranks)
    assert [line["outcome"] for line in read_lines(run.attempts) if line["event"] == "end"] == [
        "stopped",
        "done",
    ]


def test_save_file_saves_once_and_training_goes_on(
    reference: RunDir, tiny_data: Path, tmp_path: Path
) -> None:
    from train.cli import prepare

    config = tiny_config(tiny_data, tmp_path, "train.local_batch_size=4")
    run = prepare(config)
    run.save_file.parent.mkdir()
    run.save_file.touch()
    train(config)
    assert [step for step, _ in run.complete_checkpoints()] == [1, 5, 10, 15, 20]
    assert numbers(run) == numbers(reference)


def test_retention(tiny_data: Path, tmp_path: Path) -> None:
    words = ["checkpoint.every_steps=2", "checkpoint.keep_latest=2", "checkpoint.milestone_every_steps=8"]
    run = train(tiny_config(tiny_data, tmp_path, *words))
    assert [step for step, _ in run.complete_checkpoints()] == [8, 16, 18, 20]


def test_next_phase_starts_from_the_weights_only(reference: RunDir, tiny_data: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny_data, tmp_path, f"train.init_from={reference.complete_checkpoints()[-1][1]}", "optim.lr=1e-9"
    )
    run = train(config)
    first, last_before = numbers(run)[1], numbers(reference)[20]
    assert first[0] < 1.2 * last_before[0]  # the weights are those of the end
    assert first[2] == pytest.approx(1e-9 / 4)  # the schedule begins anew
    assert first[3] == 4 * 32  # and so do the counts


def test_non_finite_loss_stops_with_what_reproduces_it(tiny_data: Path, tmp_path: Path) -> None:
    """A learning rate of 1e30 makes the second step's loss not finite."""
    config = tiny_config(tiny_data, tmp_path, "optim.lr=1e30", "optim.warmup_tokens=0", ranks=2)
    with pytest.raises(AssertionError, match="exit codes"):
        train(config)
    run = RunDir(tmp_path / "tiny")
    assert not run.done
    reason = [line for line in read_lines(run.attempts) if line["event"] == "end"][-1]["reason"]
    step = int(reason.split(":")[0].removeprefix("step "))
    assert "prose" in reason
    folder = run.failures / f"step-{step}"
    report = json.loads((folder / "report.json").read_text())
    assert report["position"] == (step - 1) * 4
    assert len(list(folder.glob("batch-rank*.npz"))) == 2  # one micro-batch on each rank
    assert (folder / "checkpoint" / "manifest.json").exists()
    # Resuming from the saved state runs into the same step.
    run.checkpoints.mkdir(exist_ok=True)
    (folder / "checkpoint").rename(run.checkpoints / f"step-{step - 1}")
    with pytest.raises(AssertionError, match="exit codes"):
        train(config)
    ends = [line for line in read_lines(run.attempts) if line["event"] == "end"]
    assert ends[-1]["reason"].split(";")[0] == reason.split(";")[0]


def test_a_tied_head_can_be_left_to_the_loss(tiny_data: Path, tmp_path: Path) -> None:
    """The head's weight gets gradients from each chunk and, as the embedding, from the blocks."""
    words = ["model.tie_word_embeddings=true", "optim.z_loss=1e-3"]
    whole = train(tiny_config(tiny_data, tmp_path / "whole", *words, ranks=2, steps=8))
    chunked = train(
        tiny_config(tiny_data, tmp_path / "chunked", *words, "parallel.loss_chunks=4", ranks=2, steps=8)
    )
    for step, values in numbers(whole).items():
        assert numbers(chunked)[step] == pytest.approx(values, rel=1e-5), f"step {step}"
