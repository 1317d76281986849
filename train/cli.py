"""`python -m train experiment=… key=value… [--dry-run]`: compose, check, write the run directory, train.

The command composes and validates the configuration once, writes resolved.yaml, and then starts the ranks
(in this process for one, through torchrun for several); ranks read resolved.yaml and nothing else. Repeating
the command resumes the run. `python -m train resolved=runs/<name>/resolved.yaml attempt=N` is what each rank
runs; under Slurm the batch script starts it with srun and torchrun.

Exit status: 0 done or stopped on request, 2 a configuration that can't run, 1 anything else.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data_mixtures.mixture import build_mixture
from data_mixtures.plan_record import PlanChanged, record_plan
from data_mixtures.tokenizer import Tokenizer
from train.config import (
    ConfigError,
    RunConfig,
    changed_keys,
    compose,
    dump_yaml,
    load_resolved,
)
from train.estimate import told
from train.run_dir import RunDir, append_line, write_atomic

ROOT = Path(__file__).resolve().parent.parent
ALLOW = "--allow-change="
USAGE = """usage: python -m train experiment=NAME [key=value …] [--dry-run | --prepare]
       python -m train resolved=runs/NAME/resolved.yaml attempt=N   (one rank; started by torchrun or srun)
       python -m train resolved=runs/NAME/resolved.yaml attempt=N --check   (whether it could start now)

Composes configs/train.yaml with the named experiment and the overrides, in Hydra's syntax, and trains.
The same command again resumes the run; a run with a DONE file does nothing.

  --dry-run   print the resolved configuration, sizes, steps, days and checkpoint bytes; build nothing
  --estimate [--json]   print the memory that a rank needs: weights, optimizer, activations, peak; build nothing
  --allow-change=KEY   let the run go on with another value of KEY; what changed is recorded in attempts.jsonl
  --prepare   write the run directory, print its path and stop; train.init_from may not exist yet
  --help      this text

experiments: {experiments}
groups (group=option): {groups}
keys and defaults ('???' must be given by an experiment or on the command line):
{keys}"""


def main(arguments: list[str]) -> int:
    switches = {a for a in arguments if a.startswith("--")}
    overrides = [a for a in arguments if not a.startswith("--")]
    try:
        if "--help" in switches:
            print(usage())
            return 0
        allowed = {s.removeprefix(ALLOW) for s in switches if s.startswith(ALLOW)}
        unknown = (
            switches
            - {"--dry-run", "--estimate", "--json", "--prepare", "--check"}
            - {ALLOW + key for key in allowed}
        )
        if unknown:
            raise ConfigError([f"{switch} is not a switch; see --help" for switch in sorted(unknown)])
        if "--json" in switches and "--estimate" not in switches:
            raise ConfigError(["--json belongs to --estimate; see --help"])
        if not overrides:
            raise ConfigError(["give experiment=NAME and, if need be, key=value …; see --help"])
        bare = [a for a in overrides if "=" not in a and not a.startswith("~")]
        if bare:
            raise ConfigError([f"{word!r} is not of the form key=value; see --help" for word in bare])
        if any(word.startswith("resolved=") for word in overrides):
            rank = rank_arguments(overrides)
            if "--check" in switches:
                initial_checkpoint(load_resolved(rank["resolved"]))
                return 0
            return run_rank(**rank)
        config = compose(overrides)
        if "--estimate" in switches:
            print(told(config, as_json="--json" in switches))
            return 0
        if "--dry-run" in switches:
            print(dry_run(config))
            return 0
        if "--prepare" in switches:
            print(prepare(config, allowed, later=True).path)
            return 0
        run = prepare(config, allowed)
        if run.done:
            print(f"{run.path} is done: nothing to do")
            return 0
        return start_ranks(config, run)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2


def usage() -> str:
    from train.config import CONFIG_DIR, _schema_defaults

    def lines(values: dict, path: str = "") -> list[str]:
        found = []
        for key, value in values.items():
            name = f"{path}{key}"
            found += (
                lines(value, f"{name}.") if isinstance(value, dict) else [f"  {name}={json.dumps(value)}"]
            )
        return found

    groups = [g for g in ("model", "data", "optim", "parallel", "cluster", "experiment")]
    options = {g: sorted(f.stem for f in (CONFIG_DIR / g).glob("*.yaml")) for g in groups}
    experiments = ", ".join(options.pop("experiment"))
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in options.items())
    return USAGE.format(experiments=experiments, groups=listed, keys="\n".join(lines(_schema_defaults())))


def dry_run(config: RunConfig) -> str:
    """What the run would be, from the configuration alone."""
    parameters = config.model.num_parameters()
    tokens = config.steps * config.tokens_per_step
    checkpoint = config.checkpoint_bytes
    flops = config.model.flops_per_token(config.train.seq_len)
    cluster = config.cluster
    facts = {
        "parameters": f"{parameters:,}",
        "ranks": f"{cluster.ranks} ({cluster.nodes} nodes x {cluster.ranks_per_node})",
        "tokens per step": f"{config.tokens_per_step:,}",
        "gradient accumulation": str(
            config.train.global_batch_size // (config.train.local_batch_size * cluster.ranks)
        ),
        "steps": f"{config.steps:,} ({tokens:,} tokens)",
        "warm-up, decay steps": f"{config.warmup_steps:,}, {config.decay_steps:,}",
        "training FLOPs per token": f"{flops:.4g}",
        "checkpoint": f"{checkpoint / 1e9:.2f} GB ({checkpoint / cluster.nodes / 1e9:.2f} GB a node)",
        "checkpoints kept": f"{config.most_checkpoints * checkpoint / 1e12:.3f} TB at most",
    }
    speed = cluster.expected_tokens_per_second_per_rank
    if speed:
        hours = tokens / (speed * cluster.ranks) / 3600
        time = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} hours"
        facts["expected"] = f"{time} at {speed:,.0f} tokens/s a rank"
    width = max(map(len, facts))
    return dump_yaml(config) + "\n" + "\n".join(f"{key:<{width}}  {value}" for key, value in facts.items())


def prepare(config: RunConfig, allowed: Collection[str] = (), *, later: bool = False) -> RunDir:
    """Check everything that can be checked without building, and write the run directory. Idempotent.

    A run keeps its configuration, but for keys that say where it runs and those `allowed` to change. `later` says
    that it starts another time: the run that train.init_from names may be unfinished still.
    """
    run = RunDir(Path(config.runs) / config.name)
    tokenizer = Path(config.data.root) / "tokenizer.model"
    if not tokenizer.exists():
        raise ConfigError(
            [f"data.root={config.data.root}: {tokenizer} does not exist: prepare the data first"]
        )
    vocabulary = Tokenizer(tokenizer).vocab_size
    if vocabulary != config.model.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size={config.model.vocab_size} but {tokenizer} has {vocabulary} pieces: make them equal"
            ]
        )
    try:
        mixture = build_mixture(config.data, config.train.seq_len)
    except (OSError, ValueError) as error:
        raise ConfigError([f"data: {line}" for line in str(error).splitlines()]) from error
    changed = changed_keys(load_resolved(run.resolved), config) if run.resolved.exists() else []
    refused = [line for line in changed if line.split(":")[0] not in allowed]
    if refused:
        raise ConfigError(
            [f"{run.resolved} was made with other values: {line}" for line in refused]
            + ["give the new configuration its own name=, or allow the change: --allow-change=KEY"]
        )
    if not run.done:
        if not later:
            initial_checkpoint(config)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            record_plan(mixture, run.plan)
            if changed:
                append_line(run.attempts, {"event": "change", "time": time.time(), "keys": changed})
            write_atomic(run.resolved, dump_yaml(config))
            shutil.copyfile(tokenizer, run.path / "tokenizer.model")
            run.record_code(ROOT)
        except PlanChanged as error:
            raise ConfigError([str(error)]) from error
        except OSError as error:
            raise ConfigError(
                [f"runs={config.runs}: the run directory {run.path} cannot be written: {error}"]
            ) from error
    return run


def initial_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint directory that train.init_from names, checked to hold the same model."""
    name = config.train.init_from
    if name is None:
        return None
    directory = Path(name)
    if not (directory / "manifest.json").exists():
        earlier = RunDir(Path(config.runs) / name)
        complete = earlier.complete_checkpoints()
        if not earlier.done or not complete:
            state = "is not done" if earlier.path.exists() else "does not exist"
            raise ConfigError(
                [f"train.init_from={name}: run {earlier.path} {state}, and no such checkpoint exists"]
            )
        directory = complete[-1][1]
    file, ours = directory / "model.json", config.model.to_dict()
    try:
        theirs = dict(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise ConfigError([f"train.init_from={name}: {file} is missing or damaged: {error}"]) from error
    differing = [
        f"train.init_from={name}: its model has {key}={value}, this one {ours.get(key, 'has no such key')}"
        for key, value in theirs.items()
        if key not in ours or value != ours[key]
    ]
    if differing:
        raise ConfigError(differing)
    return directory


def start_ranks(config: RunConfig, run: RunDir) -> int:
    """Train on this machine: in this process for one rank, through torchrun for several."""
    if config.cluster.nodes > 1:
        raise ConfigError(
            [f"cluster.nodes={config.cluster.nodes}: several nodes are started by a scheduler; see launch/"]
        )
    attempt = run.start_attempt(ranks=config.cluster.ranks, node=os.uname().nodename)
    if config.cluster.ranks == 1:
        return run_rank(run.resolved, attempt)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    command += [
        f"--nproc-per-node={config.cluster.ranks}",
        "--local-ranks-filter=0",
        "--role=rank",
        "--tee=3",
    ]
    command += [f"--log-dir={run.logs / str(attempt)}"]
    command += ["-m", "train", f"resolved={run.resolved}", f"attempt={attempt}"]
    threads = {"OMP_NUM_THREADS": str(config.cluster.threads_per_rank)}
    status = subprocess.run(command, env=os.environ | threads, cwd=ROOT, check=False).returncode
    if status:
        if not run.attempt_ended(attempt):
            run.end_attempt(attempt, "failed", step=None, reason=f"torchrun exited with {status}")
        print(f"error: a rank failed; every rank's log is under {run.logs / str(attempt)}", file=sys.stderr)
    return 1 if status else 0


def rank_arguments(words: list[str]) -> dict[str, Any]:
    """`resolved=PATH attempt=N`, as start_ranks and the batch script give them."""
    values = dict(word.split("=", 1) for word in words)
    if set(values) != {"resolved", "attempt"} or not values["attempt"].isdecimal():
        raise ConfigError(
            [f"a rank takes resolved=PATH attempt=NUMBER and nothing else, got: {' '.join(words)}"]
        )
    if not Path(values["resolved"]).exists():
        raise ConfigError([f"resolved={values['resolved']} does not exist"])
    return {"resolved": Path(values["resolved"]), "attempt": int(values["attempt"])}


def run_rank(resolved: Path, attempt: int) -> int:
    """One rank of the run: build the trainer from resolved.yaml and train."""
    config = load_resolved(resolved)
    run = RunDir(resolved.parent)
    if run.done:
        print(f"{run.path} is done: nothing to do")
        return 0
    if "RANK" not in os.environ:
        os.environ.update(single_process_environment())

    import torch

    from train.device import prepare_torchtitan

    torch.set_num_threads(config.cluster.threads_per_rank)
    prepare_torchtitan(config.cluster.device)
    from train.session import train_session

    return train_session(config, run, initial_checkpoint(config), attempt)


def single_process_environment() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
