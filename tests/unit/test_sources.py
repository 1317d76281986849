"""The catalogue and the strict reading of source files."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_mixtures.recipe import load_recipe
from data_mixtures.sources import SourceError, catalogue, left_out, load_source
from data_mixtures.strict_yaml import read_mapping

MINIMAL = "kind: text\npath: notes\ncategory: general\nlicence: mine\n"


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_catalogue_is_complete() -> None:
    """Every source of the recipes, with terms and size; hub sources wait to be pinned by the user."""
    sources = catalogue()
    for recipe in ("nemotron_phase1", "nemotron_phase2", "sft_210m"):
        assert set(load_recipe(recipe).weights) <= set(sources)
    hub = [source for source in sources.values() if source.kind == "hub"]
    assert len(hub) == 42
    for source in hub:
        assert source.path.count("/") == 1
        assert source.expected_tokens
        assert source.licence
        assert source.access or not source.gated
        with pytest.raises(SourceError, match=rf"{source.name}.*revision null.*{source.path}/commits"):
            source.pinned_revision()


def test_the_columns_that_differ() -> None:
    assert load_source("code_v2_review").columns["text"] == "content"
    assert load_source("opc_package").format == "instruction"
    assert load_source("post_training_chat").format == "messages"
    assert load_source("post_training_math").split == "math"
    assert load_source("legal").configs[0].endswith("CaseHOLD")  # the summaries: the two names are swapped


def test_what_is_left_out_has_a_reason_and_is_in_no_source() -> None:
    entries = {(entry.path, entry.config): entry.reason for entry in left_out()}
    assert (
        "case_hold"
        in entries["nvidia/Nemotron-Pretraining-Legal-v1", "Nemotron-Pretraining-Legal-Case-Law-Summary"]
    )
    assert all(len(reason) > 20 for reason in entries.values())
    used = {(source.path, config) for source in catalogue().values() for config in source.configs}
    assert not used & entries.keys()


def test_one_file_is_one_source_of_the_user(tmp_path: Path) -> None:
    """Named after the file; a relative path is relative to the file; found by path and by name."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl.zst").touch()
    file = write(
        tmp_path,
        "kind: jsonl\npath: data\ncategory: code\nlicence: ours\n"
        "columns: {text: body, id: key}\nexpected_tokens: 1_000\n",
    )
    source = load_source(file)
    assert (source.name, source.category, source.expected_tokens) == ("mine", "code", 1000)
    assert source.columns == {"text": "body", "id": "key"}
    assert source.files() == [tmp_path / "data" / "a.jsonl.zst"]
    assert load_source("mine", tmp_path) == source
    assert load_source(str(file)) == source


def test_parts_share_and_override(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    file = write(
        tmp_path,
        f"kind: hub\npath: me/set\nrevision: '{revision}'\nlicence: MIT\ncategory: code\ncolumns: {{text: text}}\n"
        "sources:\n  one: {config: A}\n  two: {config: [B, C], category: general, split: extra}\n"
        "left_out:\n  D: it is empty\n",
    )
    one, two = catalogue(tmp_path).values()
    assert (one.configs, one.category, one.split, one.pinned_revision()) == (
        ("A",),
        "code",
        "train",
        revision,
    )
    assert (two.configs, two.category, two.split) == (("B", "C"), "general", "extra")
    assert [(entry.path, entry.config, entry.reason) for entry in left_out(tmp_path)] == [
        ("me/set", "D", "it is empty")
    ]
    with pytest.raises(SourceError, match="holds 2 sources"):
        load_source(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "colums: {}\n", "colums: unknown key; did you mean columns"),
        (MINIMAL + "gated: 'yes'\n", "gated: must be true or false, got 'yes'"),
        (MINIMAL + "expected_tokens: 4e9\n", "expected_tokens: must be a whole number"),
        (MINIMAL + "expected_tokens: true\n", "expected_tokens: must be a whole number"),
        (MINIMAL + "expected_tokens: 0\n", "expected_tokens: must be positive, got 0"),
        (MINIMAL + "columns: {text: a}\n", "columns: a text source has none"),
        (MINIMAL + "revision: abc\n", "revision: only a hub source has one"),
        (MINIMAL + "config: a\n", "config: only a hub source has one"),
        (MINIMAL.replace("general", "genral"), "category: must be one of general, code"),
        (MINIMAL.replace("text", "csv"), "kind: must be one of hub, parquet"),
        (MINIMAL.replace("text", "parquet"), "columns: must name text, or prompt and response"),
        (MINIMAL.replace("text", "jsonl") + "columns: {text: a, prompt: b}\n", "columns: must name text"),
        (MINIMAL.replace("text", "jsonl") + "columns: {prompt: b}\n", "columns: must name text"),
        (MINIMAL.replace("mine", "''"), "licence: must be the licence's name"),
        ("kind: text\npath: x\n", "category: missing"),
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("a: [1\n", "mine.yaml"),
        (MINIMAL + "path: again\n", "duplicate key 'path' on lines 2 and 5"),
        (MINIMAL + "sources: [a]\n", "sources: must be a mapping"),
        (MINIMAL + "sources: {a: 3}\n", "sources.a: must be a mapping"),
        (MINIMAL + "sources: {Big Name: {}}\n", "name: use lower-case letters"),
        (MINIMAL + "left_out: {a: 3}\n", "left_out.a: must say the reason"),
        (
            "kind: hub\npath: a/b\ncategory: code\nlicence: x\ncolumns: {text: t}\nrevision: main\n",
            "revision: must be a full commit hash .*got 'main'",
        ),
        (
            "kind: hub\npath: a/b\ncategory: code\nlicence: x\ncolumns: {text: t}\nconfig: [3]\n",
            "quote a number",
        ),
    ],
)
def test_mistakes_are_named_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as error:
        load_source(write(tmp_path, text))
    assert "mine.yaml" in str(error.value)


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    write(tmp_path, "kind: csv\npath: x\nlicense: y\nsources:\n  a: {category: code}\n  b: {category: 3}\n")
    with pytest.raises(SourceError) as error:
        catalogue(tmp_path)
    text = str(error.value)
    assert text.count("license: unknown key; did you mean licence?") == 2
    assert text.count("licence: missing") == 2
    assert "b: category: must be one of" in text


def test_unknown_and_doubled_names(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"unknown source 'cc_cod'; did you mean cc_code"):
        load_source("cc_cod")
    write(tmp_path, MINIMAL + "sources: {same: {}}\n", "a.yaml")
    write(tmp_path, MINIMAL + "sources: {same: {}}\n", "b.yaml")
    with pytest.raises(SourceError, match=r"'same' is in .*a\.yaml and in .*b\.yaml"):
        catalogue(tmp_path)
    with pytest.raises(SourceError, match=r"gone\.yaml: cannot be read"):
        load_source(tmp_path / "gone.yaml")


def test_files_of_local_sources(tmp_path: Path) -> None:
    """Folder, glob and single file; hidden files, other endings and the YAML file itself are no data."""
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("b.md", "deep/a.txt", ".hidden", ".git/config", "c.jsonl", "d.jsonl.gz"):
        (folder / name).touch()
    (folder / "loop").symlink_to(folder)

    def names(kind: str, path: str) -> list[str]:
        columns = "" if kind == "text" else "columns: {text: text}\n"
        file = write(folder, f"kind: {kind}\npath: {path}\ncategory: code\nlicence: x\n{columns}")
        return [found.relative_to(folder).as_posix() for found in load_source(file).files()]

    assert names("text", ".") == ["b.md", "c.jsonl", "d.jsonl.gz", "deep/a.txt"]
    assert names("text", "'**/*.txt'") == ["deep/a.txt"]
    assert names("jsonl", ".") == ["c.jsonl", "d.jsonl.gz"]
    assert names("jsonl", "c.jsonl") == ["c.jsonl"]
    assert names("jsonl", "'*.md'") == ["b.md"]
    for path in ("missing", "'*.parquet'", "deep/a"):
        with pytest.raises(SourceError, match="no jsonl files at"):
            names("jsonl", path)
    with pytest.raises(SourceError, match="is a hub data set"):
        load_source("pes2o").files()


def test_duplicate_keys_at_any_depth(tmp_path: Path) -> None:
    assert read_mapping(write(tmp_path, "a: {b: 1, c: 2}\nd: &x {e: 1}\nf: {<<: *x, g: 3}\n"))["f"] == {
        "e": 1,
        "g": 3,
    }
    with pytest.raises(ValueError, match=r"mine\.yaml: duplicate key 'b' on lines 2 and 4"):
        read_mapping(write(tmp_path, "a:\n  b: 1\n  c: 2\n  b: 3\n"))
    with pytest.raises(ValueError, match="unhashable key"):
        read_mapping(write(tmp_path, "? [1, 2]\n: 3\n"))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ValueError, match=r"latin\.yaml: is not UTF-8"):
        read_mapping(tmp_path / "latin.yaml")
