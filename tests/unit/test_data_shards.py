from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures.sequences import IGNORE, SequenceReader, source_items
from data_mixtures.shards import (
    ShardError,
    ShardWriter,
    manifest_sha256,
    read_manifest,
    token_dtype,
    verify_split,
)
from data_mixtures.token_stream import TokenStream
from tests.unit.data_fixtures import random_documents, write_source

S = 16


def read_item(reader: SequenceReader, item: int, seq_len: int = S) -> tuple[list[int], list[int], list[int]]:
    rows = np.full((3, seq_len), -7, dtype=np.int64)
    reader.read(item, *rows)
    tokens, positions, labels = rows.tolist()
    return tokens, positions, labels


def test_every_window_of_the_stream_is_the_documents_joined(tmp_path: Path) -> None:
    documents = random_documents(50, seed=1)
    stream = TokenStream(write_source(tmp_path, "a", documents, per_shard=7))
    joined = [token for document in documents for token in document]
    begins = np.cumsum([0, *map(len, documents)])
    assert (stream.tokens, stream.documents) == (len(joined), 50)

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.tuples(st.integers(0, len(joined)), st.integers(0, len(joined))).map(sorted))
    def check(window: list[int]) -> None:
        start, stop = window
        tokens, starts, mask = stream.read(start, stop)
        assert tokens.tolist() == joined[start:stop]
        assert starts.tolist() == [b - start for b in begins if start <= b < stop]
        assert mask is None

    check()


def test_shards_are_opened_only_as_needed_and_closed_again(tmp_path: Path) -> None:
    documents = random_documents(40, seed=2)
    stream = TokenStream(write_source(tmp_path, "a", documents, per_shard=1), max_open=3)
    joined = [token for document in documents for token in document]
    for start in range(0, len(joined) - 5, 5):
        assert stream.read(start, start + 5)[0].tolist() == joined[start : start + 5]
    assert len(stream._open) == 3


def test_concat_sequences_have_positions_and_labels_per_document(tmp_path: Path) -> None:
    reader = SequenceReader(write_source(tmp_path, "a", [[1, 5, 6, 2], [1, 7, 2], [1, 8, 9, 10, 2]]), 4)
    x = IGNORE
    assert reader.items == 3
    assert read_item(reader, 0, 4) == ([1, 5, 6, 2], [0, 1, 2, 3], [5, 6, 2, x])
    assert read_item(reader, 1, 4) == ([1, 7, 2, 1], [0, 1, 2, 0], [7, 2, x, 8])
    assert read_item(reader, 2, 4) == ([8, 9, 10, 2], [0, 1, 2, 3], [9, 10, 2, x])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), per_shard=st.integers(1, 9), seq_len=st.integers(1, 40))
def test_concat_sequences_against_a_plain_computation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, per_shard: int, seq_len: int
) -> None:
    documents = random_documents(12, seed)
    reader = SequenceReader(
        write_source(tmp_path_factory.mktemp("s"), "a", documents, per_shard=per_shard), seq_len
    )
    stream = [(d, i, token) for d, document in enumerate(documents) for i, token in enumerate(document)]
    assert reader.items == len(stream) // seq_len
    for item in range(reader.items):
        window = stream[item * seq_len : (item + 1) * seq_len]
        following = [*stream[item * seq_len + 1 : (item + 1) * seq_len + 1], (-1, 0, 0)]
        first_of = {d: i for d, i, _ in reversed(window)}
        assert read_item(reader, item, seq_len) == (
            [token for _, _, token in window],
            [i - first_of[d] for d, i, _ in window],
            [n[2] if n[0] == w[0] else IGNORE for w, n in zip(window, following, strict=False)],
        )


def test_the_loss_mask_decides_which_labels_count(tmp_path: Path) -> None:
    directory = write_source(
        tmp_path, "a", [[1, 5, 6, 2], [1, 7, 8, 2]], masks=[[0, 0, 1, 1], [0, 0, 0, 1]], per_shard=1
    )
    reader = SequenceReader(directory, 8)
    x = IGNORE
    assert read_item(reader, 0, 8)[2] == [x, 6, 2, x, x, x, 2, x]


def test_manifest_counts_and_types(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", [[1, 9, 2], [1, 2]], per_shard=1)
    manifest = read_manifest(directory)
    assert (manifest["documents"], manifest["tokens"], manifest["text_bytes"]) == (2, 5, 15)
    assert manifest["dtype"] == "uint16"
    assert np.fromfile(directory / "shard-00000.bin", "<u2").tolist() == [1, 9, 2]
    assert np.fromfile(directory / "shard-00000.docs", "<u8").tolist() == [0, 3, 9]
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")
    assert source_items(directory, 2, "concat")[0] == 2
    assert verify_split(directory) == []
    assert not list(directory.glob("*.tmp"))


def test_manifest_hash_follows_content_and_order(tmp_path: Path) -> None:
    manifest = read_manifest(write_source(tmp_path, "a", random_documents(4, 0), per_shard=2))
    again = read_manifest(write_source(tmp_path, "b", random_documents(4, 0), per_shard=2))
    other = read_manifest(write_source(tmp_path, "c", random_documents(4, 1), per_shard=2))
    assert manifest_sha256(manifest) == manifest_sha256(again) != manifest_sha256(other)
    manifest["shards"].reverse()
    assert manifest_sha256(manifest) != manifest_sha256(again)


def test_damage_is_named_with_file_and_offset(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", random_documents(20, 3), per_shard=5)
    path = directory / "shard-00001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    with pytest.raises(
        ShardError, match=r"shard-00001\.bin is cut off: it ends at byte 10, the manifest says"
    ):
        TokenStream(directory).read(0, TokenStream(directory).tokens)
    path.write_bytes(whole + b"x")
    with pytest.raises(ShardError, match=r"shard-00001\.bin is too long"):
        TokenStream(directory).read(0, TokenStream(directory).tokens)
    path.write_bytes(b"\xff" + whole[1:])
    assert verify_split(directory) == [
        line for line in verify_split(directory) if "shard-00001.bin: SHA-256" in line
    ]
    assert len(verify_split(directory)) == 1
    path.unlink()
    assert verify_split(directory) == [f"{path}: missing"]
    with pytest.raises(ShardError, match=r"shard-00001\.bin cannot be opened"):
        TokenStream(directory).read(0, TokenStream(directory).tokens)


def test_a_file_cut_off_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", random_documents(20, 3))
    stream = TokenStream(directory)
    stream.read(0, 4)
    path = directory / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(
        ShardError, match=r"shard-00000\.bin was cut off: bytes 10 to 30 are wanted, it ends at byte 20"
    ):
        stream.read(5, 15)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; prepare the source first"),
        ("{", "is not valid JSON"),
        ("[]", "has format"),
        (json.dumps({"format": "laneformer-tokens", "version": 99}), "has format"),
    ],
)
def test_unusable_manifests_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ShardError, match=rf"manifest\.json.*{message}"):
        read_manifest(tmp_path)


def test_a_manifest_whose_total_is_wrong_is_refused(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", random_documents(3, 0))
    manifest = read_manifest(directory)
    manifest["tokens"] += 1
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match="its shards hold"):
        TokenStream(directory)


def test_documents_with_and_without_masks_do_not_mix(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "shard-00000", token_dtype(100))
    writer.add([1, 2], 0)
    with pytest.raises(ValueError, match="some documents have a loss mask and some have none"):
        writer.add([1, 2], 0, [0, 1])
    with pytest.raises(ValueError, match="a document of 2 tokens has a mask of 1"):
        ShardWriter(tmp_path, "shard-00001", token_dtype(100)).add([1, 2], 0, [1])


def test_reading_past_the_end_is_refused(tmp_path: Path) -> None:
    directory = write_source(tmp_path, "a", [[1, 5, 6, 2]])
    with pytest.raises(ShardError, match="tokens 2 to 5 asked for, it has 4"):
        TokenStream(directory).read(2, 5)
    with pytest.raises(IndexError, match="has 2 items, item 2 was asked for"):
        read_item(SequenceReader(directory, 2), 2, 2)
