"""Decontamination on planted benchmark items and on clean look-alikes, with the figures asserted."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from data_mixtures.benchmarks import read_benchmarks
from data_mixtures.cli import main
from data_mixtures.contamination import DocumentHits, read_hits, summarise, write_hits
from data_mixtures.decontaminate import Decontaminator, Hit, contaminated
from tests.unit.planted import KINDS, Task

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

# Three tasks of our own in the public layouts: a telling name, a common name, and a long solution.
TASKS: list[dict[str, str]] = [
    {
        "task_id": "Own/0",
        "entry_point": "longest_quiet_stretch",
        "prompt": '''from typing import List


def longest_quiet_stretch(loudness: List[float], ceiling: float) -> int:
    """ Return how many neighbouring measurements at most stay strictly below the given ceiling.
    >>> longest_quiet_stretch([0.1, 0.9, 0.2, 0.3], 0.5)
    2
    """
''',
        "canonical_solution": """    best = run = 0
    for value in loudness:
        run = run + 1 if value < ceiling else 0
        best = max(best, run)
    return best
""",
    },
    {
        "task_id": "Own/1",
        "entry_point": "is_prime",
        "prompt": '''def is_prime(n):
    """Tell whether the whole number handed over has exactly two divisors, one and the number itself.
    >>> is_prime(97)
    True
    """
''',
        "canonical_solution": """    return n > 1 and all(n % k for k in range(2, n))
""",
    },
    {
        "task_id": "Own/2",
        "entry_point": "weave",
        "prompt": '''"""
Write a function to interleave the characters of two words until the shorter of the two is used up.
assert weave("abc", "12345") == "a1b2c3"
"""
''',
        "canonical_solution": """
def weave(first, second):
    # pairs, as long as there are any
    pieces = []
    for left, right in zip(first, second):
        pieces.append(left)
        pieces.append(right)
    woven = "".join(pieces)
    return woven
""",
    },
]
QUESTIONS = [
    {
        "query": "Question: Why does the lower of two lakes fed by one glacier stay warmer all summer long?",
        "choices": ["It is deeper.", "Its water has had more time in the sun."],
        "gold": 1,
    },
    {"context": "The capital of Atlantis is", "continuation": "Poseidonis"},
]
PASSAGE = (
    "The ferry crosses the strait twice a day and carries mail, sheep, bricks and the doctor on Tuesdays."
)

CLEAN = {
    "digits": "Table: " + " ".join(str(n) for n in range(2000)),
    "alphabet": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3,
    "licence": 'Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except '
    "in compliance with the License. You may obtain a copy of the License at the address below.",
    "boilerplate": "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
    "    parser.add_argument('--out', type=str, default='out')\n    args = parser.parse_args()\n\n\n"
    'if __name__ == "__main__":\n    main()\n',
    "same name, other signature": "def longest_quiet_stretch(waveform, rate, window=5, hop=1):\n    pass\n",
    "same name, as many parameters": "def longest_quiet_stretch(audio, limit):\n    return librosa.run(audio)\n",
    "everybody's name": "def is_prime(n):\n    '''Miller-Rabin test.'''\n    return n > 1 and strong_probable(n)\n",
    "near but other": "def is_prime(number, rounds):\n    '''Tell whether the whole number handed over is odd.'''\n",
    "ways of speaking": "Write a function to find the sum of two numbers. Write a function to find the mean.",
}


def write_jsonl(path: Path, records: list[dict]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    passage = {
        "query": f"Passage: {PASSAGE}\nQuestion: does the doctor come to the island on every other Tuesday of "
        "the month in winter?",
        "choices": ["no", "yes"],
        "gold": 0,
    }
    return [
        write_jsonl(folder / "OwnTasks.jsonl.gz", TASKS),
        write_jsonl(folder / "trivia.jsonl", QUESTIONS),
        write_jsonl(folder / "boolq.jsonl", [passage]),
    ]


@pytest.fixture(scope="module")
def decontaminator(files: list[Path]) -> Decontaminator:
    return Decontaminator.from_files(files)


@pytest.mark.parametrize("kind", KINDS)
def test_planted_own_tasks(decontaminator: Decontaminator, kind: str) -> None:
    """Each kind of disguise, task by task; two are lost once only the name and other variables are left."""
    found = {
        hit.item for task in TASKS for hit in decontaminator.check(KINDS[kind](task)) if contaminated([hit])
    }
    lost = {"renamed, comments removed": {"Own/1", "Own/2"}}
    assert found == {"Own/0", "Own/1", "Own/2"} - lost.get(kind, set())


@pytest.mark.parametrize("kind", CLEAN)
def test_look_alikes_are_clean(decontaminator: Decontaminator, kind: str) -> None:
    assert decontaminator.check(CLEAN[kind]) == []


def test_kinds_of_hits(decontaminator: Decontaminator) -> None:
    """What each rule reports, and that quoted prose alone does not condemn a document."""
    quoted = decontaminator.check(f"From a travel guide: {PASSAGE}")
    assert [(hit.benchmark, hit.item, hit.kind) for hit in quoted] == [("boolq", "0", "passage")]
    assert not contaminated(quoted)
    asked = decontaminator.check(
        "Why does the lower of two lakes fed by one glacier stay warmer all summer long?"
    )
    assert [(hit.benchmark, hit.item, hit.kind) for hit in asked] == [("trivia", "0", "prompt")]
    assert contaminated(asked)
    for list_type in ("List", "list"):
        same_types = decontaminator.check(
            f"def longest_quiet_stretch(db: {list_type}[float], top: float): ..."
        )
        assert [hit.kind for hit in same_types] == ["signature"]
    assert decontaminator.check("def longest_quiet_stretch(db: list[int], top: float): ...") == []
    near = '# Interleave the characters of two words until one ends.\ndef weave(p, q):\n    """Mine."""\n'
    assert [(hit.item, hit.kind) for hit in decontaminator.check(near)] == [("Own/2", "signature")]


def test_twelve_words_are_not_enough(decontaminator: Decontaminator) -> None:
    assert decontaminator.check("doctor come to the island on every other Tuesday of the month") == []
    assert len(decontaminator.check("the doctor come to the island on every other Tuesday of the month")) == 1


def test_part_of_a_solution_is_idiom(decontaminator: Decontaminator) -> None:
    """A solution of 23 words is a hit as a whole, and no longer with one word missing at either end."""
    code = TASKS[2]["canonical_solution"].replace("    # pairs, as long as there are any\n", "")
    assert [hit.kind for hit in decontaminator.check(code)] == ["solution"]
    assert decontaminator.check(code.removesuffix("woven\n")) == []
    assert decontaminator.check(code.replace("def ", "")) == []


def test_excerpt_and_offset_point_into_the_document(decontaminator: Decontaminator) -> None:
    """Also behind characters of two, three and four bytes, and with a lone surrogate."""
    question = "Why does the lower of two lakes\nfed by one glacier\t stay warmer all summer long"
    for before in ("", "Größe — 日本 🙂 ", "\ud800 broken\n" * 3):
        text = f"{before}¿{question}? Nobody knows."
        (hit,) = decontaminator.check(text)
        assert (hit.offset, hit.excerpt) == (len(before) + 1, question)


def test_batch_equals_one_by_one(decontaminator: Decontaminator) -> None:
    """Any grouping of documents gives the same hits, and no hit spans two documents."""
    planted = [make(task) for make in KINDS.values() for task in TASKS]
    documents = [*planted, *CLEAN.values(), "", PASSAGE]
    halves = [part for text in planted for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    documents += halves
    random.Random(1).shuffle(documents)
    assert decontaminator.check_batch(documents) == [decontaminator.check(text) for text in documents]


def test_an_item_cut_in_two_documents_is_in_neither(decontaminator: Decontaminator) -> None:
    question = "Why does the lower of two lakes fed by one glacier stay warmer all summer long?"
    head, tail = question.split(" fed ")
    assert decontaminator.check(f"{head} fed {tail}")
    assert decontaminator.check_batch([f"{head} fed", tail]) == [[], []]


def test_save_and_load(decontaminator: Decontaminator, tmp_path: Path) -> None:
    """The loaded index finds the same; one flipped byte anywhere, or another file, is refused by name."""
    path = tmp_path / "index"
    decontaminator.save(path)
    data = path.read_bytes()
    decontaminator.save(path)
    assert path.read_bytes() == data
    loaded = Decontaminator.load(path)
    assert loaded.digest == decontaminator.digest
    documents = [make(task) for make in KINDS.values() for task in TASKS]
    assert loaded.check_batch(documents) == decontaminator.check_batch(documents)
    assert loaded.coverage() == decontaminator.coverage()
    for position in random.Random(2).sample(range(len(data)), 40):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="index: "):
            Decontaminator.load(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="index: "):
        Decontaminator.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Decontaminator.load(tmp_path / "missing")


def test_index_of_other_settings_is_refused(
    decontaminator: Decontaminator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decontaminator.save(tmp_path / "index")
    monkeypatch.setattr("data_mixtures.decontaminate._SETTINGS", {"words": 8})
    with pytest.raises(ValueError, match="was built with"):
        Decontaminator.load(tmp_path / "index")


def test_coverage_counts_what_is_out_of_reach(decontaminator: Decontaminator) -> None:
    coverage = decontaminator.coverage()
    assert (coverage["trivia"].items, coverage["trivia"].out_of_reach) == (2, 1)
    assert (coverage["OwnTasks"].by_signature, coverage["OwnTasks"].by_prompt) == (3, 3)
    assert coverage["boolq"].out_of_reach == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task_id": 1}', "line 1: a record with the keys"),
        ("{}\n", "line 1"),
        ('{"query": "q", "choices": ["a"], "gold": 3}', "line 1"),
        ("not json", "line 1"),
    ],
)
def test_unreadable_benchmarks_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match="bench.jsonl: " + message):
        read_benchmarks([file])


def test_a_benchmark_that_is_missing_or_cut_off(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no benchmark files"):
        read_benchmarks([])
    with pytest.raises(ValueError, match=r"gone\.jsonl: cannot be read"):
        read_benchmarks([tmp_path / "gone.jsonl"])
    whole = write_jsonl(tmp_path / "cut.jsonl.gz", TASKS)
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz"):
        read_benchmarks([whole])


def test_mbpp_as_first_published(tmp_path: Path) -> None:
    record = {
        "task_id": 7,
        "text": "Write a function to sort the crates in the hold by weight and then by owner.",
        "code": "def helper(a):\n    return a\ndef sort_crates(hold, owners):\n    return sorted(hold, key=helper)\n",
        "test_list": ["assert sort_crates([2, 1], 'ab') == [1, 2]"],
    }
    (item,) = read_benchmarks([write_jsonl(tmp_path / "mbpp.jsonl", [record])])
    assert item.name == "Mbpp/7"
    assert item.signature is not None
    assert (item.signature.name, item.signature.parameters) == ("sort_crates", ("hold", "owners"))


def test_report_of_hits(decontaminator: Decontaminator, tmp_path: Path) -> None:
    """Hits survive the file; the report counts documents, not n-grams, and says where they are."""
    texts = {"a": KINDS["verbatim"](TASKS[0]), "b": KINDS["reformatted"](TASKS[0]), "c": f"Guide: {PASSAGE}"}
    found = [DocumentHits("web", name, tuple(decontaminator.check(text))) for name, text in texts.items()]
    write_hits(tmp_path / "hits.jsonl", found)
    assert list(read_hits([tmp_path / "hits.jsonl"])) == found
    report = summarise(read_hits([tmp_path / "hits.jsonl"]))
    assert report["sources"]["web"]["removed"] == 2
    assert report["sources"]["web"]["reported only"] == 1
    item = report["items"]["OwnTasks"]["Own/0"]
    assert item["documents"] == 2
    assert [place["document"] for place in item["places"]] == ["a", "b"]
    assert texts["a"][item["places"][0]["offset"] :].startswith(item["places"][0]["excerpt"])
    (tmp_path / "hits.jsonl").write_text('{"source": "web"}\n')
    with pytest.raises(ValueError, match=r"hits\.jsonl: line 1"):
        list(read_hits([tmp_path / "hits.jsonl"]))


def test_scan_of_a_source(files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: build the index, scan a source, read the report."""
    index, report = tmp_path / "index.safetensors", tmp_path / "report.json"
    pattern = f"{files[0].parent}/Own*.gz,{files[1]}, {files[2]}"
    assert main(["benchmarks", f"files={pattern}", f"out={index}"]) == 0
    assert "OwnTasks: 3 items, 0 too short to be found" in capsys.readouterr().out
    rows = [{"body": text} for text in (KINDS["renamed variables"](TASKS[0]), *CLEAN.values(), PASSAGE)]
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {"body": None}])
    yaml = "kind: jsonl\npath: rows.jsonl\ncategory: code\nlicence: ours\ncolumns: {text: body}\n"
    (tmp_path / "mine.yaml").write_text(yaml)
    assert main(["scan", f"source={tmp_path}/mine.yaml", f"index={index}", f"report={report}"]) == 0
    printed = capsys.readouterr().out
    assert "Own/0 (signature, removed)" in printed or "Own/0 (prompt, removed)" in printed
    assert f"{len(rows)} documents" in printed
    assert "1 to remove" in printed
    assert "1 reported only; 1 rows are no document" in printed
    found = json.loads(report.read_text())
    assert found["index"] == Decontaminator.load(index).digest
    assert found["items"]["OwnTasks"]["Own/0"]["places"][0]["document"].startswith("rows.jsonl:1 ")
    assert main(["benchmarks", "files=nowhere/*.jsonl", f"out={index}"]) == 2
    assert "'nowhere/*.jsonl' matches no file" in capsys.readouterr().err


def shared_tasks(name: str) -> list[Task]:
    path = SHARED / "evalplus" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs {path.name} in ../shared/data/evalplus")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# Measured on all 164 and 378 tasks. Once the description is gone what is left is a solution that is often one
# line under a common name: recall falls, and with other variable names on top nearly all of it is lost.
RECALL = {
    "HumanEvalPlus": {"comments changed": 128, "comments removed": 147, "renamed, comments removed": 10},
    "MbppPlus": {"comments changed": 272, "comments removed": 272, "renamed, comments removed": 2},
}


@pytest.mark.parametrize("benchmark", RECALL)
def test_planted_public_benchmarks(benchmark: str) -> None:
    """Recall by kind of disguise on HumanEval+ and MBPP+; verbatim, reformatted and renamed are all found."""
    tasks = shared_tasks(benchmark)
    decontaminator = Decontaminator.from_files([SHARED / "evalplus" / f"{benchmark}.jsonl.gz"])
    found = Counter()
    for kind, make in KINDS.items():
        for task, hits in zip(tasks, decontaminator.check_batch([make(task) for task in tasks]), strict=True):
            found[kind] += any(hit.item == task["task_id"] for hit in hits)
    assert found == {kind: RECALL[benchmark].get(kind, len(tasks)) for kind in KINDS}


def test_public_language_benchmarks(tmp_path: Path) -> None:
    """Every CORE file is read, and a sample of its items is found again word for word."""
    files = sorted((SHARED / "core").glob("*.jsonl.gz"))
    if not files:
        pytest.skip("needs ../shared/data/core")
    small = [file for file in files if file.stat().st_size < 120_000]
    decontaminator = Decontaminator.from_files(small)
    for item in random.Random(0).sample(read_benchmarks(small), 300):
        for kind, text in item.pieces:
            hits = decontaminator.check(f"Seen somewhere: {text} And so on.")
            if len(text.split()) > 20 and not item.benchmark.startswith("bigbench"):
                assert Hit in {type(hit) for hit in hits if hit.item == item.name and hit.kind == kind}
