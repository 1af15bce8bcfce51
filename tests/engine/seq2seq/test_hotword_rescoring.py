"""The second look at hotwords: what words are worth, and answers said again on pages of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from case_tiers import exhaustive_after

import asr_serve
from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.cache.page_pool import PagePool
from asr_serve.engine.client import Ticket
from asr_serve.engine.request import RecognitionRequest
from asr_serve.engine.seq2seq.biasing_queue import RescoringList
from asr_serve.engine.seq2seq.decode_batch import DecodeRow
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.finalize import MAX_RESCORE_TOKENS
from asr_serve.engine.seq2seq.hotword_rescoring import (
    MAX_CANDIDATES_PER_WORD,
    MAX_PHONETIC_MATCHES,
    RESPELLING_DISTANCE,
    AlternativeScorer,
    CandidateGenerator,
    HotwordRescorer,
    RecognizedWord,
    ScoringInput,
    allowance,
    same_stem,
)
from asr_serve.engine.seq2seq.token_aligner import FinishedRow
from asr_serve.errors import Cancelled, StepFailed
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

WORDS = ["heartily", "Quilter", "thesaurus", "Nagg", "matter"]


@pytest.fixture(scope="module", params=["moonshine-tiny-en", "whisper-tiny-en"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if store.locate(asr_card(request.param)) is None:
        pytest.skip(f"no weights of {request.param}")
    with asr_serve.load(
        request.param, device="cpu", dtype="fp32", turn_model="none", engine=EngineConfig(prefix_bytes=0)
    ) as loaded:
        yield loaded


# --- said again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 3])
def test_the_text_itself_has_its_own_probability(
    model: Model, beam: int, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[Any, ...]] = []
    looked = HotwordRescorer.rescore

    def spied(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        for each in ended:
            if beam > 1:
                best = self._scorer.top_tokens(each, 5)
                seen.append(
                    (each.recognition.tokens, [max(choice, key=lambda token: choice[token]) for choice in best])
                )
            tokens, free = each.recognition.tokens, self._runner.page_pool.free_count
            middle = len(tokens) // 2
            feeds = [
                ScoringInput(each, first - 1, ([each.row.prompt[-1], *tokens][first], *tokens[first:-1]),
                     [(token, token) for token in tokens[first:]])
                for first in (0, middle, middle, len(tokens) - 1)
            ]  # fmt: skip
            for feed, scores in zip(feeds, self._scorer.logprobs(feeds), strict=True):
                assert all(len(pair) == 2 and pair[0] == pair[1] for pair in scores)
                seen.append((each.recognition.logprobs[feed.first + 1 :], [pair[0] for pair in scores]))
            assert self._runner.page_pool.free_count == free
        return looked(self, ended)

    monkeypatch.setattr(HotwordRescorer, "rescore", spied)
    model.transcribe(packaged_speech / "beckett.wav", hotwords=["thesaurus"], beam=beam)
    assert seen
    same = 0
    for was, scores in seen:
        if isinstance(was[0], int):
            same = sum(a == b for a, b in zip(was, scores, strict=True))
            assert same > len(was) / 2, "beams say mostly what is likeliest"
        else:
            assert scores == pytest.approx(was, abs=2e-3)


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_the_same_words_are_found_without_a_free_page(
    model: Model, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
):
    clip = packaged_speech / "endgame_nagg_nell.wav"
    plenty = model.transcribe(clip, hotwords=WORDS)[0].text
    looked = HotwordRescorer.rescore

    def starved(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        with monkeypatch.context() as none_free:
            none_free.setattr(PagePool, "free_count", property(lambda pool: 0))
            return looked(self, ended)

    monkeypatch.setattr(HotwordRescorer, "rescore", starved)
    assert "heartily" in plenty.lower()
    assert model.transcribe(clip, hotwords=WORDS)[0].text == plenty


@pytest.mark.slow
@pytest.mark.parametrize("left", exhaustive_after(2, [0, 3, 1]))
@pytest.mark.repeats(model="whisper-tiny-en", left=0)
def test_the_words_found_do_not_depend_on_other_requests(
    model: Model, left: int, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
):
    """A word that sounds otherwise, which the model holds for possible; and a long list, in as few passes."""
    word = {"moonshine-tiny-en": "walked", "whisper-tiny-en": "wind"}[model._client.card.name]
    pcm = read_audio(packaged_speech / "two_cities.wav")[: 25 * 16_000]
    passes, full = list[int](), list[bool]()
    looked, said = HotwordRescorer.rescore, AlternativeScorer._score_batch

    def counted(self: AlternativeScorer, batch: Sequence[ScoringInput], left: Sequence[int]) -> list[list[list[float]]]:
        passes[-1] += 1
        return said(self, batch, left)

    def beside_others(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        passes.append(0)
        pages, others = self._runner.page_pool, list[int]()
        if full:
            others = pages.allocate(pages.free_count - left)
        free = pages.free_count
        told = looked(self, ended)
        assert pages.free_count == free
        pages.free_pages(others)
        return told

    monkeypatch.setattr(AlternativeScorer, "_score_batch", counted)
    monkeypatch.setattr(HotwordRescorer, "rescore", beside_others)

    def heard() -> str:
        options = SearchOptions(bias=pack_phrases([BiasingPhrase(each) for each in (word, *WORDS)]))
        answer = model._client.submit(pcm, options, "bulk", wait=True).future.result(60)
        return model.tokenizer.decode(answer.tokens)

    alone = heard()
    least, passes[:] = max(passes), []
    full.append(True)
    assert word in alone
    assert heard() == alone
    assert max(passes) <= 4 * least


def test_words_unlike_the_audio_are_not_inserted(model: Model, packaged_speech: Path):
    """Endings that nobody said, and words that are nothing like it."""
    clip = packaged_speech / "beckett.wav"
    plain = model.transcribe(clip)[0].text
    for words in (["matters", "fails", "thesaurus"], [f"{word}:3" for word in ("Quilter", "bifurcation", "Rodin")]):
        assert model.transcribe(clip, hotwords=words)[0].text == plain


# --- in turns -------------------------------------------------------------------------------------------


def asked_together(model: Model, packaged_speech: Path, count: int) -> list[Ticket]:
    """Answers that end in the same step, each of about half as many tokens as are looked at in a turn."""
    pcm = read_audio(packaged_speech / "two_cities.wav")[: 12 * 16_000]
    options = SearchOptions(bias=pack_phrases([BiasingPhrase(each) for each in WORDS]))
    return [model._client.submit(pcm, options, "bulk", wait=True) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_rescoring_is_spread_over_steps(model: Model, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch):
    """Eight that end at once let one that goes on have its steps between their looks."""
    (alone,) = (ticket.future.result(60).tokens for ticket in asked_together(model, packaged_speech, 1))
    looked, step = HotwordRescorer.rescore, DecodeRunner.step
    steps, looks = [0], list[tuple[int, int]]()

    def counted(self: DecodeRunner) -> list[DecodeRow]:
        steps[0] += 1
        return step(self)

    def spied(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        assert len(ended) == 1 or sum(len(each.recognition.tokens) for each in ended) <= MAX_RESCORE_TOKENS
        assert not {each.row for each in ended} & {*self._runner.rows}, "their seats are others'"
        looks.append((steps[0], len(self._runner.rows)) if ended else (-1, 0))
        return looked(self, ended)

    monkeypatch.setattr(DecodeRunner, "step", counted)
    monkeypatch.setattr(HotwordRescorer, "rescore", spied)
    longer = read_audio(packaged_speech / "two_cities.wav")[: 28 * 16_000]
    goes_on = model._client.submit(longer, None, "bulk", wait=True)
    together = asked_together(model, packaged_speech, 8)
    assert [ticket.future.result(60).tokens for ticket in together] == [alone] * 8
    goes_on.future.result(60)
    beside = [at for at, rows in looks if rows]
    assert len(beside) >= 4
    assert len({*beside}) == len(beside), "two looks without a step between them"


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_a_request_cancelled_before_rescoring_frees_its_pages(
    model: Model, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
):
    looked = HotwordRescorer.rescore
    tickets, left = list[Ticket](), list[int]()

    def leaves(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        resting = {row.request_id for row in self._runner.finished_rows} - {each.row.request_id for each in ended}
        for ticket in tickets:
            if resting and not left and ticket.id == max(resting):
                left.append(ticket.id)
                model._client.cancel(ticket)
        return looked(self, ended)

    monkeypatch.setattr(HotwordRescorer, "rescore", leaves)
    tickets += asked_together(model, packaged_speech, 6)
    wait([ticket.future for ticket in tickets], 60)
    for ticket in tickets:
        if ticket.id not in left:
            assert ticket.future.result(60).tokens
    assert len(left) == 1
    with pytest.raises(Cancelled):
        next(ticket for ticket in tickets if ticket.id == left[0]).future.result(60)
    assert model._client.backend.describe()["pages_used"] == 0


def test_a_failed_rescoring_fails_its_own_request_only(
    model: Model, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
):
    looked = HotwordRescorer.rescore
    failed = list[int]()

    def fails(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        if ended and not failed:
            failed.extend(each.row.request_id for each in ended)
            raise RuntimeError("on purpose")
        return looked(self, ended)

    monkeypatch.setattr(HotwordRescorer, "rescore", fails)
    tickets = asked_together(model, packaged_speech, 4)
    wait([ticket.future for ticket in tickets], 60)
    for ticket in tickets:
        if ticket.id in failed:
            with pytest.raises(StepFailed, match="on purpose"):
                ticket.future.result(60)
        else:
            assert ticket.future.result(60).tokens
    assert failed
    described = model._client.backend.describe()
    assert (described["pages_used"], described["hotwords_s"] > 0) == (0, True)


@pytest.mark.slow
@pytest.mark.repeats(model="whisper-tiny-en")
def test_live_requests_are_rescored_before_files(model: Model, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch):
    looked = HotwordRescorer.rescore
    order, first = list[int](), list[int]()

    def urgent(self: RecognitionRequest) -> bool:
        return self.id == first[0] + 5

    def spied(self: HotwordRescorer, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        order.extend(each.row.request_id for each in ended)
        return looked(self, ended)

    (before,) = asked_together(model, packaged_speech, 1)
    before.future.result(60)
    first.append(before.id + 1)
    monkeypatch.setattr(RecognitionRequest, "urgent", property(urgent))
    monkeypatch.setattr(HotwordRescorer, "rescore", spied)
    tickets = asked_together(model, packaged_speech, 6)
    for ticket in tickets:
        ticket.future.result(60)
    ids = [ticket.id for ticket in tickets]
    last = ids.pop()
    assert sorted(order[-6:]) == [*ids, last]
    assert order[-6:].index(last) < 3, "a turn is the oldest's, the next one its own"
    assert [each for each in order[-6:] if each != last] == ids


# --- what words are worth -------------------------------------------------------------------------------


def test_the_cost_that_a_word_may_have():
    usual = allowance(1, 0.2)
    assert allowance(3, 0.2) > usual > allowance(0.5, 0.2)
    assert usual > allowance(1, 0.6)
    assert usual > allowance(1, 0.2, words=1_000) > allowance(1, 0.2, words=10_000) > 0
    assert usual > allowance(1, 0.2, same_stem=True)
    assert allowance(0.1, RESPELLING_DISTANCE, words=10_000) == float("inf")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("fail", "failed", True),
        ("Chapter", "chapters", True),
        ("heavy", "heavier", True),
        ("Quilta", "Quilter", True),
        ("port", "poured", False),
        ("Leighton", "Layton", False),
        ("fail", "failsafe-mode", False),
    ],
)
def test_words_with_one_stem(one: str, other: str, same: bool):
    assert same_stem(one, other) is same_stem(other, one) is same


def test_the_likeliest_of_many_words_with_one_beginning_are_compared():
    """A token for each sign: all of the list begins with the same two."""
    count = 4 * MAX_CANDIDATES_PER_WORD
    listed = RescoringList(
        pack_phrases([BiasingPhrase(f"Ab{i:04}") for i in range(count)]), lambda text: [*map(ord, text[1:])], str
    )
    row: Any = SimpleNamespace(hotwords=listed, hypothesis=SimpleNamespace(fixed=0))
    row.top_tokens = {0: {ord("A"): -1.0}, 1: {}}
    each: Any = SimpleNamespace(row=row, recognition=SimpleNamespace(tokens=(ord("O"), ord("k"))))
    places = CandidateGenerator(each, [RecognizedWord(0, 2, "Abe")])
    (probe,) = places.probes()
    seconds = [-4.0] * count
    seconds[-1] = -0.5
    found = [(one.word, one.score) for one in places.candidates([(probe, seconds)]) if one.score > -6]
    assert (count - 1, -1.5) in found
    assert len(found) <= MAX_CANDIDATES_PER_WORD + MAX_PHONETIC_MATCHES
