"""Whisper, heard live: the same words however the audio comes, within its window, in one language, soon enough."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from case_tiers import exhaustive_after
from live_client import RATE_HZ, fast_clock, plain_words, run_session, stopped_clock
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.decoding.hypothesis import Hypothesis, Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.pipelines.live.repeated_segment import HypothesisKind, PendingHypothesis, RepeatedSegment
from asr_serve.pipelines.live.segment_encoder import HypothesisInput, SubmittedHypothesis
from asr_serve.pipelines.segments import HALLUCINATION_LOGPROB, pad_with_silence
from asr_serve.types import Span
from asr_serve_tools.evaluate.wer import wer


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model("whisper-tiny-en") as model:
        yield model


@pytest.fixture(scope="module")
def multilingual() -> Iterator[Model]:
    with load_model("whisper-base") as model:
        yield model


# --- however it comes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_packets_and_partials_change_nothing(model, beckett, cities):
    talk = np.concatenate([beckett[: 4 * RATE_HZ], np.zeros(2 * RATE_HZ, np.float32), cities[: 9 * RATE_HZ]])
    once = run_session(model, talk, clock=stopped_clock)
    assert len(once.spans) >= 2
    often = run_session(model, talk, [4_800], fast_clock(), in_step=True)
    assert often.spans == once.spans
    assert run_session(model, talk, [1, 31_001, 512], fast_clock()).spans == once.spans
    before_the_end = [p for p in often.partials if p.heard_samples < often.segments[0].end_samples]
    assert any(p.text for p in before_the_end)
    assert any(p.locked_text for p in often.partials), "thirteen seconds of speech, and nothing was locked"
    expect_idle(model._client)


@pytest.mark.slow
def test_speech_without_a_pause_stays_within_the_window(model, cities, monkeypatch):
    """Two thirds of a minute: no request is longer than what the model hears, words are locked while it goes on,
    and none is lost or said twice where segments were cut."""
    spoken = np.concatenate([cities[RATE_HZ // 2 : 29 * RATE_HZ], cities[RATE_HZ // 2 : 12 * RATE_HZ]])
    asked: list[int] = []
    submit = EngineClient.submit

    def seen(self: EngineClient, pcm: np.ndarray, *given: Any, **named: Any) -> Any:
        asked.append(len(pcm))
        return submit(self, pcm, *given, **named)

    monkeypatch.setattr(EngineClient, "submit", seen)
    caller = run_session(model, spoken, [16_000], stopped_clock, in_step=True, max_segment_ms=30_000, lock_ms=4_000)
    assert max(asked) <= 30 * RATE_HZ
    assert len(caller.segments) >= 2
    assert any(p.locked_text for p in caller.partials)
    monkeypatch.undo()
    [whole] = model.transcribe(spoken)
    assert wer([whole.text], [caller.text]).errors <= 0.06 * len(plain_words(whole.text))


# --- drafts ---------------------------------------------------------------------------------------------


def expect_drafts_change_nothing(model: Model, pcm: np.ndarray, options: SearchOptions) -> Recognition:
    """The whole clip, after any draft: what its beginning was heard as, itself, and what is wrong early or late;
    all in one batch, and by itself."""
    client, pcm = model._client, pad_with_silence(pcm)
    plainly = client.submit(pcm, options).future.result(60)
    assert len(plainly.tokens) > 10
    earlier = client.submit(pcm[: len(pcm) // 2], options).future.result(60)
    own, chance = plainly.tokens, random.Random(7)
    wrong_early, wrong_late = (chance.randrange(1_000), *own[1:]), (*own[:-2], chance.randrange(1_000), *own[-1:])
    drafts = [earlier.tokens, own, wrong_early, wrong_late, own + own, own[:3] + own[5:], own[2:]]
    tickets = [client.submit(pcm, options, "live", draft=DraftTokens(tokens)) for tokens in drafts]
    answers = [ticket.future.result(60) for ticket in tickets]
    answers.append(client.submit(pcm, options, "live", draft=DraftTokens(drafts[0])).future.result(60))
    for answer, tokens in zip(answers, [*drafts, drafts[0]], strict=True):
        assert (answer.tokens, answer.finish) == (plainly.tokens, plainly.finish), tokens
        assert answer.language == plainly.language
        assert answer.avg_logprob == pytest.approx(plainly.avg_logprob, abs=1e-3)
        assert answer.no_speech_prob == pytest.approx(plainly.no_speech_prob, abs=1e-3)
    return plainly


@pytest.mark.slow
@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("prompt", exhaustive_after(1, ["A Tale of Two Cities, by Charles Dickens.", ""]))
def test_drafts_are_verified(model, cities, prompt, timestamps):
    given = tuple(model.tokenizer.encode(" " + prompt)) if prompt else ()
    options = SearchOptions(temperatures=(0.0,), language="en", prompt=given, timestamps=timestamps)
    expect_drafts_change_nothing(model, cities[: 6 * RATE_HZ], options)


def test_drafts_where_the_language_is_heard(multilingual, cities):
    options = SearchOptions(temperatures=(0.0,))
    assert expect_drafts_change_nothing(multilingual, cities[: 6 * RATE_HZ], options).language == "en"


@pytest.mark.slow
def test_the_language_of_live_segments_and_how_probable_it_is(multilingual, beckett, cities):
    talk = np.concatenate([beckett[: 4 * RATE_HZ], np.zeros(2 * RATE_HZ, np.float32), cities[: 6 * RATE_HZ]])
    heard = run_session(multilingual, talk, [9_600], fast_clock(), in_step=True)
    assert {language for language, _ in heard.languages} == {"en"}
    assert all(0.5 < probability <= 1 for _, probability in heard.languages)
    chosen = run_session(multilingual, talk[: 5 * RATE_HZ], clock=stopped_clock, language="en")
    assert chosen.languages == [("en", 0.0)] * len(chosen.segments) != []


def test_the_language_of_a_stream(multilingual, beckett):
    *_, last = multilingual.stream([beckett[: 5 * RATE_HZ]])
    assert last.language == last["language"] == "en"
    assert 0.5 < last.language_prob <= 1
    *_, told = multilingual.stream([beckett[: 5 * RATE_HZ]], language="en")
    assert (told.language, told.language_prob) == ("en", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("speech", exhaustive_after(1, ["cities", "beckett"]))
def test_speech_is_written_in_a_language_it_is_not_in(multilingual, speech, request):
    """Words that are improbable are better than none, where the model hears that somebody speaks."""
    pcm = request.getfixturevalue(speech)[: 10 * RATE_HZ]
    [whole] = multilingual.transcribe(pcm, language="ja")
    *_, last = multilingual.stream(pcm, language="ja")
    assert whole.language == "ja"
    assert whole.text
    assert last.text
    assert min(each.avg_logprob for each in whole.segments) < HALLUCINATION_LOGPROB, "the case this is about"


# --- one segment, without a model -----------------------------------------------------------------------


class Silent:
    """Hearing that is never asked."""

    def submit(self, question: HypothesisInput) -> SubmittedHypothesis:
        raise AssertionError(question)

    def close(self) -> None:
        pass


def recognition(tokens: tuple[int, ...], language: str = "", **numbers: Any) -> Recognition:
    made = Recognition(tokens, -0.2, 0.0, "stop", 1.0, (-0.2,) * len(tokens), language=language)
    return msgspec.structs.replace(made, **numbers)


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def heard_as(*answers: tuple[HypothesisKind, Recognition]) -> RepeatedSegment:
    """A segment, and what came back of it: a second more each time."""
    each = RepeatedSegment(0, starts_mid_speech=False, text=text, encoder=Silent())
    for index, (kind, answer) in enumerate(answers):
        job = PendingHypothesis(kind, Span(0, (index + 1) * RATE_HZ), Future(), lambda: None)
        each.accept_result(job, answer)
    return each


def test_a_segment_keeps_the_language_of_its_locked_words():
    german, dutch = recognition((1, 2, 3), "de"), recognition((9, 8), "nl")
    wavering = heard_as(("anchor", german), ("partial", dutch))
    assert (wavering.language_for("partial"), wavering.language_for("anchor")) == ("de", "")
    assert wavering.language_for("final") == "", "nothing is locked: it hears most, and is to tell"
    assert heard_as(("partial", dutch)).language_for("partial") == "", "too little was heard"
    locked = heard_as(*[("anchor", german)] * 3)
    assert locked.locked_text == "w1 w2 w3"
    assert {locked.language_for(kind) for kind in ("partial", "anchor", "early", "final")} == {"de"}


@pytest.mark.parametrize(
    "doubtful",
    [
        {"avg_logprob": -1.2},
        {"finish": "repetition"},
        {"compression_ratio": 2.5},
        {"avg_logprob": -0.5, "no_speech_prob": 0.9},
    ],
)
def test_what_is_not_believed_locks_nothing(doubtful):
    each = heard_as(*[("anchor", recognition((1, 2, 3), **doubtful))] * 4)
    assert (each.locked_tokens, each.locked_text) == (0, "")
    sure = heard_as(*[("anchor", recognition((1, 2, 3)))] * 3, ("anchor", recognition((1, 2, 3, 4), **doubtful)))
    assert sure.locked_text == "w1 w2 w3"


@pytest.mark.parametrize(("probability", "anchors"), [(0.9, 2), (0.65, 3), (0.45, 4), (0.05, 5)])
def test_the_less_sure_anchors_are_the_more_must_agree(probability, anchors):
    sure, unsure = math.log(0.95), math.log(probability)
    answer = recognition((1, 2, 3), logprobs=(sure, unsure, sure))
    for count in range(1, 8):
        each = heard_as(*[("anchor", answer)] * count)
        whole = count >= anchors
        assert each.locked_text == ("w1 w2 w3" if whole else "w1" if count >= 2 else ""), count
        if whole:
            assert each.locked_to == RATE_HZ, "the first of those that agree has all its words"


def test_one_unsure_anchor_or_one_that_disagrees_counts_against_those_before():
    sure = recognition((1, 2), logprobs=(-0.1, -0.1))
    unsure = recognition((1, 2), logprobs=(-0.1, math.log(0.3)))
    assert heard_as(("anchor", unsure), ("anchor", sure)).locked_text == "w1"
    assert heard_as(("anchor", unsure), ("anchor", sure), ("anchor", sure)).locked_text == "w1 w2"
    other = recognition((1, 9), logprobs=(-0.1, -0.1))
    assert heard_as(("anchor", sure), ("anchor", other)).locked_text == "w1"
    again = heard_as(("anchor", other), ("anchor", sure), ("anchor", sure))
    assert (again.locked_text, again.locked_to) == ("w1 w2", 2 * RATE_HZ)


def test_anchors_of_two_languages_do_not_agree():
    german, dutch = recognition((1, 2), "de"), recognition((1, 2), "nl")
    assert heard_as(("anchor", german), ("anchor", dutch)).locked_text == ""
    assert heard_as(("anchor", german), ("anchor", dutch), ("anchor", dutch)).locked_text == "w1 w2"


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("due", [0, 1, 3])
def test_anchors_that_can_lock_nothing_any_more_are_void_once_a_segment_has_ended(accepted, pending, due):
    each = heard_as(*[("anchor", recognition((1, 2, 3)))] * accepted)
    each.due_anchors.extend(range(9 * RATE_HZ, (9 + due) * RATE_HZ, RATE_HZ))
    if pending:
        each.job = PendingHypothesis("anchor", Span(0, 8 * RATE_HZ), Future(), lambda: None)
    assert not each.drop_void_anchors()
    assert len(each.due_anchors) == due, "while it is open, others may follow"
    each.end = 20 * RATE_HZ
    locks = accepted + pending + due >= 2
    assert each.drop_void_anchors() == (pending and not locks)
    assert len(each.due_anchors) == (due if locks else 0)


def test_the_first_anchor_after_a_cut_is_never_void():
    each = RepeatedSegment(0, starts_mid_speech=True, text=text, encoder=Silent())
    each.due_anchors.append(3 * RATE_HZ)
    each.end = 4 * RATE_HZ
    assert not each.drop_void_anchors()
    assert each.due_anchors


def test_words_where_nobody_speaks_are_not_shown():
    noise = recognition((5, 6), avg_logprob=-1.4)
    assert heard_as(("partial", noise), ("anchor", noise)).shown_text == ""
    said = recognition((1, 2, 3))
    assert heard_as(("partial", said), ("partial", noise)).shown_text == "w1 w2 w3"
    assert heard_as(("partial", noise), ("partial", said)).shown_text == "w1 w2 w3"


def test_a_sampled_try_without_an_end_is_no_answer():
    """Hum was heard as "BLEBLEBLE", likely enough, up to the last token that there was room for."""
    options = SearchOptions(temperatures=(0.0, 0.2, 0.4))
    hypothesis = Hypothesis(options, eos=0, max_tokens=4, text=text)
    assert hypothesis.finalize(hypothesis.append_token(0, -1.7) or "length") is None
    for token in range(4):
        finish = hypothesis.append_token(token + 1, -0.5)
    assert finish == "length"
    assert hypothesis.finalize(finish) is None
    hypothesis.append_token(9, -2.0)
    answer = hypothesis.finalize(hypothesis.append_token(0, -2.0) or "length")
    assert answer is not None
    assert (answer.tokens, answer.finish, answer.avg_logprob) == ((), "stop", -1.7)


# --- soon enough ----------------------------------------------------------------------------------------


def test_a_final_that_finds_nothing_gives_up_in_time():
    """Whatever the decoder says in whichever try: in all of them less than two answers can be long."""
    chance, tries = random.Random(3), 0
    for _ in range(200):
        most = chance.randint(8, 60)
        options = SearchOptions(temperatures=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0), hurried=True)
        hypothesis = Hypothesis(options, eos=0, max_tokens=most, text=text)
        steps, answer = 0, None
        while answer is None:
            tries += 1
            habit = chance.choice(("loop", "babble", "short"))
            finish = None
            while finish is None:
                steps += 1
                token = {"loop": 7, "babble": chance.randint(1, 50), "short": chance.choice((0, 3))}[habit]
                finish = hypothesis.append_token(token, -3.0)
            answer = hypothesis.finalize(finish)
        ends = len(options.temperatures)  # end-of-text is a step, too
        assert steps < 2 * most + ends, (steps, most)
        assert answer.avg_logprob < -1
    assert tries > 400, "they are still tried again"


def test_who_is_not_in_a_hurry_tries_everything():
    for temperatures in pairwise((0.0, 0.4, 1.0)):
        hypothesis = Hypothesis(SearchOptions(temperatures=temperatures), eos=0, max_tokens=4, text=text)
        for token in range(4):
            finish = hypothesis.append_token(token + 1, -3.0)
        assert finish == "length"
        assert hypothesis.finalize(finish) is None
