"""The fast twin (`tokenizer.json`) of a SentencePiece model, and what `transformers` is told about it.

The twin gives the ids of `data_mixtures.tokenizer.Tokenizer`, with which the model was trained. Three things
differ from the usual conversion:

* Its vocabulary writes a space as a space, not as U+2581. So a literal U+2581 in a text is spelled with its three
  byte pieces, as in training, and decoding gives back the text that was encoded.
* Merges are ordered by the score of the piece that they make. Where several pairs make the same piece,
  SentencePiece takes the leftmost and a merge list can't; the pair with the longer left part comes first, which is
  what leftmost merging leads to in a run of one character.
* By default `<s>` and `</s>` inside a text become control tokens, which a rendered chat template needs. With
  `split_special_tokens=True` (or `encode_special_tokens` of the tokenizers library) they stay text, and only then
  are the ids of such a text those of SentencePiece, which never makes a control token of text.

Decoding is identical for the ids of any text. Byte pieces that together are no valid UTF-8, which a model may
generate, become U+FFFD one for one in a whole run, where SentencePiece saves the valid bytes of the run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

SPACE = "\u2581"  # what SentencePiece writes for a space inside a piece
_Model: Any = vars(sentencepiece_model_pb2)["ModelProto"]  # made at import, so type checkers don't see it
_Piece = _Model.SentencePiece


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model, reduced to what its twin needs."""

    tokens: list[str]
    """By id, with a space as a space."""
    scores: dict[str, float]
    """Of the pieces that merging can make."""
    control: list[str]
    unknown: str
    bos: str
    eos: str
    pad: str | None
    adds_prefix_space: bool


def read_pieces(path: Path) -> Pieces:
    """Read a SentencePiece file. Raises ValueError for one that has no exact twin, with the reason."""
    proto = _Model()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    problems = _differences(proto)
    if problems:
        raise ValueError(
            f"{path} cannot be exported as tokenizer.json:\n" + "\n".join(f"- {p}" for p in problems)
        )
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    tokens = [piece.piece.replace(SPACE, " ") for piece in proto.pieces]
    kinds = [piece.type for piece in proto.pieces]
    pad = processor.pad_id()
    return Pieces(
        tokens=tokens,
        scores={t: p.score for t, p in zip(tokens, proto.pieces, strict=True) if p.type == _Piece.NORMAL},
        control=[t for t, kind in zip(tokens, kinds, strict=True) if kind == _Piece.CONTROL],
        unknown=tokens[processor.unk_id()],
        bos=tokens[processor.bos_id()],
        eos=tokens[processor.eos_id()],
        pad=tokens[pad] if pad >= 0 else None,
        adds_prefix_space=proto.normalizer_spec.add_dummy_prefix,
    )


def _differences(proto: Any) -> list[str]:
    """What of the model the twin could not express."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    kinds = {piece.type for piece in proto.pieces}
    texts = [piece.piece for piece in proto.pieces]
    checks = {
        "it is not a BPE model": trainer.model_type != trainer.BPE,
        "it has no byte pieces (byte_fallback)": _Piece.BYTE not in kinds,
        "it normalises text": bool(normalizer.precompiled_charsmap),
        "it removes extra white space": normalizer.remove_extra_whitespaces,
        "it keeps spaces as they are, not as U+2581": not normalizer.escape_whitespaces,
        "it puts white space at the end of words": trainer.treat_whitespace_as_suffix,
        "it has symbols defined by the user": _Piece.USER_DEFINED in kinds,
        "it has no BOS or EOS": trainer.bos_id < 0 or trainer.eos_id < 0,
        "it has a piece twice": len(set(texts)) != len(texts),
    }
    return [problem for problem, holds in checks.items() if holds]


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece prefers to merge them."""
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, -cut, left, right))
    return [(left, right) for _, _, left, right in sorted(ranked)]


def build_twin(pieces: Pieces) -> Tokenizer:
    """The twin; it puts BOS before a text unless told not to add special tokens."""
    ids = {token: i for i, token in enumerate(pieces.tokens)}
    twin = Tokenizer(
        BPE(
            ids,
            merges(pieces.scores),
            unk_token=pieces.unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse()]
    if pieces.adds_prefix_space:
        twin.normalizer = normalizers.Prepend(" ")
        steps.append(decoders.Strip(" ", 1, 0))
    twin.decoder = decoders.Sequence(steps)
    special = sorted({pieces.unknown, *pieces.control}, key=ids.__getitem__)
    twin.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    twin.post_processor = processors.TemplateProcessing(
        single=f"{pieces.bos} $A",
        pair=f"{pieces.bos} $A {pieces.bos} $B",
        special_tokens=[(pieces.bos, ids[pieces.bos])],
    )
    return twin


def check_twin(twin: Tokenizer, path: Path) -> None:
    """Compare the twin with SentencePiece on every piece of the vocabulary, on many joined, and on rare characters.

    Raises ValueError with the first text that they encode differently.
    """
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(path.read_bytes())
    pieces = [processor.id_to_piece(i).replace(SPACE, " ") for i in range(processor.vocab_size())]
    lines = ["".join(pieces[i : i + 64]) for i in range(0, len(pieces), 64)]
    twin.encode_special_tokens = True
    for text in [*pieces, *lines, "\x00\t\r\né中\U0001f600\u0301"]:
        ours, theirs = processor.encode(text), twin.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise ValueError(
                f"{path}: its twin encodes {text!r} as {theirs}, SentencePiece as {ours}; this model "
                "can't be exported as tokenizer.json"
            )
    twin.encode_special_tokens = False


def tokenizer_config(pieces: Pieces, max_length: int, chat_template: str | None) -> dict[str, Any]:
    """The contents of tokenizer_config.json.

    Padding is the model's own padding token, or else <unk>, which no text produces, since unknown characters
    are spelled in bytes.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": pieces.bos,
        "eos_token": pieces.eos,
        "unk_token": pieces.unknown,
        "pad_token": pieces.pad or pieces.unknown,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    return config


def write_tokenizer(source: Path, folder: Path, max_length: int, chat_template: str | None) -> Pieces:
    """Write tokenizer.model, tokenizer.json, tokenizer_config.json and the chat template, if there is one."""
    pieces = read_pieces(source)
    twin = build_twin(pieces)
    check_twin(twin, source)
    (folder / "tokenizer.model").write_bytes(source.read_bytes())
    (folder / "tokenizer.json").write_text(twin.to_str(pretty=True), encoding="utf-8")
    config = json.dumps(tokenizer_config(pieces, max_length, chat_template), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return pieces
