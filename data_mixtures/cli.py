"""The commands of this package: `python -m data_mixtures <verb> key=value … --switch`.

What a command needs is imported when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_mixtures.prepare import Job


class UsageError(ValueError):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Key:
    """One key of a verb: its default as text (None: it must be given), and what it is for."""

    default: str | None
    help: str


@dataclass(frozen=True)
class Verb:
    """One command. `run` gets the values of all keys and switches and returns the exit code."""

    help: str
    run: Callable[[dict[str, str], set[str]], int]
    keys: dict[str, Key] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)


def main(argv: list[str]) -> int:
    """Run one command. Mistakes of the user end with code 2 and one message on stderr."""
    name, *rest = argv or ["--help"]
    if name in ("--help", "-h"):
        print(_overview())
        return 0
    try:
        if name not in VERBS:
            raise UsageError(f"there is no verb {name!r}; there are: {', '.join(VERBS)}")
        verb = VERBS[name]
        if "--help" in rest or "-h" in rest:
            print(_describe(name, verb))
            return 0
        values, switches = _parse(name, verb, rest)
        return verb.run(values, switches)
    except (ValueError, FileNotFoundError) as error:
        print(f"python -m data_mixtures {name}: {error}", file=sys.stderr)
        return 2


def _parse(name: str, verb: Verb, arguments: list[str]) -> tuple[dict[str, str], set[str]]:
    values = {key: spec.default for key, spec in verb.keys.items()}
    required = [key for key, spec in verb.keys.items() if spec.default is None]
    switches: set[str] = set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument in verb.switches:
            switches.add(argument)
        elif equals and key in verb.keys:
            values[key] = value
        elif (
            not equals and not argument.startswith("-") and len(required) == 1 and values[required[0]] is None
        ):
            values[required[0]] = argument  # `audit runs/x` for `audit run=runs/x`
        else:
            known = ", ".join([f"{key}=" for key in verb.keys] + list(verb.switches)) or "no arguments"
            raise UsageError(f"unknown argument {argument!r}; {name} takes {known}")
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise UsageError(f"missing {', '.join(f'{key}=' for key in missing)}; see `{name} --help`")
    return {key: value for key, value in values.items() if value is not None}, switches


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(["python -m data_mixtures <verb> key=value … --switch", "", *lines])


def _describe(name: str, verb: Verb) -> str:
    rows = [
        (f"{key}={'' if spec.default is None else spec.default}", spec.help)
        for key, spec in verb.keys.items()
    ]
    rows += verb.switches.items()
    width = max((len(left) for left, _ in rows), default=0)
    return "\n".join(
        [f"python -m data_mixtures {name}: {verb.help}", *(f"  {a:{width}}  {b}" for a, b in rows)]
    )


def _smoke(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.smoke import prepare_smoke

    prepare_smoke(Path(values["root"]))
    return 0


def _plan(values: dict[str, str], switches: set[str]) -> int:
    from data_mixtures.plan_view import plan_command

    return plan_command(values, switches)


def _number(key: str, value: str, kind: type[int] | type[float] = int) -> Any:
    try:
        return kind(value.replace("_", ""))
    except ValueError:
        raise UsageError(f"{key}={value} is no {'whole ' if kind is int else ''}number") from None


def _shard(value: str) -> tuple[int, int]:
    index, slash, count = value.partition("/")
    if not slash:
        raise UsageError(f"shard={value} must be i/n, such as 0/8")
    return _number("shard", index), _number("shard", count)


def _job(values: dict[str, str], switches: set[str]) -> Job:
    from data_mixtures.prepare import Job
    from data_mixtures.sources import load_source

    root = Path(values["root"])
    return Job(
        source=load_source(values["source"]),
        root=root,
        tokenizer=Path(values["tokenizer"] or root / "tokenizer.model"),
        held_out=_number("held_out", values["held_out"], float),
        max_tokens=_number("max_tokens", values["max_tokens"]) if values["max_tokens"] else None,
        skip_corrupt="--skip-corrupt" in switches,
        index=Path(values["index"]) if values["index"] else None,
        shard_tokens=_number("shard_tokens", values["shard_tokens"]),
    )


def _prepare(values: dict[str, str], switches: set[str]) -> int:
    from data_mixtures.merge import is_prepared
    from data_mixtures.parallel import prepare_units
    from data_mixtures.prepare import install_tokenizer

    job = _job(values, switches)
    shard, shards = _shard(values["shard"])
    workers = _number("workers", values["workers"])
    install_tokenizer(job)
    if is_prepared(job):
        print(f"{job.directory} is complete; nothing to do")
        return 0
    if job.index is None:
        print(f"note: {job.source.name} is not decontaminated (index= is not given)", file=sys.stderr)
    prepare_units(job, shard, shards, workers)
    if shards == 1:
        return _merge(values, switches)
    print(f"shard {shard}/{shards} of {job.directory} is prepared; run merge when all are")
    return 0


def _merge(values: dict[str, str], switches: set[str]) -> int:
    from data_mixtures.merge import is_prepared, merge, summary

    job = _job(values, switches)
    if is_prepared(job):
        print(f"{job.directory} is complete; nothing to do")
        return 0
    print(summary(merge(job), job.directory))
    return 0


def _verify(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.shards import MANIFEST, verify_split

    pattern = f"{values['source'] or '*'}/*/{MANIFEST}"
    splits = sorted(path.parent for path in Path(values["root"]).glob(pattern))
    if not splits:
        raise ValueError(f"{values['root']} holds no prepared source {values['source']}".rstrip())
    damaged = 0
    for split in splits:
        problems = verify_split(split)
        damaged += bool(problems)
        print("\n".join(problems) if problems else f"{split}: whole")
    return 1 if damaged else 0


def _pack(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.packing import pack_split
    from data_mixtures.prepare import SPLITS

    seq_len = _number("seq_len", values["seq_len"])
    for split in SPLITS:
        directory = Path(values["root"]) / values["source"] / split
        packed = pack_split(directory, seq_len)
        print(
            f"{directory}: {packed['items']:,} sequences of {seq_len}, {packed['padded']:.2%} padding, "
            f"{packed['cut']:.2%} of the documents cut"
        )
    return 0


def _benchmarks(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.benchmarks import benchmark_files
    from data_mixtures.decontaminate import Decontaminator

    decontaminator = Decontaminator.from_files(benchmark_files(values["files"]))
    sha256 = decontaminator.save(Path(values["out"]))
    for benchmark, found in decontaminator.coverage().items():
        print(f"{benchmark}: {found.items:,} items, {found.out_of_reach:,} too short to be found")
    print(f"{values['out']}: SHA-256 {sha256}")
    return 0


def _scan(values: dict[str, str], switches: set[str]) -> int:
    from data_mixtures.scan import scan_command

    return scan_command(values, switches)


def _audit(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.audit import audit_run

    result = audit_run(Path(values["run"]))
    print(result.table())
    if not result.differences:
        print(f"{result.steps:,} logged steps agree with the plan")
        return 0
    shown = result.differences[:20]
    print("\n".join(shown), file=sys.stderr)
    print(f"{len(result.differences):,} differences in {result.steps:,} logged steps", file=sys.stderr)
    return 1


def _identity(values: dict[str, str], _: set[str]) -> int:
    from data_mixtures.identity import identity_conversations
    from data_mixtures.shards import write_atomically

    file, out = Path(values["file"]), Path(values["out"])
    conversations = identity_conversations(file, _number("count", values["count"]))
    lines = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in conversations)
    write_atomically(out, (line.encode() for line in lines))
    print(f"{out}: {int(values['count']):,} conversations")
    return 0


_SOURCE_KEYS = {
    "source": Key(None, "name in the catalogue, or a YAML file that describes one source"),
    "root": Key("data/prepared", "folder of the prepared sources"),
    "tokenizer": Key("", "SentencePiece model; by default <root>/tokenizer.model"),
    "held_out": Key("0.001", "share of documents kept for validation, by a hash of the text"),
    "max_tokens": Key("", "conversations: limit in tokens; longer ones are cut at a turn"),
    "index": Key("", "decontamination index, as `benchmarks` writes it; empty: no decontamination"),
    "shard_tokens": Key("134217728", "tokens after which a shard is closed"),
}
_SOURCE_SWITCHES = {"--skip-corrupt": "count damaged lines and files and go on, rather than stop"}

VERBS = {
    "smoke": Verb(
        "prepare the data of the smoke run: tokenizer and four small sources",
        _smoke,
        {"root": Key("data/smoke", "folder to write to")},
    ),
    "plan": Verb(
        "what a recipe asks of its sources, without data: tokens, epochs over all phases, disk, the shift",
        _plan,
        {
            "experiment": Key("", "name of an experiment (or give recipe=)"),
            "recipe": Key("", "name of a recipe"),
            "root": Key("", "folder of prepared sources, in place of the recipe's own"),
            "out": Key("plan.png", "where to draw the chart; empty for none"),
        },
        {"--json": "print the plan as JSON"},
    ),
    "prepare": Verb(
        "text to verified shards: one source, or a share of it; continues where it was interrupted",
        _prepare,
        {
            **_SOURCE_KEYS,
            "shard": Key("0/1", "i/n: prepare every n-th unit from i on (array jobs); then run merge"),
            "workers": Key("1", "processes"),
        },
        _SOURCE_SWITCHES,
    ),
    "merge": Verb(
        "after all shards of an array job: verify them and write the source's manifests",
        _merge,
        _SOURCE_KEYS,
        _SOURCE_SWITCHES,
    ),
    "verify": Verb(
        "check files and counts of prepared sources against their manifests; names what is damaged",
        _verify,
        {"root": Key("data/prepared", "folder of the prepared sources"), "source": Key("", "only this one")},
    ),
    "pack": Verb(
        "pack whole documents into sequences (recipes with `packing: best_fit`)",
        _pack,
        {
            "root": Key("data/prepared", "folder of the prepared sources"),
            "source": Key(None, "name of the prepared source"),
            "seq_len": Key("4096", "sequence length in tokens"),
        },
    ),
    "benchmarks": Verb(
        "build the decontamination index from benchmark files",
        _benchmarks,
        {
            "files": Key(None, "files or quoted patterns, separated by commas"),
            "out": Key("data/benchmarks.safetensors", "file to write"),
        },
    ),
    "scan": Verb(
        "check a source for benchmark items without preparing it",
        _scan,
        {
            "source": Key(None, "name in the catalogue, or a YAML file that describes one source"),
            "index": Key("data/benchmarks.safetensors", "decontamination index, as `benchmarks` writes it"),
            "report": Key("", "JSON file to write the hits to, by source and by benchmark item"),
        },
    ),
    "identity": Verb(
        "expand the identity file to conversations, the source `identity`",
        _identity,
        {
            "file": Key("configs/data/identity/identity.yaml", "what the model says about itself"),
            "out": Key("configs/data/identity/identity.jsonl", "file to write"),
            "count": Key("8000", "conversations"),
        },
    ),
    "audit": Verb(
        "compare what a run logged that it read with what its plan says",
        _audit,
        {"run": Key(None, "run directory, with plan.json and metrics.jsonl")},
    ),
}
