"""Text to token ids and back for a checkpoint's SentencePiece model, and text that is shown while it grows.

Ids are those of the tokenizer that prepared the training data: text never becomes a control token, and a literal
U+2581, which SentencePiece would read as a space, is spelled with its three byte pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

if TYPE_CHECKING:
    from model.decode import Decode

SPACE = "\u2581"  # what SentencePiece writes for a space inside a piece
REPLACEMENT = "\ufffd"  # what bytes that are no character read as
_Model: Any = vars(sentencepiece_model_pb2)["ModelProto"]  # made at import, so type checkers don't see it


class Tokenizer:
    """A SentencePiece model file.

    Attributes: `vocab_size`; `bos_id` and `eos_id`, None where the model has none; `control`, the id of each
    control token by how it is written. Raises ValueError for a file that is no SentencePiece model.
    """

    def __init__(self, file: Path):
        self._model = file.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model)
        except RuntimeError as error:
            raise ValueError(f"{file} is not a SentencePiece model: {error}") from None
        self.vocab_size: int = self._processor.vocab_size()
        ids = range(self.vocab_size)
        self.control = {self._processor.id_to_piece(i): i for i in ids if self._processor.is_control(i)}
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without control tokens. Raises ValueError for lone surrogates."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}"
            ) from None
        first, *rest = text.split(SPACE)
        ids: list[int] = self._processor.encode(first)
        if not rest:
            return ids
        if not first:
            ids = self._prefix_ids
        spelled = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        return ids + [i for part in rest for i in (*spelled, *self._continuation.encode(part))]

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that a document begins with: BOS before it."""
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text)]

    def reader(self, prompt: Sequence[int]) -> Decode:
        """A function from the ids generated after `prompt` to the text that they add.

        Ids beyond the vocabulary, which a model with spare embedding rows may draw, read as nothing.
        """
        # The space that some models begin a text with is dropped when reading, so new ids are read after the last.
        last = [i for i in prompt[-1:] if i < self.vocab_size]
        before = len(self._processor.decode(last))

        def decode(ids: list[int]) -> str:
            known = [i for i in ids if i < self.vocab_size]
            return self._processor.decode(last + known)[before:]

        return decode

    @cached_property
    def _continuation(self) -> sentencepiece.SentencePieceProcessor:
        """Encodes what does not begin a text, so without the space that some models put there."""
        model = _Model.FromString(self._model)
        model.normalizer_spec.add_dummy_prefix = False
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model.SerializeToString())
        return processor

    @property
    def _prefix_ids(self) -> list[int]:
        """What an empty beginning is encoded as: the space that some models put there."""
        adds_space = _Model.FromString(self._model).normalizer_spec.add_dummy_prefix
        return [self._processor.piece_to_id(SPACE)] if adds_space else []


class TextStream:
    """Cuts a growing text into the parts to show: whole characters only, and nothing that may still turn out to be
    the beginning of a stop string."""

    def __init__(self, stops: Sequence[str] = ()):
        self._stops = stops
        self._shown = 0

    def push(self, text: str) -> str:
        """What can be shown now, of all the text so far."""
        # A character has at most four bytes; until the last is there, the others read as one replacement each.
        end = max(len(text.rstrip(REPLACEMENT)), len(text) - 3)
        return self._show(text, end - self._held(text, end))

    def finish(self, text: str) -> str:
        """The rest of the final text."""
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        part = text[self._shown : end]
        self._shown += len(part)
        return part

    def _held(self, text: str, end: int) -> int:
        """Length of the longest beginning of a stop string that text[:end] ends with."""
        longest = min(max(map(len, self._stops), default=1) - 1, end - self._shown)
        for length in range(longest, 0, -1):
            tail = text[end - length : end]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
