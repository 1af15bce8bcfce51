"""Vosk's small English model in the engine: real weights, a decoding graph, and many sessions in a step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_vosk import pieces
from typer.testing import CliRunner

import asr_serve
from asr_serve.api.cli import app
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.engine.builder import AsrCheckpoint, build_chunked
from asr_serve.engine.client import EngineClient
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner, StreamingSession
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import UnsupportedOption
from asr_serve.models.interfaces import StreamingModel
from asr_serve.types import NBestHypothesis
from asr_serve.units import RATE_HZ

NAME, WAIT_S = "vosk-small-en", 120.0


def recognize(config: EngineConfig, clips: list[np.ndarray]) -> list[tuple[int, ...]]:
    """Words of clips that are all sent at once."""
    found = AsrCheckpoint.find(NAME, None)
    client = EngineClient(config, thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    try:
        tickets = [client.submit(clip) for clip in clips]
        return [ticket.future.result(WAIT_S).tokens for ticket in tickets]
    finally:
        client.close()


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> np.ndarray:
    return read_audio(packaged_speech / "two_cities.wav")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with asr_serve.load(NAME) as loaded:
        yield loaded


def test_it_transcribes(model: Any, packaged_speech: Path) -> None:
    [transcript] = model.transcribe(packaged_speech / "two_cities.wav")
    assert transcript.language == "en"
    assert "it was the best of times it was the worst of times" in transcript.text


DIFFERENT = {("two_cities.wav", 2): ("spring", "string"), ("two_cities.wav", 3): ("direct", "get")}
"""Words of Vosk's, by recording and piece, and what is recognized here. Both are about as probable, and the scores of
two runtimes differ a little: by dither, by blocks, and by what counts as silence in the i-vector."""


def test_words_are_those_of_vosk(packaged_speech: Path) -> None:
    """Equal words, with back-offs as Kaldi's decoders take them; equal times and confidences nearly everywhere."""
    theirs = json.loads((Path(__file__).parent / "fixtures" / "vosk.json").read_text())
    found = AsrCheckpoint.find(NAME, None)
    client = EngineClient(
        EngineConfig(graph_epsilon_backoffs=True), thread_backend(found.card, lambda: found.build("cpu", "fp32"))
    )
    decode = found.build("cpu", "fp32").decode_text
    times, confidences = [], []
    try:
        for name, expected in theirs.items():
            clips = [piece.astype(np.float32) / 32_768 for piece in pieces(packaged_speech / name)]
            tickets = [client.submit(clip, SearchOptions(words=True)) for clip in clips]
            for number, (ticket, words) in enumerate(zip(tickets, expected, strict=True)):
                answer = ticket.future.result(WAIT_S)
                texts = [decode([token]).strip() for token in answer.tokens]
                theirs_here = [word for word, *_ in words]
                old, new = DIFFERENT.get((name, number), ("", ""))
                assert [new if word == old else word for word in theirs_here] == texts
                rows = zip(answer.times, answer.logprobs, words, strict=True)
                for (start, end), logprob, (_, start_s, end_s, confidence) in rows:
                    times += [abs(start / RATE_HZ - start_s), abs(end / RATE_HZ - end_s)]
                    confidences.append(abs(math.exp(logprob) - confidence))
    finally:
        client.close()
    assert len(confidences) > 100
    assert np.mean(np.array(times) < 0.031) > 0.95
    assert np.mean(np.array(confidences) < 0.05) > 0.85


def test_words_have_times(model: Any, speech: np.ndarray) -> None:
    [timed] = model.transcribe([speech[:80_000]], vad=False, words=True)
    words = [word for segment in timed.segments for word in segment.words or ()]
    assert " ".join(word.text.strip() for word in words) == timed.text
    assert [word.start_samples for word in words] == sorted(word.start_samples for word in words)
    assert all(0 <= word.start_samples < word.end_samples <= 80_000 for word in words)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("hotwords", ["Dickens"], "head ctc, rnnt or tdt can"), ("beam", 4, "engine.graph_beam")],
)
def test_what_a_graph_search_cannot_do_is_refused_by_name(
    model: Any, packaged_speech: Path, option: str, value: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedOption, match=reason) as refused:
        model.transcribe(packaged_speech / "two_cities.wav", **{option: value})
    assert refused.value.param == option


def test_company_and_steps_change_no_word(speech: np.ndarray) -> None:
    clips = [speech[start : start + samples] for start, samples in ((0, 160_000), (90_001, 47_123), (200_000, 32_000))]
    together = recognize(EngineConfig(use_chunked_inference=True), clips)
    assert together == recognize(EngineConfig(), clips)
    assert together == [recognize(EngineConfig(use_chunked_inference=True), [clip])[0] for clip in clips]
    assert len(together[0]) > 15


def make_runner(**options: Any) -> tuple[ChunkedModelRunner, Callable[[list[int]], str]]:
    """Runner of the model, with up to four sessions, and what makes text of words."""
    found = AsrCheckpoint.find(NAME, None)
    parts = found.build("cpu", "fp32")
    assert isinstance(parts.model, StreamingModel)
    config = EngineConfig(max_sessions=4, **options)
    return build_chunked(parts.model, found.card, parts, config), parts.decode_text


def test_words_of_minimum_risk_come_from_a_lattice_on_every_device() -> None:
    found = AsrCheckpoint.find(NAME, None)
    parts = found.build("cpu", "fp32")
    assert isinstance(parts.model, StreamingModel)
    assert parts.model.graph_options.minimum_risk
    runner = build_chunked(parts.model, found.card, parts, EngineConfig(max_sessions=1), batched_search=True)
    assert isinstance(runner.search, WfstSearch)


def advance(runner: ChunkedModelRunner, session: StreamingSession, now_ms: float) -> list[int]:
    """Words that are fixed by all steps that a session is ready for."""
    fixed = []
    while running := runner.schedule(now_ms):
        assert running == [session]
        [output] = runner.step(running, now_ms)
        fixed += [token.id for token in output.result.fixed_tokens]
    return fixed


def test_a_saved_session_resumes_in_the_middle_of_a_sentence(speech: np.ndarray) -> None:
    runner, decode = make_runner()
    clip, cut = speech[:112_000], 51_234

    def hear(breaks: bool) -> tuple[list[int], list[NBestHypothesis]]:
        session = runner.open_session(live=True)
        runner.append_audio(session, clip[:cut], 0.0)
        fixed = advance(runner, session, 0.0)
        if breaks:
            saved = runner.save_session(session)
            runner.close_session(session)
            other = runner.open_session(live=True)  # the row that the session had is another's now
            session = runner.load_session(saved, True)
            runner.close_session(other)
        runner.append_audio(session, clip[cut:], 10.0)
        runner.finish_audio(session, 10.0)
        fixed += advance(runner, session, 10.0)
        found = session.hypotheses
        runner.close_session(session)
        return fixed, found

    whole, resumed = hear(False), hear(True)
    assert resumed == whole
    fixed, hypotheses = whole
    assert "the best of times" in decode([*fixed, *(token.id for token in hypotheses[0].tokens)])


def test_speech_in_noise_has_alternatives(speech: np.ndarray, rng: np.random.Generator) -> None:
    runner, decode = make_runner(beam=8)
    session = runner.open_session(live=True)
    noise = rng.normal(0.0, speech[:64_000].std(), 64_000).astype(np.float32)
    runner.append_audio(session, speech[:64_000] + noise, 0.0)
    runner.finish_audio(session, 0.0)
    advance(runner, session, 0.0)
    texts = [decode([token.id for token in each.tokens]) for each in session.hypotheses]
    scores = [each.logprob for each in session.hypotheses]
    assert 1 < len(texts) == len(set(texts))
    assert scores[1:] == sorted(scores[1:], reverse=True), "the words of minimum risk, and then the best first"


def test_a_wider_lattice_has_more_alternatives(speech: np.ndarray) -> None:
    counts = []
    for lattice_beam in (0.01, 8.0):
        runner, _ = make_runner(beam=8, graph_lattice_beam=lattice_beam)
        session = runner.open_session()
        runner.append_audio(session, speech[64_000:112_000], 0.0)
        runner.finish_audio(session, 0.0)
        advance(runner, session, 0.0)
        counts.append(len(session.hypotheses))
    assert counts == [1, 8]


def test_a_chinese_clip(speech_data: Path) -> None:
    [path] = (speech_data / "chinese").glob("aishell-BAC009S0724W0121.flac")
    with asr_serve.load("vosk-small-zh") as chinese:
        [transcript] = chinese.transcribe(path)
    assert transcript.text.replace(" ", "") == "广州市房地产中介协会分析"


def test_the_command_line(packaged_speech: Path) -> None:
    result = CliRunner().invoke(app, ["transcribe", "--model", NAME, str(packaged_speech / "two_cities.wav")])
    assert result.exit_code == 0, result.output
    assert "it was the worst of times" in result.stdout


def test_a_narrow_beam_is_another_search(speech: np.ndarray) -> None:
    clip = speech[:160_000]
    wide = recognize(EngineConfig(), [clip])[0]
    narrow = recognize(EngineConfig(graph_beam=2.0, graph_max_active=20), [clip])[0]
    assert narrow
    assert narrow != wide
