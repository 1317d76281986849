from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_mixtures import smoke_corpus, smoke_text
from data_mixtures.cli import main
from data_mixtures.mixture import build_mixture
from data_mixtures.recipe import load_recipe
from data_mixtures.sequences import SequenceReader
from data_mixtures.shards import read_manifest
from data_mixtures.smoke import SEQ_LEN, is_held_out, prepare_smoke
from data_mixtures.token_stream import TokenStream
from data_mixtures.tokenizer import Tokenizer

SOURCES = ("prose", "code", "reasoning", "chat")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("smoke")
    prepare_smoke(root)
    return root


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def documents(root: Path, source: str, split: str, count: int) -> list[str]:
    stream = TokenStream(root / source / split)
    tokenizer = Tokenizer(root / "tokenizer.model")
    offsets = stream.document_offsets(0).tolist()
    spans = list(itertools.pairwise(offsets))[:count]
    return [tokenizer.decode(stream.read(a, b)[0]) for a, b in spans]


def test_sources_are_whole_documents_of_the_corpus(root: Path) -> None:
    keys = {
        "prose": {text: key for key, text in smoke_corpus.prose()},
        "code": {text: key for key, text in smoke_corpus.code()},
        "reasoning": {text: text for text in smoke_text.reasoning()},
    }
    for source, key_of in keys.items():
        for split in ("train", "validation"):
            for text in documents(root, source, split, 20):
                assert is_held_out(key_of[text]) == (split == "validation")


def test_no_text_is_in_both_splits(root: Path) -> None:
    for source in SOURCES:
        train = set(documents(root, source, "train", 10**6))
        held_out = documents(root, source, "validation", 10**6)
        assert held_out
        assert not train & set(held_out)


def test_manifests_state_origin_and_tokenizer(root: Path) -> None:
    tokenizer = Tokenizer(root / "tokenizer.model")
    for source in SOURCES:
        manifest = read_manifest(root / source / "train")
        assert manifest["tokenizer_sha256"] == tokenizer.sha256
        assert manifest["origin"]["licence"]
        assert manifest["origin"]["revision"].startswith("Python 3.")
        assert manifest["loss_mask"] == (source == "chat")


def test_the_shipped_recipes_fit_the_corpus(root: Path) -> None:
    for name in ("smoke_phase1", "smoke_phase2", "smoke_sft"):
        recipe = load_recipe(name)
        mixture = build_mixture(type(recipe)(**{**vars(recipe), "root": str(root)}), SEQ_LEN)
        assert mixture.sequences == recipe.tokens // SEQ_LEN
        for source in mixture.sources:
            assert SequenceReader(root / source / "validation", SEQ_LEN, recipe.packing).items >= 8


def test_preparing_again_does_nothing_and_damage_is_repaired(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(root)
    assert main(["smoke", f"root={root}"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    damaged = root / "code" / "train" / "shard-00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    (root / "prose" / "train" / "manifest.json").unlink()
    prepare_smoke(root)
    assert digests(root) == before


def test_generated_problems_are_right() -> None:
    """The answers of the arithmetic problems, against Python's."""
    checked = 0
    for text in smoke_text.reasoning(300):
        problem, answer = text.splitlines()[0], text.splitlines()[-1].removeprefix("Answer: ")
        if problem.startswith("Problem: compute"):
            assert eval(problem.removeprefix("Problem: compute ").removesuffix(".")) == int(answer)
            checked += 1
    assert checked > 30
    assert list(smoke_text.reasoning(5)) == list(smoke_text.reasoning(300))[:5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smok"], "there is no verb 'smok'; there are: smoke"),
        (["smoke", "rot=x"], "unknown argument 'rot=x'; smoke takes root="),
        (["smoke", "--fast"], "unknown argument '--fast'"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_plan_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe=nemotron_phase2", "out=", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["phases"] == ["nemotron_phase1", "nemotron_phase2"]
    assert main(["plan"]) == 2
    assert "give either experiment=<name> or recipe=<name>" in capsys.readouterr().err


def test_help_lists_verbs_and_keys_with_defaults() -> None:
    run = [sys.executable, "-m", "data_mixtures"]
    assert "smoke" in subprocess.run(run, capture_output=True, text=True, check=True).stdout
    described = subprocess.run([*run, "smoke", "--help"], capture_output=True, text=True, check=True).stdout
    assert "root=data/smoke" in described
