from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_mixtures import prepare as prepare_module
from data_mixtures.benchmarks import Item
from data_mixtures.chat import encode_conversation
from data_mixtures.cli import main
from data_mixtures.decontaminate import Decontaminator
from data_mixtures.documents import chunks
from data_mixtures.merge import merge
from data_mixtures.parallel import prepare_units
from data_mixtures.prepare import Job, SettingsChanged
from data_mixtures.records import CorruptInput
from data_mixtures.shards import ShardError, read_manifest
from data_mixtures.sources import load_source
from data_mixtures.token_stream import TokenStream
from data_mixtures.tokenizer import Tokenizer
from tests.unit.data_fixtures import small_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model").path


def source_file(folder: Path, kind: str, path: str, columns: dict[str, str] | None = None) -> Path:
    file = folder / "a_source.yaml"
    content: dict[str, Any] = {"kind": kind, "path": path, "category": "code", "licence": "none"}
    if columns:
        content["columns"] = columns
    file.write_text(json.dumps(content))
    return file


def write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))


def job(tmp_path: Path, model: Path, file: Path, **more: Any) -> Job:
    defaults = {"root": tmp_path / "out", "held_out": 0.0}
    return Job(source=load_source(file), tokenizer=model, **{**defaults, **more})


def run(one: Job, workers: int = 1) -> dict[str, Any]:
    prepare_units(one, workers=workers)
    return merge(one)["train"]


def texts(one: Job, split: str = "train") -> list[str]:
    """The stored documents, decoded; each must lie between BOS and EOS."""
    stream, tokenizer = TokenStream(one.directory / split), Tokenizer(one.tokenizer)
    found = []
    for k in range(stream.num_shards):
        offsets = stream.document_offsets(k).astype(int) + stream.shard_start(k)
        for a, b in itertools.pairwise(offsets):
            ids = stream.read(int(a), int(b))[0].tolist()
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids[1:-1])
            found.append(tokenizer.decode(ids))
    return found


def digests(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


# --- broken input: what is dropped, by which name, and what is kept

GOOD = {"id": "good", "text": "good"}

ROWS = {
    "null": ({"text": None}, {"null": 1}, []),
    "missing": ({"other": "x"}, {"null": 1}, []),
    "number": ({"text": 5}, {"not_text": 1}, []),
    "list": ({"text": ["a"]}, {"not_text": 1}, []),
    "empty": ({"text": ""}, {"empty": 1}, []),
    "whitespace": ({"text": " \n\t\u00a0"}, {"empty": 1}, []),
    "half_a_surrogate_pair": (b'{"text": "a\\ud800b"}\n', {"invalid_utf8": 1}, []),
    "invalid_utf8": (b'{"text": "a\xff\xfeb"}\n', {"invalid_utf8": 1}, []),
    "duplicate_id": ({"id": "good", "text": "again"}, {"duplicate_id": 1}, []),
    "null_id": ({"id": None, "text": "no id"}, {}, ["no id"]),
    "nested_id": ({"id": ["x"], "text": "odd id"}, {}, ["odd id"]),
    "control_tokens": ({"text": "<s> a </s> <unk>"}, {}, ["<s> a </s> <unk>"]),
    "nul_and_separators": ({"text": "a\x00b\r\n\u2028c\u2581d"}, {}, ["a\x00b\r\n\u2028c\u2581d"]),
    "untrimmed": ({"text": "  a  \n\n"}, {}, ["  a  \n\n"]),
    "blank_line": (b"\n", {}, []),
    "byte_order_mark": (b'\xef\xbb\xbf{"text": "marked"}\n', {}, ["marked"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_broken_rows_have_their_stated_outcome(tmp_path: Path, model: Path, name: str) -> None:
    row, dropped, kept = ROWS[name]
    write_jsonl(tmp_path / "a.jsonl", [GOOD, row, {"text": "last"}])
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text", "id": "id"}))
    manifest = run(one)
    assert manifest["dropped"] == dropped
    assert manifest["rows"] == 3 - (name == "blank_line")
    assert texts(one) == ["good", *kept, "last"]


@pytest.mark.parametrize(
    "line", [b'{"text": "cut\n', b"[1, 2]\n", b"nonsense\n", b'{"text": "a"} {"text": "b"}\n']
)
def test_corrupt_lines_stop_or_are_counted(tmp_path: Path, model: Path, line: bytes) -> None:
    write_jsonl(tmp_path / "a.jsonl", [GOOD, line, {"text": "last"}])
    file = source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text"})
    where = len(json.dumps(GOOD)) + 1
    with pytest.raises(
        CorruptInput, match=rf"a\.jsonl:2 \(byte {where}\): this line is no JSON object; .*--skip-corrupt"
    ):
        run(job(tmp_path, model, file))
    one = job(tmp_path, model, file, skip_corrupt=True, root=tmp_path / "other")
    assert run(one)["dropped"] == {"corrupt_line": 1}
    assert texts(one) == ["good", "last"]


def compressed(rows: int, ending: str) -> bytes:
    content = b"".join(
        json.dumps({"text": f"row {i} {hashlib.sha256(bytes([i])).hexdigest()}"}).encode() + b"\n"
        for i in range(rows)
    )
    if ending == "gz":
        return gzip.compress(content, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_files_are_read(tmp_path: Path, model: Path, ending: str) -> None:
    (tmp_path / f"a.jsonl.{ending}").write_bytes(compressed(50, ending))
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", f"*.jsonl.{ending}", {"text": "text"}))
    assert run(one)["documents"] == 50


@pytest.mark.parametrize(
    ("ending", "damage"), [("gz", "cut"), ("gz", "changed"), ("zst", "cut"), ("gz", "no gzip")]
)
def test_corrupt_compressed_files_stop_or_are_counted(
    tmp_path: Path, model: Path, ending: str, damage: str
) -> None:
    whole = compressed(200, ending)
    damaged = {
        "cut": whole[: len(whole) // 2],
        "changed": whole[:-6] + b"xxxxxx",
        "no gzip": b"plain text\n",
    }[damage]
    (tmp_path / f"a.jsonl.{ending}").write_bytes(damaged)
    (tmp_path / f"b.jsonl.{ending}").write_bytes(compressed(3, ending))
    file = source_file(tmp_path, "jsonl", f"*.jsonl.{ending}", {"text": "text"})
    with pytest.raises(
        CorruptInput, match=rf"a\.jsonl\.{ending}:\d+ \(byte \d+\): the file is damaged or cut off here"
    ):
        run(job(tmp_path, model, file))
    one = job(tmp_path, model, file, skip_corrupt=True, root=tmp_path / "other")
    manifest = run(one)
    assert manifest["dropped"] == {"corrupt_file": 1}
    assert texts(one)[-3:] == [
        json.loads(line)["text"] for line in gzip.decompress(compressed(3, "gz")).splitlines()
    ]


def test_parquet_files(tmp_path: Path, model: Path) -> None:
    rows = [f"row {i}" for i in range(600)] + [None]
    pq.write_table(pa.table({"body": rows, "more": list(range(601))}), tmp_path / "a.parquet")
    one = job(tmp_path, model, source_file(tmp_path, "parquet", "a.parquet", {"text": "body"}))
    assert run(one)["dropped"] == {"null": 1}
    assert texts(one) == rows[:-1]


def test_a_wrong_parquet_column_is_named_with_those_that_are_there(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "more": [1]}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a\.parquet has no column text; it has body, more; correct `columns` in .*a_source"
    ):
        run(job(tmp_path, model, source_file(tmp_path, "parquet", "a.parquet", {"text": "text"})))


def test_invalid_utf8_in_parquet_drops_the_row_only(tmp_path: Path, model: Path) -> None:
    raw = pa.array([b"good", b"a\xff", b"also good"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    one = job(tmp_path, model, source_file(tmp_path, "parquet", "a.parquet", {"text": "text"}))
    assert run(one)["dropped"] == {"invalid_utf8": 1}
    assert texts(one) == ["good", "also good"]


def test_corrupt_parquet_stops_or_is_counted(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * 100] * 1000}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    file = source_file(tmp_path, "parquet", "a.parquet", {"text": "text"})
    with pytest.raises(CorruptInput, match=r"a\.parquet row 0 \(.*\): the file is damaged or cut off here"):
        run(job(tmp_path, model, file))
    assert run(job(tmp_path, model, file, skip_corrupt=True, root=tmp_path / "b"))["dropped"] == {
        "corrupt_file": 1
    }


def test_text_folders(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "b.txt").write_bytes(b"bad \xff")
    (folder / "c.txt").write_text("")
    (folder.parent / "d.md").write_text("last")
    one = job(tmp_path, model, source_file(tmp_path, "text", "texts"))
    assert run(one)["dropped"] == {"empty": 1, "invalid_utf8": 1}
    assert sorted(texts(one)) == ["first", "last"]


def test_a_column_that_no_row_has_is_refused(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}, {"body": "y"}])
    with pytest.raises(ShardError, match=r"all 2 rows lack the text; correct `columns` in"):
        run(job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text"})))


def test_an_empty_file_gives_nothing(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    manifest = run(job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text"})))
    assert (manifest["rows"], manifest["documents"], manifest["shards"]) == (0, 0, [])


def test_over_long_texts_are_cut_at_line_ends(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(f"line {i}" for i in range(300))
    monkeypatch.setattr(prepare_module, "chunks", lambda text: chunks(text, limit=500))
    write_jsonl(tmp_path / "a.jsonl", [{"text": text}, GOOD])
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text"}))
    assert run(one)["altered"] == {"chunked": 1}
    *pieces, good = texts(one)
    assert ("".join(pieces), good) == (text, "good")
    assert all(piece.endswith("\n") and len(piece) <= 500 for piece in pieces[:-1])
    assert list(chunks("x" * 25, limit=10)) == ["x" * 10, "x" * 10, "x" * 5]


# --- conversations


def test_conversations_and_pairs(tmp_path: Path, model: Path) -> None:
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}
    system = {"role": "system", "content": "be brief"}
    rows: list[Any] = [
        [system, question, answer],
        [question, answer, question],  # the open question is left off
        [{**system, "content": " "}, question, answer],  # an empty system message says nothing
        [question, {**answer, "content": ""}],
        [question, {**answer, "content": None}],
        [answer, question],
        [question],
        "text",
        None,
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": row} for row in rows])
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"messages": "messages"}))
    manifest = run(one)
    assert manifest["dropped"] == {"bad_conversation": 2, "empty": 1, "not_text": 1, "null": 2}
    stream, tokenizer = TokenStream(one.directory / "train"), Tokenizer(model)
    ids, _, mask = stream.read(0, stream.tokens)
    expected = [encode_conversation(tokenizer, row) for row in (rows[0], rows[0][1:], rows[0][1:])]
    assert ids.tolist() == [i for tokens, _ in expected for i in tokens]
    assert mask is not None
    assert mask.tolist() == [m for _, masks in expected for m in masks]


def test_pairs_with_a_system_column(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"i": "q", "o": "a", "s": "be brief"}, {"i": "q", "o": "a"}])
    columns = {"prompt": "i", "response": "o", "system": "s"}
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", columns))
    assert run(one)["documents"] == 2
    assert [text.count("<|system|>") for text in texts_of_chat(one)] == [1, 0]


def texts_of_chat(one: Job) -> list[str]:
    stream, tokenizer = TokenStream(one.directory / "train"), Tokenizer(one.tokenizer)
    offsets = stream.document_offsets(0).astype(int)
    return [tokenizer.decode(stream.read(int(a), int(b))[0]) for a, b in itertools.pairwise(offsets)]


def test_over_long_conversations_are_cut_at_a_turn_or_dropped(tmp_path: Path, model: Path) -> None:
    def talk(*answers: str) -> dict[str, Any]:
        return {
            "messages": [
                m
                for a in answers
                for m in ({"role": "user", "content": "q"}, {"role": "assistant", "content": a})
            ]
        }

    write_jsonl(tmp_path / "a.jsonl", [talk("one", "two"), talk("one", "x" * 500), talk("x" * 500)])
    file = source_file(tmp_path, "jsonl", "a.jsonl", {"messages": "messages"})
    one = job(tmp_path, model, file, max_tokens=200)
    manifest = run(one)
    assert (manifest["altered"], manifest["dropped"]) == ({"cut_at_turn": 1}, {"too_long": 1})
    assert [text.count("<|user|>") for text in texts_of_chat(one)] == [2, 1]


# --- held out, decontaminated


def test_held_out_documents_are_chosen_by_their_text(tmp_path: Path, model: Path) -> None:
    rows = [{"text": f"document {i % 150}"} for i in range(300)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    one = job(tmp_path, model, source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text"}), held_out=0.2)
    run(one)
    train, held_out = texts(one), texts(one, "validation")
    assert 20 < len(held_out) < 100
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(row["text"] for row in rows)


def test_contaminated_documents_are_removed_counted_and_listed(tmp_path: Path, model: Path) -> None:
    task = "Given a list of integers return the sum of the squares of those that are odd and positive"
    items = [Item(benchmark="tasks", name="t/1", signature=None, pieces=(("prompt", task),))]
    index = tmp_path / "index.safetensors"
    Decontaminator.from_items(items).save(index)
    write_jsonl(tmp_path / "a.jsonl", [GOOD, {"id": "bad", "text": f"Exercise. {task}!"}, {"text": "last"}])
    file = source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text", "id": "id"})
    one = job(tmp_path, model, file, index=index)
    assert run(one)["dropped"] == {"contaminated": 1}
    assert texts(one) == ["good", "last"]
    [line] = (one.directory / "contamination.jsonl").read_text().splitlines()
    assert json.loads(line)["document"] == "bad"
    report = json.loads((one.directory / "contamination.json").read_text())
    assert report["items"]["tasks"]["t/1"]["documents"] == 1
    assert report["sources"]["a_source"]["removed"] == 1


# --- interruption, processes, array tasks


def many_files(folder: Path, files: int = 4, rows: int = 1200) -> Path:
    rng = np.random.default_rng(0)
    for k in range(files):
        words = [" ".join(map(str, rng.integers(0, 1000, rng.integers(1, 200)))) for _ in range(rows)]
        write_jsonl(folder / f"{k}.jsonl", [{"id": f"{i}", "text": w} for i, w in enumerate(words)])
    return source_file(folder, "jsonl", "*.jsonl", {"text": "text", "id": "id"})


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_files(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def uninterrupted(raw: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    one = job(tmp_path_factory.mktemp("whole"), model, raw, shard_tokens=10_000, held_out=0.05)
    manifest = run(one)
    assert len(manifest["shards"]) > 15
    return digests(one.directory)


def test_processes_and_array_tasks_give_the_same_bytes(
    raw: Path, model: Path, tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    one = job(tmp_path, model, raw, shard_tokens=10_000, held_out=0.05)
    prepare_units(one, shard=1, shards=3, workers=2)
    with pytest.raises(ShardError, match=r"3 of 4 units are not prepared: 0 \(0\.jsonl\), 2 \(2\.jsonl\), 3"):
        merge(one)
    for shard in (2, 0):
        prepare_units(one, shard=shard, shards=3)
    merge(one)
    assert digests(one.directory) == uninterrupted


def test_killed_three_times_it_gives_the_same_bytes(
    raw: Path, model: Path, tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    kill_and_finish(raw, model, tmp_path / "out", ["shard_tokens=10000", "held_out=0.05"], parts_between=4)
    assert digests(tmp_path / "out" / "a_source") == uninterrupted


@pytest.mark.slow
def test_seventy_megabytes_killed_three_times_give_the_same_bytes(tmp_path: Path, model: Path) -> None:
    """Real text: the sources of installed packages from the registry."""
    site = Path(np.__file__).parents[1]
    file = source_file(tmp_path, "text", f"{site}/[st]*/**/*.py")
    options = ["shard_tokens=1000000", "held_out=0.01", "workers=2"]
    kill_and_finish(file, model, tmp_path / "killed", options, parts_between=6)
    plain = job(tmp_path, model, file, shard_tokens=1_000_000, held_out=0.01, root=tmp_path / "whole")
    manifest = run(plain)
    assert manifest["text_bytes"] > 50e6
    assert digests(tmp_path / "killed" / "a_source") == digests(plain.directory)


def kill_and_finish(source: Path, model: Path, out: Path, options: list[str], parts_between: int) -> None:
    """Prepare with the command, killed three times after some more parts each, then to the end."""
    command = [
        sys.executable,
        "-m",
        "data_mixtures",
        "prepare",
        f"source={source}",
        f"root={out}",
        f"tokenizer={model}",
    ]
    command += options
    records = out / "a_source" / "work"

    def written() -> int:
        return len(list(records.glob("unit-*.json")))

    for _ in range(3):
        before = written()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            while written() < before + parts_between:
                assert process.poll() is None, "it finished before it could be killed"
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tokens in" in finished.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "complete; nothing to do" in again.stdout


def test_workers_end_with_a_killed_main_process(raw: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data_mixtures", "prepare", f"source={raw}", f"root={out}"]
    command += [f"tokenizer={model}", "shard_tokens=1000", "workers=2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(out.glob("a_source/work/unit-*.json")):
            assert process.poll() is None, "it finished before it could be killed"
            time.sleep(0.002)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid, signal.SIGKILL)
    assert len(children) >= 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "workers live on without their main process"
        time.sleep(0.01)


def test_duplicates_are_found_across_a_restart(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 1)
    rows = [{"id": i % 3, "text": f"text {i}"} for i in range(9)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    one = job(
        tmp_path,
        model,
        source_file(tmp_path, "jsonl", "a.jsonl", {"text": "text", "id": "id"}),
        shard_tokens=1,
    )
    prepare_units(one)
    for record in sorted(one.work.glob("unit-*.json"))[1:]:  # as if killed after the first part
        record.unlink()
    assert run(one)["dropped"] == {"duplicate_id": 6}
    assert texts(one) == ["text 0", "text 1", "text 2"]


def test_other_settings_are_refused_by_name(tmp_path: Path, model: Path, raw: Path) -> None:
    run(job(tmp_path, model, raw))
    with pytest.raises(
        SettingsChanged, match=r"held_out: 0\.0 → 0\.5; shard_tokens: 134217728 → 7\. Use the same"
    ):
        prepare_units_checked(job(tmp_path, model, raw, held_out=0.5, shard_tokens=7))
    begun = job(tmp_path, model, raw, root=tmp_path / "begun")
    prepare_units(begun, shard=0, shards=4)
    with pytest.raises(SettingsChanged, match=r"skip_corrupt: false → true"):
        prepare_units(job(tmp_path, model, raw, root=tmp_path / "begun", skip_corrupt=True))


def prepare_units_checked(one: Job) -> None:
    from data_mixtures.merge import is_prepared

    assert not is_prepared(one)


def test_merge_names_damaged_shards(tmp_path: Path, model: Path, raw: Path) -> None:
    one = job(tmp_path, model, raw)
    prepare_units(one)
    damaged = one.directory / "train" / "shard-00003-000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(
        ShardError, match=r"shard-00003-000\.bin: SHA-256 is .* is recorded; remove the records"
    ):
        merge(one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 1.0}, r"held_out is 1\.0; it must be at least 0 and below 1"),
        ({"shard_tokens": 0}, "shard_tokens is 0; it must be at least 1"),
    ],
)
def test_impossible_jobs_are_refused(
    tmp_path: Path, model: Path, raw: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        job(tmp_path, model, raw, **changes)


def test_impossible_shards_are_refused(tmp_path: Path, model: Path, raw: Path) -> None:
    for shard, shards, workers in ((3, 3, 1), (-1, 2, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match=rf"shard is {shard}/{shards} with {workers} workers"):
            prepare_units(job(tmp_path, model, raw), shard, shards, workers)


# --- hub data sets, by a folder of the same layout


def test_hub_data_sets_are_read_file_by_file(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for k in range(3):
        rows = [f"file {k} row {i}" for i in range(20)]
        pq.write_table(pa.table({"content": rows, "x": [0] * 20}), folder / f"train-{k:05d}-of-00003.parquet")
    one = job(tmp_path, model, source_file(tmp_path, "hub", str(tmp_path / "hub"), {"text": "content"}))
    assert len(one.units) == 3
    run(one)
    assert texts(one) == [f"file {k} row {i}" for k in range(3) for i in range(20)]
    wrong = job(
        tmp_path,
        model,
        source_file(tmp_path, "hub", str(tmp_path / "hub"), {"text": "text"}),
        root=tmp_path / "w",
    )
    with pytest.raises(ValueError, match=r"has no column text; it has content, x"):
        run(wrong)


def test_an_unpinned_hub_data_set_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ValueError, match="has revision null"):
        prepare_units(job(tmp_path, model, source_file(tmp_path, "hub", "owner/name", {"text": "content"})))


# --- the commands


def test_the_commands_prepare_verify_and_pack(
    tmp_path: Path, model: Path, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "out"
    given = [f"source={raw}", f"root={root}", f"tokenizer={model}", "held_out=0.1"]
    assert main(["prepare", *given, "shard=0/2"]) == 0
    assert main(["merge", *given]) == 2
    assert main(["prepare", *given, "shard=1/2"]) == 0
    assert main(["merge", *given]) == 0
    assert (root / "tokenizer.model").read_bytes() == model.read_bytes()
    assert main(["verify", f"root={root}"]) == 0
    assert main(["pack", f"root={root}", "source=a_source", "seq_len=64"]) == 0
    printed = capsys.readouterr()
    assert "of 4,800 rows: left out none; altered none" in printed.out
    assert "is not decontaminated" in printed.err
    assert "sequences of 64" in printed.out
    damaged = root / "a_source" / "validation" / "shard-00001-000.docs"
    damaged.write_bytes(damaged.read_bytes() + b"x")
    assert main(["verify", f"root={root}"]) == 1
    assert f"{damaged}: " in capsys.readouterr().out


def test_verify_checks_counts_too(
    tmp_path: Path, model: Path, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = job(tmp_path, model, raw)
    run(one)
    path = one.directory / "train" / "manifest.json"
    manifest = read_manifest(path.parent)
    manifest["shards"][2]["documents"] += 1
    path.write_text(json.dumps(manifest))
    assert main(["verify", f"root={one.root}"]) == 1
    printed = capsys.readouterr().out
    assert "shard-00002-000 has documents 1201, its files have 1200" in printed
    assert "documents is 4800, its shards add up to 4801" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare"], "missing source=; see `prepare --help`"),
        (["prepare", "source=nope"], "unknown source 'nope'"),
        (["prepare", "source={raw}", "shard=1"], "shard=1 must be i/n"),
        (["prepare", "source={raw}", "held_out=much"], "held_out=much is no number"),
        (["prepare", "source={raw}", "workers=1.5"], "workers=1.5 is no whole number"),
        (["prepare", "source={raw}", "tokenizer=/nowhere.model"], "/nowhere.model"),
        (["verify", "root=/nowhere"], "/nowhere holds no prepared source"),
        (["benchmarks", "files=/nowhere/*"], "matches no file"),
    ],
)
def test_mistakes_end_with_code_2_and_one_line(
    tmp_path: Path, raw: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(raw=raw) for argument in arguments]
    if arguments[0] == "prepare":
        filled.append(f"root={tmp_path / 'out'}")
    assert main(filled) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error


def test_another_tokenizer_beside_the_sources_is_refused(
    tmp_path: Path, model: Path, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.model").write_bytes(model.read_bytes() + b"\n\x00")
    other = tmp_path / "other.model"
    other.write_bytes(model.read_bytes())
    assert main(["prepare", f"source={raw}", f"root={tmp_path / 'out'}", f"tokenizer={other}"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_the_identity_command_writes_conversations(tmp_path: Path) -> None:
    out = tmp_path / "identity.jsonl"
    assert main(["identity", f"out={out}", "count=50"]) == 0
    lines = out.read_text().splitlines()
    assert len({*lines}) == 50
    assert all(json.loads(line)["messages"][-1]["role"] == "assistant" for line in lines)
