"""The suite "code": its keys, its models, its scores, and when it is not run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from eval import code, evalplus_env
from eval.code import KEYS, make_suite
from eval.code_generate import HuggingFaceGenerator, LaneformerGenerator, load_generator
from eval.code_judge import JudgeError, Solution, Verdict
from eval.evalplus_env import PIN, STAMP, Environment, EvalplusMissing, environment, setup
from eval.sandbox import SandboxUnavailable
from eval.suite import Job
from model.decode import Sampling, generate
from model.delayed_tp import LaneGroup
from tests.unit.eval_fixtures import small_model, small_tokenizer, write_checkpoint

DEFAULTS = {name: key.default or "" for name, key in KEYS.items()}
BUILTIN = DEFAULTS | {"code_benchmarks": "builtin", "code_tokens": "8"}
ASKED: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 3, "stops": []}
PROMPTS = ["the fox", "a dog and a fox", "def f"]


def test_our_checkpoint_continues_as_the_decoder_does(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    loaded = load_generator(write_checkpoint(tmp_path / "run", 3, tokenizer, longest=64))
    model = small_model(64)
    sampled: dict[str, Any] = ASKED | {"temperature": 0.9, "top_p": 0.95}
    for asked, sampling in [
        (ASKED, Sampling()),
        (sampled, Sampling(temperature=0.9, top_p=0.95, seed=3)),
    ]:
        expected, _ = generate(
            LaneGroup.of(model),
            [tokenizer.encode(text, bos=True) for text in PROMPTS],
            tokenizer.decode,
            max_new_tokens=12,
            sampling=sampling,
            eos_id=tokenizer.eos_id,
        )
        assert loaded(PROMPTS, **asked) == [generation.text for generation in expected]
    assert loaded.render is not None
    assert loaded.render([{"role": "user", "content": "x"}]) == "<|user|>\nx\n"


def test_a_prompt_that_does_not_fit_is_counted(tmp_path: Path) -> None:
    generator = LaneformerGenerator(small_model(64), small_tokenizer(tmp_path))
    alone = generator(["the fox"], **ASKED)
    assert generator(["the fox " * 100, "the fox", "x " * 200], **ASKED) == ["", *alone, ""]
    assert generator.too_long == 2
    assert generator(["the fox " * 100], **ASKED) == [""]


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    raw = tokenizers.ByteLevelBPETokenizer()
    raw.train_from_iterator(PROMPTS * 10, vocab_size=300, special_tokens=["<end>", "<start>"])
    raw._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, bos_token="<start>", eos_token="<end>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    )
    torch.manual_seed(0)
    sizes = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(sizes).eval()
    folder = tmp_path / "gpt2"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    generator = load_generator(folder)
    assert isinstance(generator, HuggingFaceGenerator)
    together = generator([*PROMPTS, "fox " * 100], **ASKED)
    assert together == [*(generator([text], **ASKED)[0] for text in PROMPTS), ""]
    assert generator.too_long == 1
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    new = []
    for _ in range(12):  # greedy, written out
        new.append(int(model(ids).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=1)
    assert together[0] == tokenizer.decode(new, skip_special_tokens=True)
    stop = together[0][3:6]
    stopping: dict[str, Any] = ASKED | {"stops": [stop, "never"]}
    stopped = generator([PROMPTS[0]], **stopping)[0]
    assert stop in stopped
    assert together[0].startswith(stopped)
    assert len(stopped) < len(together[0])
    sampled: dict[str, Any] = ASKED | {"temperature": 0.8, "top_p": 0.95}
    assert generator(PROMPTS, **sampled) == generator(PROMPTS, **sampled) != together[:3]
    assert generator.render is not None
    assert generator.render([{"role": "user", "content": "x"}]) == "<start>[user]x"
    for text in ("x", "<start>x"):
        assert generator._encode([text]).input_ids[0].tolist() == [1, *tokenizer("x").input_ids[1:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code_benchmarks": "humaneval,apps"}, "must name some of humaneval, mbpp, builtin"),
        ({"code_benchmarks": ""}, "must name some of"),
        ({"code_samples": "four"}, "code_samples=four is no whole number"),
        ({"code_temperature": "warm"}, "code_temperature=warm is no number"),
        ({"code_samples": "4"}, "samples=4 at temperature=0"),
        ({"code_style": "instruct"}, "style=instruct is neither base nor chat"),
    ],
)
def test_mistakes_are_named(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_suite(DEFAULTS | changes)


def test_settings_hold_what_the_numbers_depend_on() -> None:
    plain = make_suite(BUILTIN).settings()
    assert plain["builtin"]["max_new_tokens"] == 8
    for change in ("code_tokens", "code_seed", "code_limit", "code_batch"):
        assert make_suite(BUILTIN | {change: "3"}).settings() != plain
    assert make_suite(BUILTIN | {"code_workers": "3"}).settings() == plain
    assert "chat_template" in make_suite(BUILTIN | {"code_style": "chat"}).settings()
    with pytest.raises(FileNotFoundError, match="python -m eval fetch code"):
        make_suite(DEFAULTS | {"code_data": "/nowhere"}).settings()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    checkpoint = write_checkpoint(tmp_path / "run", 3, small_tokenizer(tmp_path), longest=1024)
    return Job(checkpoint, 3, tmp_path / "folder")


class OneRight:
    """Passes the solutions of two problems; the base tests of a third."""

    def __init__(self, environment: Environment, benchmark: Any, workers: int | None) -> None:
        self.benchmark = benchmark

    def judge(self, solutions: Iterable[Solution], found: Callable[[Verdict], None]) -> None:
        for one in solutions:
            number = int(one.task_id.partition("/")[2])
            base, plus = ("pass" if number in passing else "fail" for passing in ((1, 2, 4), (2, 4)))
            found(Verdict(one.sha256, one.task_id, base, plus, one.text))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "probe", lambda: None)
    packages = {name: "1.0" for name in code.RUNNER_PACKAGES}
    monkeypatch.setattr(code, "setup", lambda folder: Environment(folder, folder, packages))
    monkeypatch.setattr(code, "Judge", OneRight)
    monkeypatch.setattr(code, "preflight", lambda judge, cache: None)


@pytest.mark.usefixtures("judged")
def test_scores_of_a_checkpoint(job: Job) -> None:
    result = make_suite(BUILTIN).run(job)
    assert result.not_run is None
    assert result.scores == {"builtin_code/pass@1": 2 / 8, "builtin_code_base_tests/pass@1": 3 / 8}
    task = result.tasks["builtin_code"]
    assert (task["n"], task["correct"], task["accuracy"]) == (8, 2, 0.25)
    assert task["runner_packages"]["evalplus"] == "1.0"
    assert "pass@1 0.2500, 95 % interval 0.0" in result.notes[0]
    assert (job.folder / "builtin" / "items.jsonl").exists()


@pytest.mark.usefixtures("judged")
def test_pass_at_one_of_samples_has_another_name(job: Job) -> None:
    words = BUILTIN | {"code_samples": "2", "code_temperature": "0.8", "code_limit": "4"}
    result = make_suite(words).run(job)
    assert set(result.scores) == {
        f"builtin_code{part}/{k}" for part in ("", "_base_tests") for k in ("sampled_pass@1", "pass@2")
    }
    assert result.notes[-1] == "builtin_code: 4 problems only, so it is not the benchmark's number"


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(
    ("step", "error", "reason"),
    [
        ("probe", SandboxUnavailable("no bwrap"), r"no bwrap\n.*apt-get install bubblewrap"),
        ("preflight", JudgeError("references fail"), "references fail"),
        ("setup", EvalplusMissing("none: make setup-evalplus"), "none: make setup-evalplus"),
    ],
)
def test_it_is_not_run_without_all_it_needs(
    step: str, error: Exception, reason: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(code, step, fail)
    result = make_suite(BUILTIN).run(job)
    assert result.scores == {}
    assert result.not_run is not None
    assert re.search(reason, result.not_run, re.S)
    assert not job.folder.exists()


def write_stamp(folder: Path, **changes: Any) -> None:
    stamp = {"pin": PIN, "base": str(folder), "python": "3.11", "packages": {"evalplus": "0.3.1"}, **changes}
    folder.mkdir(exist_ok=True)
    (folder / STAMP).write_text(json.dumps(stamp))


def test_an_environment_is_taken_when_it_is_complete(tmp_path: Path) -> None:
    with pytest.raises(EvalplusMissing, match="there is no evalplus environment"):
        environment(tmp_path)
    write_stamp(tmp_path, pin="evalplus==0.2.0")
    with pytest.raises(EvalplusMissing, match=f"holds evalplus==0.2.0 and {PIN} is needed: make"):
        environment(tmp_path)
    write_stamp(tmp_path, base=str(tmp_path / "gone"))
    with pytest.raises(EvalplusMissing, match="gone, which is gone: make setup-evalplus"):
        environment(tmp_path)
    write_stamp(tmp_path)
    found = setup(tmp_path, say=pytest.fail)
    assert found.python == str(tmp_path / "bin" / "python")
    room = found.room({"/in/a": b""}, b"words")
    assert room.bind == {tmp_path: str(tmp_path)}
    assert (room.stdin, room.environment["PYTHONHASHSEED"]) == (b"words", "0")


def test_an_installation_that_fails_leaves_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evalplus_env.sys, "executable", "/bin/false")
    said: list[str] = []
    with pytest.raises(EvalplusMissing, match=rf"{PIN} could not be installed.*make setup-evalplus"):
        setup(tmp_path / "it", said.append)
    assert "making it" in said[0]
    with pytest.raises(EvalplusMissing, match="there is no evalplus environment"):
        environment(tmp_path / "it")
