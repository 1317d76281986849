"""Prepare the data of the smoke run: tokenizer and four sources, from what every Python installation has."""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data_mixtures import chat, identity, packing, shards, smoke_corpus, smoke_text, tokenizer
from data_mixtures.tokenizer import Tokenizer, train_tokenizer

VOCAB_SIZE = 4096
SEQ_LEN = 256  # what the chat source is packed for
VALIDATION_PERCENT = 4
TOKENIZER_SAMPLE = {
    "prose": 2_000_000,
    "code": 3_000_000,
    "reasoning": 500_000,
    "chat": 300_000,
}  # characters
BATCH = 64


@dataclass(frozen=True)
class Document:
    """One document before tokenisation. `key` decides the split: equal keys are never on both sides."""

    key: str
    text: str
    messages: list[chat.Message] | None = None


CATEGORIES = {"prose": "general", "code": "code", "reasoning": "math_reasoning", "chat": "chat"}
LICENCES = {"prose": "PSF-2.0", "code": "PSF-2.0", "reasoning": "Apache-2.0", "chat": "Apache-2.0"}


def prepare_smoke(root: Path) -> None:
    """Write tokenizer and sources under `root`, unless they are there, whole and made by this very code.

    Layout: tokenizer.model, chat_template.jinja, <source>/{train,validation}/.
    """
    fingerprint = _fingerprint()
    if _is_complete(root, fingerprint):
        print(f"{root} is complete and valid; nothing to do")
        return
    documents = {source: list(_documents(source)) for source in LICENCES}
    model = train_tokenizer(_sample(documents), root / "tokenizer.model", VOCAB_SIZE)
    shutil.copyfile(chat.JINJA_TEMPLATE, root / chat.JINJA_TEMPLATE.name)
    for source in documents:
        for split in ("train", "validation"):
            chosen = [d for d in documents[source] if is_held_out(d.key) == (split == "validation")]
            _write(root / source / split, source, split, chosen, model, fingerprint)
            if source == "chat":
                packing.pack_split(root / source / split, SEQ_LEN)


def is_held_out(key: str) -> bool:
    """Whether a document belongs to validation: by a hash of its key, so it never changes sides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 < VALIDATION_PERCENT


def _documents(source: str) -> Iterator[Document]:
    if source in ("prose", "code"):
        pairs = smoke_corpus.prose() if source == "prose" else smoke_corpus.code()
        yield from (Document(key, text) for key, text in pairs)
    elif source == "reasoning":
        yield from (Document(text, text) for text in dict.fromkeys(smoke_text.reasoning()))
    else:
        for messages in [*smoke_text.conversations(), *identity.identity_conversations()]:
            text = "\n".join(message["content"] for message in messages)
            yield Document(text, text, messages)


def _sample(documents: dict[str, list[Document]]) -> Iterator[str]:
    """Text to train the tokenizer on: the first of each source's training documents."""
    for source, limit in TOKENIZER_SAMPLE.items():
        size = 0
        for document in documents[source]:
            if size >= limit:
                break
            if not is_held_out(document.key):
                size += len(document.text)
                yield document.text
    yield from ["<|system|>", "<|user|>", "<|assistant|>"] * 1000  # so that the markers cost few tokens


def _write(
    directory: Path, source: str, split: str, documents: list[Document], model: Tokenizer, fingerprint: str
) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # an earlier or broken preparation
    directory.mkdir(parents=True)
    writer = shards.ShardWriter(directory, "shard-00000", shards.token_dtype(model.vocab_size))
    started = time.monotonic()
    for ids, mask, document in _encode(
        tqdm(documents, f"{source} {split}", unit=" docs", disable=None), model
    ):
        writer.add(ids, len(document.text.encode()), mask)
    shards.write_manifest(
        directory,
        source=source,
        split=split,
        origin={
            "name": f"smoke:{source}",
            "revision": f"Python {platform.python_version()}",
            "licence": LICENCES[source],
            "category": CATEGORIES[source],
            "fingerprint": fingerprint,
        },
        tokenizer_sha256=model.sha256,
        vocab_size=model.vocab_size,
        shards=[writer.close()],
        dropped={},
    )
    seconds = time.monotonic() - started
    print(
        f"{source} {split}: {writer.documents:,} documents, {writer.tokens:,} tokens, "
        f"{writer.tokens / seconds / 1e6:.2f}M tokens/s"
    )


def _encode(
    documents: Iterable[Document], model: Tokenizer
) -> Iterator[tuple[list[int], list[int] | None, Document]]:
    batch: list[Document] = []

    def flush() -> Iterator[tuple[list[int], list[int] | None, Document]]:
        encoded = model.encode_batch([document.text for document in batch])
        for ids, document in zip(encoded, batch, strict=True):
            yield [model.bos_id, *ids, model.eos_id], None, document
        batch.clear()

    for document in documents:
        if document.messages is not None:
            ids, mask = chat.encode_conversation(model, document.messages)
            yield ids, mask, document
            continue
        batch.append(document)
        if len(batch) == BATCH:
            yield from flush()
    yield from flush()


def _is_complete(root: Path, fingerprint: str) -> bool:
    model = root / "tokenizer.model"
    if not model.exists() or not (root / chat.JINJA_TEMPLATE.name).exists():
        return False
    sha256 = shards.file_sha256(model)
    for source in LICENCES:
        for split in ("train", "validation"):
            directory = root / source / split
            try:
                manifest = shards.read_manifest(directory)
            except shards.ShardError:
                return False
            if manifest["origin"].get("fingerprint") != fingerprint or manifest["tokenizer_sha256"] != sha256:
                return False
            problems = shards.verify_split(directory)
            if problems:
                print("preparing again: " + "; ".join(problems), file=sys.stderr)
                return False
            if source == "chat" and not (directory / f"packing-{SEQ_LEN}.json").exists():
                return False
    return True


def _fingerprint() -> str:
    """A hash of what the output depends on: the Python version, this code and the identity file."""
    digest = hashlib.sha256(platform.python_version().encode())
    for module in (
        sys.modules[__name__],
        chat,
        identity,
        packing,
        shards,
        smoke_corpus,
        smoke_text,
        tokenizer,
    ):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(identity.IDENTITY_FILE.read_bytes())
    return digest.hexdigest()
