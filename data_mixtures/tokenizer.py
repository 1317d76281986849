"""Text to token ids and back, with SentencePiece.

The wrapper exists for three guarantees the library alone does not give:

* `decode(encode(text)) == text` for every string. SentencePiece writes a space as U+2581, so a literal U+2581
  in the text would come back as a space; here it is spelled with its three byte pieces instead.
* The text of a control token (`<s>`, `</s>`) inside a document stays text. SentencePiece never turns it into
  the control token; the `tokenizer.json` of other libraries does.
* `bytes_per_token` says how many UTF-8 bytes each id stands for, so that bits per byte need no decoding.

It reads any byte-fallback model without normalisation: ours, and Llama 2's (which puts a space before each
text).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

SPACE = "\u2581"  # what SentencePiece writes for a space inside a piece
PIECE_LIMIT = 2000  # characters in one training line; the trainer skips lines above 4192 bytes


class Tokenizer:
    """A SentencePiece model file.

    Attributes: `path`, `sha256` (of the file), `vocab_size`, `bos_id`, `eos_id`, `pad_id` (-1 when the model
    has none), `adds_prefix_space` (Llama 2 style).

    Raises FileNotFoundError when there is no such file, ValueError when it is no usable model.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        model = self.path.read_bytes()
        self.sha256 = hashlib.sha256(model).hexdigest()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{self.path} is not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        self._bytes_V = self._count_bytes()
        self._byte_ids = self._find_byte_ids()
        self.adds_prefix_space: bool = self._processor.id_to_piece(self._processor.encode("a")[0])[0] == SPACE

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of `text`, with the control ids asked for around it. Raises ValueError on lone surrogates."""
        return self._wrap(self.encode_batch([text])[0], bos, eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without control ids, on the calling thread only (preparation uses processes)."""
        try:
            ids = self._processor.encode(list(texts), num_threads=1)
        except TypeError:
            for text in texts:
                _check_unicode(text)
            raise
        for i, text in enumerate(texts):
            if SPACE in text:
                ids[i] = self._encode_around_spaces(text)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens give nothing."""
        return self._processor.decode([int(i) for i in ids])

    def bytes_per_token(self) -> np.ndarray:
        """(V,) int64: UTF-8 bytes each id stands for, 0 for control tokens.

        Summed over the ids of a text it is the text's length in bytes (one more for a tokenizer that adds a
        space before each text).
        """
        return self._bytes_V

    @cached_property
    def newline_is_atomic(self) -> bool:
        """Whether no piece joins a newline to anything: then nothing merges across a newline."""
        pieces = (self._processor.id_to_piece(i) for i in range(self.vocab_size))
        return all(piece == "\n" or "\n" not in piece for piece in pieces)

    def _wrap(self, ids: list[int], bos: bool, eos: bool) -> list[int]:
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def _encode_around_spaces(self, text: str) -> list[int]:
        """Encode a text that contains U+2581 literally: the character as bytes, what lies between as text."""
        spelled = [self._byte_ids[byte] for byte in SPACE.encode()]
        first, *rest = text.split(SPACE)
        ids = self._processor.encode(first)
        if self.adds_prefix_space and not first:
            ids = [self._processor.piece_to_id(SPACE)]
        for part in rest:
            ids += spelled + self._encode_continuation(part)
        return ids

    def _encode_continuation(self, text: str) -> list[int]:
        """Ids of text that does not begin a document, so without the space that some models put in front."""
        if not self.adds_prefix_space or not text:
            return self._processor.encode(text)
        # Nothing merges with the byte 1 that is put in front, so all that follows it is the text itself.
        ids = self._processor.encode("\x01" + text)
        return ids[ids.index(self._byte_ids[1]) + 1 :]

    def _count_bytes(self) -> np.ndarray:
        processor = self._processor
        bytes_V = np.zeros(self.vocab_size, dtype=np.int64)
        for i in range(self.vocab_size):
            if processor.is_byte(i):
                bytes_V[i] = 1
            elif not (processor.is_control(i) or processor.is_unknown(i)):
                bytes_V[i] = len(processor.id_to_piece(i).replace(SPACE, " ").encode())
        return bytes_V

    def _find_byte_ids(self) -> list[int]:
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        missing = [byte for byte, i in enumerate(ids) if not self._processor.is_byte(i)]
        if missing:
            raise ValueError(
                f"{self.path} has no byte pieces (first missing: 0x{missing[0]:02X}), so some text would "
                "be lost; use a model trained with byte_fallback"
            )
        return ids


def train_tokenizer(texts: Iterable[str], path: str | Path, vocab_size: int = 4096) -> Tokenizer:
    """Train a BPE model on `texts` and write it to `path`, atomically. Deterministic.

    Ids: 0 unknown (never produced: there is byte fallback), 1 BOS, 2 EOS, 3-258 bytes, then pieces. Digits
    are single tokens and a newline is always a token of its own, as in Llama 2. No normalisation, no prefix
    space.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_training_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9999,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"{path}: a vocabulary of {vocab_size} cannot be learned from this text: {error}"
        ) from error
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(model.getvalue())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return Tokenizer(path)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode at character {error.start}: {error.reason}") from error


def _training_lines(texts: Iterable[str]) -> Iterable[str]:
    """Single lines, so that the model never learns a piece with a newline; short enough for the trainer."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), PIECE_LIMIT):
                yield line[start : start + PIECE_LIMIT].replace(SPACE, "").replace("\x00", "")
