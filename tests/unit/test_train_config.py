"""Composition and its errors: every wrong configuration gives its one clear message before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from train.cli import dry_run, main
from train.config import (
    CONFIG_DIR,
    ConfigError,
    RunConfig,
    changed_keys,
    compose,
    dump_yaml,
    load_resolved,
)

EXPERIMENTS = sorted(file.stem for file in (CONFIG_DIR / "experiment").glob("*.yaml"))
SMOKE = "experiment=smoke_phase1"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = compose([f"experiment={name}"])
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_yaml(config))
    assert load_resolved(file) == config


def test_the_experiment_wins_over_groups_and_the_command_line_over_the_experiment() -> None:
    config = compose([SMOKE])
    assert (config.train.seq_len, config.optim.lr) == (256, 3.0e-3)
    assert compose([SMOKE, "optim.lr=1e-5"]).optim.lr == 1e-5
    assert compose([SMOKE, "model=125m", "train.seq_len=512"]).model.hidden_size != config.model.hidden_size


# One row for each wrong configuration: the overrides, and what its one message must say.
WRONG = {
    "unknown key": (["train.sed=3"], ["train.sed is not a key"]),
    "unknown key, added": (["+train.sed=3"], ["train.sed is not a key", "seed"]),
    "unknown section": (["+trian.seed=3"], ["trian is not a key"]),
    "unknown experiment": (["experiment=phase9"], ["phase9"]),
    "unknown group option": (["model=3b"], ["3b"]),
    "wrong type": (["train.seed=abc"], ["train.seed='abc'", "int"]),
    "float for an integer": (["train.seq_len=256.5"], ["train.seq_len=256.5", "int"]),
    "bool for an integer": (["train.seq_len=true"], ["train.seq_len=True", "int"]),
    "section for a value": (["~train.seed", "+train.seed.x=1"], ["train.seed={'x': 1}", "int"]),
    "value for a section": (["metrics=3"], ["metrics=3 must be a section"]),
    "bad literal": (["optim.decay_shape=step"], ["optim.decay_shape='step'", "linear, sqrt, cosine"]),
    "wrong number of betas": (["optim.betas=[0.9]"], ["optim.betas", "2 values, got 1"]),
    "unresolved variable": (["name=${oc.env:NO_SUCH_VARIABLE_HERE}"], ["NO_SUCH_VARIABLE_HERE"]),
    "unresolved interpolation": (["name=${nowhere}"], ["nowhere"]),
    "missing value": (["train.seq_len=???"], ["train.seq_len is missing"]),
    "bad name": (["name=a/../b"], ["name='a/../b'"]),
    "negative learning rate": (["optim.lr=-1"], ["optim.lr=-1", "greater than 0"]),
    "beta of 1": (["optim.betas=[0.9,1.0]"], ["optim.betas=(0.9, 1.0)"]),
    "min_lr_ratio above 1": (["optim.min_lr_ratio=1.5"], ["optim.min_lr_ratio=1.5"]),
    "context too long": (["train.seq_len=1000000"], ["1000000", "max_position_embeddings=512"]),
    "batch does not divide": (["train.local_batch_size=5"], ["global_batch_size=16", "5"]),
    "ranks do not divide": (["cluster.ranks_per_node=3"], ["16", "3 ranks"]),
    "HSDP does not fit": (
        ["cluster.ranks_per_node=4", "train.local_batch_size=4", "parallel.replicate=2", "parallel.shard=4"],
        ["parallel.shard=4", "parallel.replicate=2", "4 ranks"],
    ),
    "bf16 on CPU": (["parallel.param_dtype=bfloat16"], ["bfloat16", "cpu"]),
    "budget below a step": (["data.tokens=1000", "optim.warmup_tokens=0"], ["data.tokens=1000", "4096"]),
    "schedule longer than the run": (
        ["optim.warmup_tokens=10_000_000_000"],
        ["optim.warmup_tokens=10000000000", "data.tokens="],
    ),
    "milestone between saves": (
        ["checkpoint.every_steps=50", "checkpoint.milestone_every_steps=75"],
        ["milestone_every_steps=75", "every_steps=50"],
    ),
    "keep no checkpoint": (["checkpoint.keep_latest=0"], ["checkpoint.keep_latest=0"]),
    "no failed save allowed": (["checkpoint.max_failed_saves=0"], ["checkpoint.max_failed_saves=0"]),
    "hang before it began": (["cluster.hang_seconds=-1"], ["hang_seconds=-1.0"]),
    "spike window of one step": (["stability.spike_window=1"], ["stability.spike_window=1"]),
    "steps to skip": (["stability.skip_steps=-1"], ["stability.skip_steps=-1"]),
    "model heads and lanes": (["model.num_lanes=5"], ["num_lanes", "5"]),
    "mixture weights": (["data.weights.prose=0.9"], ["weights", "1"]),
    "later phase from nowhere": (
        ["data=smoke_phase2", "optim.warmup_tokens=0"],
        ["data.after=['smoke_phase1']", "train.init_from"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_says_what_is_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, expected = WRONG[case]
    words = overrides if overrides[0].startswith("experiment=") else [SMOKE, *overrides]
    assert main([*words, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error: ")
    for words in expected:
        assert words in captured.err


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(
            [SMOKE, "optim.decay_shape=step", "train.seed=abc", "+checkpoint.often=1", "cluster.device=tpu"]
        )
    assert len(caught.value.problems) == 4


def test_words_that_are_not_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke_phase1"]) == 2
    assert "'smoke_phase1' is not of the form key=value" in capsys.readouterr().err
    assert main([SMOKE, "--dryrun"]) == 2
    assert "--dryrun is not a switch" in capsys.readouterr().err
    assert main(["resolved=nowhere.yaml", "attempt=1"]) == 2
    assert "nowhere.yaml does not exist" in capsys.readouterr().err
    assert main([]) == 2
    assert "give experiment=NAME" in capsys.readouterr().err
    assert main([SMOKE, "--json"]) == 2
    assert "--json belongs to --estimate" in capsys.readouterr().err


def test_a_resolved_file_that_is_not_yaml(tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text("name: [")
    with pytest.raises(ConfigError, match=r"resolved\.yaml is not YAML: while parsing"):
        load_resolved(file)


def test_help_lists_keys_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for line in ("optim.weight_decay=0.1", "train.init_from=null", "phase2", "h100_24x8"):
        assert line in text


def test_budgets_are_tokens_and_steps_follow() -> None:
    config = compose(
        [SMOKE, "data.tokens=1_000_000", "optim.warmup_tokens=10_000", "optim.decay_tokens=20_000"]
    )
    assert config.tokens_per_step == 4096
    assert (config.steps, config.warmup_steps, config.decay_steps) == (244, 3, 5)


def test_dry_run_of_the_real_recipe() -> None:
    text = dry_run(compose(["experiment=phase1"]))
    assert "192 (24 nodes x 8)" in text
    assert "4,718,592" in text  # tokens per step
    assert "14.2 days" in text  # 4e12 / (192 x 17,000 tokens/s)
    assert "27.8" in text  # GB: 2.32B parameters x 12 bytes


def test_what_may_change_between_attempts() -> None:
    old = compose([SMOKE])
    elastic = ["cluster.ranks_per_node=2", "train.local_batch_size=4", "metrics.every_steps=7"]
    assert changed_keys(old, compose([SMOKE, *elastic])) == []
    assert changed_keys(old, compose([SMOKE, "optim.lr=1e-3"])) == ["optim.lr: 0.003 -> 0.001"]
    trajectory = ["stability.spike_sigmas=6", "parallel.param_dtype=bfloat16", "cluster.device=cuda"]
    assert changed_keys(old, compose([SMOKE, *trajectory])) == [
        "parallel.param_dtype: 'float32' -> 'bfloat16'",
        "stability.spike_sigmas: 0.0 -> 6.0",
    ]


def test_resolved_file_is_checked_like_the_command_line(tmp_path: Path) -> None:
    values = compose([SMOKE]).to_dict()
    values["train"]["seq_len"] = "256"
    file = tmp_path / "resolved.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"resolved\.yaml: train\.seq_len='256' must be of type int"):
        load_resolved(file)


def test_config_is_frozen() -> None:
    config = compose([SMOKE])
    with pytest.raises(AttributeError):
        config.train.seed = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(config, RunConfig)
