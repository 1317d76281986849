"""The commands of this package: `python -m eval [verb] key=value … --switch`; without a verb it scores.

What a command needs is imported when it runs, so that `--help` is quick. Mistakes of the user end with exit
code 2 and one message on stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eval.code import KEYS as CODE_KEYS
from eval.suite import Key, Suite

Values = dict[str, str]


@dataclass(frozen=True)
class Verb:
    """One command. `positional` names the keys that bare words fill, in order; with `several`, what is left
    over is added to the last, after commas."""

    help: str
    run: Callable[[Values, set[str]], int]
    keys: dict[str, Key] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    several: bool = False


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0] in ("--help", "-h"):
        print(_overview())
        return 0
    name = words.pop(0) if words[0] in VERBS else SCORE
    verb = VERBS[name]
    if "--help" in words or "-h" in words:
        print(_describe(name, verb))
        return 0
    try:
        return verb.run(*_parse(name, verb, words))
    except (ValueError, FileNotFoundError) as error:
        print(f"python -m eval {name}: {error}", file=sys.stderr)
        return 2


def _parse(name: str, verb: Verb, words: list[str]) -> tuple[Values, set[str]]:
    given: dict[str, str] = {}
    switches: set[str] = set()
    bare = list(verb.positional)
    for word in words:
        key, equals, value = word.partition("=")
        if word in verb.switches:
            switches.add(word)
        elif equals and key in verb.keys:
            given[key] = value
        elif bare and not word.startswith("-") and not equals:
            given[bare.pop(0)] = word
        elif verb.several and not word.startswith("-") and not equals:
            given[verb.positional[-1]] += f",{word}"
        else:
            known = ", ".join([*(f"{key}=" for key in verb.keys), *verb.switches])
            raise ValueError(f"unknown argument {word!r}; {name} takes {known}")
    values = {key: spec.default for key, spec in verb.keys.items()} | given
    missing = [f"{key}=" for key, value in values.items() if value is None]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; see `python -m eval {name} --help`")
    return {key: value for key, value in values.items() if value is not None}, switches


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(
        ["python -m eval [verb] key=value … --switch   (--help after a verb lists its keys)", "", *lines]
    )


def _describe(name: str, verb: Verb) -> str:
    rows = [(f"{key}={spec.default or ''}", spec.help) for key, spec in verb.keys.items()]
    rows += verb.switches.items()
    width = max((len(left) for left, _ in rows), default=0)
    words = "".join(f" {key.upper()}" for key in verb.positional)
    return "\n".join(
        [f"python -m eval {name}{words}: {verb.help}", *(f"  {a:{width}}  {b}" for a, b in rows)]
    )


def number(key: str, text: str) -> int:
    """The whole number of key=text. Raises ValueError that names the key."""
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"{key}={text} is no whole number") from None


# --- score


def make_suites(values: Values, switches: set[str]) -> list[Suite]:
    """The suites that suite=a,b names, with the settings of this command line."""
    makers: dict[str, Callable[[], Suite]] = {
        "core": lambda: _core("core", values, switches),
        "builtin": lambda: _core("builtin", values, switches),
        "code": lambda: _code(values, switches),
        "validation": lambda: _validation(values),
    }
    names = [name for name in values["suite"].split(",") if name]
    unknown = [name for name in names if name not in makers]
    if unknown or not names:
        raise ValueError(f"suite={values['suite']} must name some of {', '.join(makers)}")
    return [makers[name]() for name in names]


def _core(name: str, values: Values, switches: set[str]) -> Suite:
    from eval.core import core_suite
    from eval.core_prompts import RULES

    if values["rules"] not in RULES:
        raise ValueError(f"rules={values['rules']} must be one of {', '.join(RULES)}")
    return core_suite(
        name,
        Path(values["data"]),
        rules=values["rules"],
        limit=number("limit", values["limit"]) if values["limit"] else None,
        only=tuple(task for task in values["tasks"].split(",") if task),
        batch_tokens=number("batch_tokens", values["batch_tokens"]) if values["batch_tokens"] else None,
        trust_remote_code=TRUST in switches,
    )


def _code(values: Values, switches: set[str]) -> Suite:
    from eval.code import make_suite

    return make_suite(values, TRUST in switches)


def _validation(values: Values) -> Suite:
    from eval.validation import ValidationSuite

    run = Path(values["run"]) if values["run"] else Path(values["checkpoint"]).resolve().parent.parent
    return ValidationSuite(
        run,
        values["held_out"],
        number("limit", values["limit"]) if values["limit"] else None,
        number("batch_tokens", values["batch_tokens"]) if values["batch_tokens"] else None,
    )


def _score(values: Values, switches: set[str]) -> int:
    from eval.results import RunFiles
    from eval.runner import Machine, evaluate, follow, locate

    if bool(values["checkpoint"]) == bool(values["run"]) or (FOLLOW in switches) != bool(values["run"]):
        raise ValueError(
            "give checkpoint=FOLDER to score one, or --follow run=runs/NAME to score a whole run"
        )
    suites = make_suites(values, switches)
    machine = Machine.choose(values["device"], values["dtype"], number("processes", values["processes"]))
    for suite in suites:
        suite.settings()  # reads the data, so that a mistake is known before a model is loaded
    if values["run"]:
        count = follow(RunFiles(Path(values["run"])), suites, machine, number("poll", values["poll"]), _say)
        _say(f"{count} results added")
        return 0
    checkpoint = Path(values["checkpoint"])
    run, step = locate(checkpoint, Path(values["out"]) if values["out"] else None)
    evaluate(run, step, checkpoint, suites, machine, _say)
    if run.result_file(step).exists():
        _say(f"results: {run.result_file(step)}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


# --- the other verbs


def _aggregate(values: Values, switches: set[str]) -> int:
    from eval.aggregate import aggregate_file, table

    rows = aggregate_file(Path(values["scores"]))
    print(json.dumps(rows, indent=1) if "--json" in switches else table(rows))
    return 0


def _report(values: Values, _: set[str]) -> int:
    from eval.report import write_report

    runs = [Path(run) for run in values["run"].split(",") if run]
    _say(f"report: {write_report(runs, Path(values['out']) if values['out'] else None)} (and .md beside it)")
    return 0


def _compare(values: Values, switches: set[str]) -> int:
    from eval.compare import compare, table

    rows = compare(Path(values["a"]), Path(values["b"]), number("seed", values["seed"]))
    if "--json" in switches:
        print(json.dumps([asdict(row) | {"difference": row.difference} for row in rows], indent=1))
    else:
        print(table(rows))
    return 0


def _fetch(values: Values, _: set[str]) -> int:
    if values["what"] == "code":
        from eval.code import fetch_code

        for path in fetch_code(Path(values["data"] or "data/evalplus")):
            _say(f"{path}: there")
        return 0
    if values["what"] != "core":
        raise ValueError(f"what={values['what']}: core or code can be fetched")
    from eval.fetch import fetch_core

    return 1 if fetch_core(values["source"], Path(values["data"] or "data/core"), _say) else 0


SOURCE = "https://raw.githubusercontent.com/mosaicml/llm-foundry/v0.9.0/scripts/eval/local_data"
SCORE = "score"
FOLLOW = "--follow"
TRUST = "--trust-remote-code"
VERBS = {
    SCORE: Verb(
        "score one checkpoint, or with --follow every checkpoint of a run as it appears",
        _score,
        {
            "checkpoint": Key("", "a complete checkpoint directory, or a Hugging Face folder"),
            "run": Key("", "with --follow: the run directory"),
            "suite": Key(
                "core", "core, builtin (small, needs no data), code, validation, or several: core,code"
            ),
            "data": Key(
                "data/core", "core: folder with the task files (`python -m eval fetch core` fills it)"
            ),
            "limit": Key(
                "", "core: at most so many items a task, always the same ones; validation: sequences a source"
            ),
            "held_out": Key(
                "", "validation: folder of the prepared data, where it is not the run's data.root"
            ),
            "tasks": Key("", "core: only these, separated by commas"),
            "rules": Key("dclm", "core: dclm, or nanochat's prompts"),
            "out": Key("", "where results go when the checkpoint is not in a run directory"),
            "device": Key("auto", "cpu or cuda"),
            "dtype": Key("auto", "float32 (default on CPU), bfloat16 (default on GPU) or float16"),
            "processes": Key("1", "share the items among so many processes, one per GPU"),
            "batch_tokens": Key("", "tokens in one forward pass (4096 on CPU, 16384 on GPU)"),
            "poll": Key("30", "with --follow: seconds between two looks at the run"),
            **CODE_KEYS,
        },
        {
            FOLLOW: "score every complete checkpoint of run=, in order, until the run is DONE",
            TRUST: "let a Hugging Face folder run its own modeling code",
        },
        positional=("run",),
    ),
    "aggregate": Verb(
        "Core v1 and v2 from accuracies: a JSON list of {name, accuracy: {task: fraction}}",
        _aggregate,
        {"scores": Key(None, "the file")},
        {"--json": "print JSON"},
        positional=("scores",),
    ),
    "fetch": Verb(
        "bring the task files of core, or those of code, into a folder, checked",
        _fetch,
        {
            "what": Key("core", "core or code"),
            "data": Key("", "the folder; default: data/core, or data/evalplus"),
            "source": Key(SOURCE, "core: a URL (https:// or file://) with llm-foundry's layout, or flat"),
        },
        positional=("what",),
    ),
    "compare": Verb(
        "the difference between two checkpoints, with paired bootstrap intervals",
        _compare,
        {
            "a": Key(None, "an evals/step-N.json, or a run directory for its last scored step"),
            "b": Key(None, "the same"),
            "seed": Key("0", "of the resampling"),
        },
        {"--json": "print JSON"},
        positional=("a", "b"),
    ),
    "report": Verb(
        "scores over training as HTML in one file, and as markdown",
        _report,
        {
            "run": Key(None, "the run directory, or several that continue one another, in order"),
            "out": Key("", "folder of the report; default: the last run's evals"),
        },
        positional=("run",),
        several=True,
    ),
}
