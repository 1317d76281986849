"""Reading task files, and which items a capped run takes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from eval.core_tasks import BUILTIN, BUILTIN_FOLDER, CORE, Task, load_task, subset
from tests.unit.eval_fixtures import CORE_DATA, NO_CORE_DATA, make_task, write_items

COPA = CORE["copa"]
ITEM = {"query": "a", "choices": ["b", "c"], "gold": 1}


def test_plain_and_gzipped_files_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "commonsense").mkdir()
    write_items(tmp_path / "commonsense" / "copa.jsonl", [ITEM] * 3)
    plain = load_task(COPA, tmp_path)
    (tmp_path / "commonsense" / "copa.jsonl").unlink()
    write_items(tmp_path / "copa.jsonl.gz", [ITEM] * 3, gzip.open)
    zipped = load_task(COPA, tmp_path)
    assert plain is not None
    assert zipped is not None
    assert (plain.items, plain.sha256) == (zipped.items, zipped.sha256)
    assert not plain.complete


def test_a_part_of_a_file_is_taken_and_known_as_such(tmp_path: Path) -> None:
    assert load_task(CORE["squad"], tmp_path) is None
    write_items(tmp_path / "squad_subset5.jsonl", [{"context": "a", "continuation": "b"}] * 5)
    part = load_task(CORE["squad"], tmp_path)
    assert part is not None
    assert not part.complete


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 2: gold is 2 of 2 options"),
        ('{"query": "a", "choices": ["b", "c"]}', r"line 2: needs gold \(int\)"),
        ('{"query": "a", "choices": ["b", " "], "gold": 0}', "line 2: an empty answer"),
        ("[1]", "line 2: not an object"),
        ('{"query', "line 2: not JSON"),
    ],
)
def test_faulty_lines_are_named(tmp_path: Path, line: str, fault: str) -> None:
    write_items(tmp_path / "copa.jsonl", [ITEM])
    with (tmp_path / "copa.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=rf"copa\.jsonl cannot be used for copa:\n- {fault}"):
        load_task(COPA, tmp_path)


def test_a_larger_cap_contains_the_smaller() -> None:
    data = make_task("multiple_choice", [ITEM] * 100)
    small, large = subset(data, 11), subset(data, 40)
    assert len(small) == 11
    assert set(small) < set(large)
    assert small == sorted(small)
    assert small != list(range(11)), "the first items of a file are no fair sample"
    assert subset(data, None) == subset(data, 1000) == list(range(100))


def test_a_cap_takes_from_every_category() -> None:
    items = [{"context": "a", "continuation": "b", "category": c} for c in "x" * 90 + "y" * 7 + "z" * 3]
    taken = subset(make_task("language_modeling", items, by_category=True), 30)
    counts = {c: sum(items[i]["category"] == c for i in taken) for c in "xyz"}
    assert counts == {"x": 20, "y": 7, "z": 3}


@pytest.mark.parametrize("task", BUILTIN.values(), ids=lambda task: task.name)
def test_builtin_tasks_are_complete(task: Task) -> None:
    data = load_task(task, BUILTIN_FOLDER)
    assert data is not None
    assert data.complete
    assert len({str(item) for item in data.items}) == len(data.items)


@pytest.mark.skipif(not CORE_DATA.is_dir(), reason=NO_CORE_DATA)
@pytest.mark.parametrize("task", CORE.values(), ids=lambda task: task.name)
def test_core_files_are_read(task: Task) -> None:
    data = load_task(task, CORE_DATA)
    assert data is not None
    assert data.complete == (task.name != "squad")
