"""Ids to text, from both kinds of tokenizer file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.text import tokenizers as tokens
from asr_serve.text.tokenizers import BytePieceTokenizer, HubTokenizer, SentencePieceTokenizer, sentence_encoder

SPACE = "\u2581"
LONG = "ab" * 150  # 300 bytes: its length takes two
PIECES = ["<unk>", "<s>", "</s>", f"{SPACE}Ever", f"{SPACE}tried", ".", LONG, ""]
CUT = [bytes([byte]) for byte in "é".encode()]


def packed(pieces: list[bytes]) -> bytes:
    """The file's form: each piece behind its length, low seven bits first."""
    made = b""
    for piece in pieces:
        length = len(piece)
        made += (bytes([length]) if length < 128 else bytes([length % 128 + 128, length // 128])) + piece
    return made


@pytest.fixture
def pieces(tmp_path: Path) -> BytePieceTokenizer:
    file = tmp_path / "tokenizer.bin"
    file.write_bytes(packed([piece.encode() for piece in PIECES] + CUT))
    return BytePieceTokenizer.from_file(file)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 256, 300, 16_383])
def test_any_length_is_read(tmp_path: Path, length: int) -> None:
    file = tmp_path / "tokenizer.bin"
    file.write_bytes(packed([b"x" * length, b"next"]))
    assert BytePieceTokenizer.from_file(file).pieces == [b"x" * length, b"next"]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 3, 4, 5, 2], "Ever tried."),
        ([], ""),
        ([1, 2], ""),
        ([0, 5], "."),  # <unk> says nothing
        ([3, 6], "Ever" + LONG),
        ([3, 7, 5], "Ever."),
        ([3, 8, 9], "Everé"),  # a letter out of two byte pieces
        ([3, 8], "Ever\ufffd"),  # half of it
        ([3, 99, -1], "Ever"),  # no such id
    ],
)
def test_byte_pieces(pieces: BytePieceTokenizer, ids: list[int], text: str) -> None:
    assert pieces.decode(ids) == text


def hub_file(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {piece: i for i, piece in enumerate(PIECES[:6])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(("ids", "text"), [([1, 3, 4, 5, 2], "Ever tried."), ([1, 2], ""), ([], "")])
def test_hub_tokenizer(tmp_path: Path, ids: list[int], text: str) -> None:
    assert HubTokenizer(hub_file(tmp_path)).decode(ids) == text


def byte_level_file(folder: Path) -> Path:
    """Of Whisper's kind: letters as bytes, marks, and times that are marked as if they were text."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate(letters)} | {"he": 256, "hel": 257}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("h", "e"), ("he", "l")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|en|>"])
    made.add_tokens(["<|0.00|>", "word"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_special_tokens_and_times_have_no_text(tmp_path: Path) -> None:
    tokeniser = HubTokenizer(byte_level_file(tmp_path))
    spoken = tokeniser.encode(" hello, Ž日")
    assert 257 in spoken
    assert tokeniser.decode([259, 260, *spoken, 260, 9_999, 258]) == "hello, Ž日"
    assert tokeniser.decode([*spoken[:-1], 258]) == "hello, Ž�"  # a letter's last byte is not there
    assert tokeniser.decode([261]) == "word"


def test_special_tokens_are_not_read_from_a_prompt(tmp_path: Path) -> None:
    tokeniser = HubTokenizer(byte_level_file(tmp_path))
    given = tokeniser.encode("hel<|endoftext|><|0.00|>lo")
    assert not tokeniser.marks & set(given)
    assert tokeniser.decode(given) == "hello"


def test_load_uses_the_tokenizer_file_that_is_present(tmp_path: Path) -> None:
    with pytest.raises(WeightsMissing, match=r"tokenizer\.json"):
        tokens.load_tokenizer(tmp_path)
    hub_file(tmp_path)
    assert isinstance(tokens.load_tokenizer(tmp_path), HubTokenizer)
    (tmp_path / "tokenizer.bin").write_bytes(packed([b"a"]))
    assert isinstance(tokens.load_tokenizer(tmp_path), BytePieceTokenizer)


def test_the_vocabulary_of_moonshine(packaged_speech: Path) -> None:
    found = BytePieceTokenizer.from_file(packaged_speech / "tiny-en" / "tokenizer.bin")
    assert len(found.pieces) == 32_768
    assert found.pieces[:3] == [b"<unk>", b"<s>", b"</s>"]


def test_names_of_tokens_are_distinct_and_have_no_space(pieces: BytePieceTokenizer, tmp_path: Path) -> None:
    names = pieces.token_names()
    assert names[3:7] == [f"{SPACE}Ever", f"{SPACE}tried", ".", LONG]
    assert names[:3] == ["<token:0>", "<token:1>", "<token:2>"]  # words of every language model have these names
    assert names[7:] == ["<token:7>", "<token:8>", "<token:9>"]  # empty, and halves of a letter
    (tmp_path / "pieces.json").write_text(json.dumps(["a", "a b", "a", "\u3000"]))
    assert SentencePieceTokenizer(tmp_path / "pieces.json").token_names() == [
        "<token:0>",
        "<token:1>",
        "a",
        "<token:3>",
    ]


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        ([f"{SPACE}a", "b", f"{SPACE}c", SPACE], [f"{SPACE}a", "b", f"{SPACE}c"]),
        ([SPACE, "a", "b", "c"], ["a", "b", SPACE, "c"]),
    ],
)
def test_sentences_are_split_as_a_recogniser_emits_them(
    tmp_path: Path, vocabulary: list[str], expected: list[str]
) -> None:
    (tmp_path / "pieces.json").write_text(json.dumps(vocabulary))
    split = sentence_encoder(SentencePieceTokenizer(tmp_path / "pieces.json"))
    assert split("  ab  c \n") == expected
    assert split(" \n") == []


@pytest.mark.parametrize("data", [b"", b'["a", "\xd6', b'["a", 3]', b'{"a": 0}'])
def test_pieces_that_cannot_be_read_are_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pieces.json").write_bytes(data)
    with pytest.raises(WeightsCorrupt, match=r"pieces\.json cannot be read"):
        tokens.load_tokenizer(tmp_path)
