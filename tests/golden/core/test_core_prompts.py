"""Prompts and scored spans of two items of each of the 22 tasks against prompts.json.

The file was written by a transcription of the rules (../../../eval/core_prompts.py, table, left column) that
names each task's template in full and shares no code with the package. It holds hashes of the texts, not the
texts: the data sets have licences of their own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from eval import core_prompts
from eval.core_prompts import DclmRules, Span
from eval.core_tasks import CORE, load_task
from tests.unit.eval_fixtures import CORE_DATA, NO_CORE_DATA, CharEncoder, SpaceEncoder

GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "prompts.json").read_text())


def digest(span: Span) -> str:
    text = CharEncoder.text(span.tokens[: span.start]) + "|" + CharEncoder.text(span.tokens[span.start :])
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_task_has_two_items() -> None:
    assert {name: len(rows) for name, rows in GOLDEN.items()} == dict.fromkeys(CORE, 2)


@pytest.mark.skipif(not CORE_DATA.is_dir(), reason=NO_CORE_DATA)
@pytest.mark.parametrize("name", CORE)
def test_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_prompts, "DCLM_CONTEXT", 10**6)  # a token is a character here
    data = load_task(CORE[name], CORE_DATA)
    assert data is not None
    rules = DclmRules()
    shots = rules.shots(data, None)
    for row in GOLDEN[name]:
        item = row["item"]
        assert shots[item] == row["shots"]
        plain = rules.prompt(data, item, shots[item], CharEncoder(10**6))
        assert plain.gold == row["gold"]
        assert [span.start for span in plain.spans] == [option["plain"]["start"] for option in row["options"]]
        assert [len(span.tokens) for span in plain.spans] == [o["plain"]["length"] for o in row["options"]]
        last = plain.spans[-1]
        assert CharEncoder.text(last.tokens[: last.start]).endswith(row["context_ends"])
        assert CharEncoder.text(last.tokens[last.start :]).startswith(row["answer_begins"])
        assert [digest(span) for span in plain.spans] == [o["plain"]["sha256"] for o in row["options"]]
        spaced = rules.prompt(data, item, shots[item], SpaceEncoder(10**6))
        assert [digest(span) for span in spaced.spans] == [o["spaced_sha256"] for o in row["options"]]
