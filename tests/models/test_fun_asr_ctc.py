"""The CTC head of Fun-ASR-Nano computes what funasr 1.4.16 computes, and its alignments give tokens their times."""

from __future__ import annotations

import logging
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fun_asr_folders import (
    clips,
    ctc_facts,
    ctc_tensors,
    ctc_weights,
    weights,
    write_converted,
    write_ctc_converted,
    write_ctc_folder,
)

import asr_serve
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.seq2seq.ctc_token_aligner import CtcTokenAligner
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models import registry
from asr_serve.models.asr.speech_llm import byte_level, funasr_folder, llm_asr
from asr_serve.text.tokenizers import HubTokenizer, token_texts

FRAME_SAMPLES = 960


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ctc_converted(tmp_path_factory.mktemp("ctc"))


@pytest.fixture(scope="module")
def model(folder: Path) -> llm_asr.Model:
    made: Any = AsrCheckpoint.find("fun-asr-nano", folder).build("cpu", "fp32").model
    return made


def encoded(model: llm_asr.Model, batch: list[int], timed: list[bool]) -> list[torch.Tensor | None]:
    with torch.inference_mode():
        return model.encode_timed([torch.from_numpy(clips()[i]) for i in batch], timed)[2]


@pytest.mark.parametrize("batch", [[0], [1], [2], [0, 1, 2], [2, 0], [1, 1, 2, 2, 0, 0, 1, 2, 0, 1]], ids=str)
def test_frames_are_funasrs_in_any_company(model: llm_asr.Model, batch: list[int]) -> None:
    for timed in ([True] * len(batch), [i % 2 == 0 for i in range(len(batch))]):
        for i, wanted, frames in zip(batch, timed, encoded(model, batch, timed), strict=True):
            if wanted:
                torch.testing.assert_close(frames, ctc_tensors()[f"frames.{i}"], atol=1e-4, rtol=0)
            else:
                assert frames is None


def test_embeddings_do_not_depend_on_whether_times_are_wanted(model: llm_asr.Model) -> None:
    batch = [torch.from_numpy(pcm) for pcm in clips()]
    with torch.inference_mode():
        assert torch.equal(model.encode(batch)[0], model.encode_timed(batch, [True, False, True])[0])


def test_scores_are_funasrs_but_for_their_normalization(model: llm_asr.Model) -> None:
    head, outputs = model.ctc_head, list(range(ctc_facts()["settings"]["ctc_vocab_size"]))
    assert head is not None
    assert (head.blank_id, head.frame_samples) == (ctc_facts()["blank"], FRAME_SAMPLES)
    for i in range(3):
        expected = ctc_tensors()[f"logprobs.{i}"]
        with torch.inference_mode():
            scores = head.scores(ctc_tensors()[f"frames.{i}"], outputs)
        torch.testing.assert_close(scores.log_softmax(1), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(head.scores(ctc_tensors()[f"frames.{i}"], [299, 7]), scores[:, [299, 7]])


def test_the_vocabulary_cuts_texts_as_tiktoken_does(folder: Path) -> None:
    tokenizer = HubTokenizer(folder / funasr_folder.CTC_TOKENIZER)
    for text, tokens in zip(ctc_facts()["texts"], ctc_facts()["tokens"], strict=True):
        assert tokenizer.encode(text) == tokens
        assert tokenizer.decode(tokens) == text


def runs(path: list[int], blank: int) -> list[tuple[int, int]]:
    """First frame of each label in a path, and the one behind its last."""
    found, at = [], 0
    for label, same in groupby(path):
        count = len(list(same))
        if label != blank:
            found.append((at, at + count))
        at += count
    return found


@pytest.mark.parametrize("clip", range(3))
@pytest.mark.parametrize("index", range(7))
def test_tokens_have_the_times_of_funasrs_alignment(model: llm_asr.Model, clip: int, index: int) -> None:
    """The language model's vocabulary is one of bytes: each is a token."""
    text, labels = ctc_facts()["texts"][index], ctc_facts()["tokens"][index]
    path, vocabulary = ctc_facts()["alignments"][clip][index], model.config.tokenizer
    tokens, samples = vocabulary.encode(text), len(clips()[clip])
    assert len(tokens) == len(text.encode())
    assert model.ctc_head is not None
    aligner = CtcTokenAligner(model.ctc_head, vocabulary.decode)
    times = aligner.token_times(tokens, ctc_tensors()[f"frames.{clip}"], samples)
    if not path:
        assert times == ()
        return
    spans = runs(path, ctc_facts()["blank"])
    assert len(spans) == len(labels)
    assert len(times) == len(tokens)
    assert all(0 <= start <= end <= samples for start, end in times)
    assert all(left[1] <= right[0] for left, right in pairwise(times))
    parts, at, first = token_texts(labels, model.ctc_head.decode), 0, 0
    for label, part in enumerate(parts):
        if not part:
            first += model.ctc_head.decode([labels[label]]) == ""  # a space
            continue
        letters = part.encode()
        spoken = len(letters) - len(letters.lstrip(b" "))
        start, end = (min(edge * FRAME_SAMPLES, samples) for edge in (spans[first][0], spans[label][1]))
        assert (times[at + spoken][0], times[at + len(letters) - 1][1]) == (start, end), (part, times)
        at, first = at + len(letters), label + 1


def test_hypotheses_that_no_frame_can_hold_have_no_times(model: llm_asr.Model) -> None:
    assert model.ctc_head is not None
    aligner = CtcTokenAligner(model.ctc_head, model.config.tokenizer.decode)
    frames = ctc_tensors()["frames.2"]
    encode = model.config.tokenizer.encode
    assert aligner.token_times(encode("hello"), frames[:1], 960) == (
        (0, 192),
        (192, 384),
        (384, 576),
        (576, 768),
        (768, 960),
    )
    for tokens in (encode("hello world"), ()):
        assert aligner.token_times(tokens, frames[:1], 960) == ()


def test_the_card_says_whether_there_are_times(folder: Path, tmp_path: Path) -> None:
    """That of the family says what is published, and that of a loaded model what it has."""
    assert registry.asr_card("fun-asr-nano").word_times
    assert not registry.asr_card("llm-asr").word_times
    for source, timed in ((folder, True), (write_converted("nano", tmp_path), False)):
        with asr_serve.load(str(source), device="cpu", dtype="fp32", turn_model="none") as loaded:
            assert (loaded.card.name, loaded.card.word_times) == ("fun-asr-nano", timed)
            told = []
            submit = loaded.client.submit

            def note(pcm: Any, options: Any, *rest: Any, **named: Any) -> Any:
                told.append(options.words)  # noqa: B023
                return submit(pcm, options, *rest, **named)  # noqa: B023

            loaded.client.submit = note  # type: ignore[method-assign]
            for wanted in (None, False):
                loaded.transcribe([clips()[0]], words=wanted, vad=False)
            assert told == [timed, False]
            if timed:
                loaded.transcribe([clips()[0]], words=True, vad=False)


# --- folders --------------------------------------------------------------------------------------


def load(source: Path, target: Path) -> llm_asr.Model:
    target.mkdir()
    funasr_folder.convert(source, target)
    made: Any = AsrCheckpoint.find("fun-asr-nano", target).build("cpu", "fp32").model
    return made


def save(source: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(weights("nano") | tensors, source / "model.pt")


def edit(source: Path, **changes: Any) -> None:
    settings = yaml.safe_load((source / "config.yaml").read_text("utf-8")) | changes
    (source / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")


INCOMPLETE: dict[str, Any] = {
    "no tensors": lambda source: save(source, {}),
    "no output layer": lambda source: save(source, {k: v for k, v in ctc_weights().items() if "ctc_lo" not in k}),
    "no vocabulary": lambda source: (source / "multilingual.tiktoken").unlink(),
    "no decoder": lambda source: edit(source, ctc_decoder=None),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_without_a_whole_head_the_model_has_no_times(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_ctc_folder(tmp_path / "source")
    INCOMPLETE[case](source)
    with caplog.at_level(logging.WARNING):
        assert load(source, tmp_path / "target").ctc_head is None
    assert ("no times of words" in caplog.text) == (case != "no decoder")


UNFIT: dict[str, Any] = {
    "another decoder": lambda source: edit(source, ctc_decoder="QFormer"),
    "another number of outputs": lambda source: edit(source, ctc_vocab_size=301),
    "outputs that are no number": lambda source: edit(source, ctc_vocab_size="all"),
    "a blank out of range": lambda source: edit(source, ctc_conf={"blank_id": 300}),
    "a blank that is no number": lambda source: edit(source, ctc_conf={"blank_id": "last"}),
    "another width": lambda source: edit(source, ctc_decoder_conf={"downsample_rate": 1, "llm_dim": 24}),
    "a broken vocabulary": lambda source: (source / "multilingual.tiktoken").write_text("a b c\n"),
    "a vocabulary without a byte": lambda source: (source / "multilingual.tiktoken").write_text(
        ctc_facts()["vocabulary"].partition("\n")[2]
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    source = write_ctc_folder(tmp_path / "source")
    UNFIT[case](source)
    with pytest.raises(WeightsCorrupt):
        load(source, tmp_path / "target")


def test_a_converted_folder_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    converted = write_ctc_converted(tmp_path)
    (converted / funasr_folder.CTC_TOKENIZER).unlink()
    with pytest.raises(WeightsMissing, match="ctc_tokenizer"):
        AsrCheckpoint.find("fun-asr-nano", converted)


def test_a_folder_without_the_head_has_the_files_that_it_had(tmp_path: Path) -> None:
    assert not (write_converted("nano", tmp_path) / funasr_folder.CTC_TOKENIZER).exists()


def test_pieces_that_occur_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.tiktoken"
    path.write_text(ctc_facts()["vocabulary"])
    known = byte_level.read_tiktoken(path)
    path.write_text(ctc_facts()["vocabulary"] + f"aGU= {len(known)}\n")
    assert b"he" in known
    with pytest.raises(WeightsCorrupt, match="once"):
        byte_level.read_tiktoken(path)
