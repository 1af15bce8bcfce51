"""Rows that begin with several tokens: the engine decodes after them what the decoder gives token by token,
whatever else is in the batch."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tiny_moonshine
import torch
from engine_clients import spy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_moonshine import WAIT_S, expect_empty, held, outcome
from tiny_whisper import CLIPS, CONFIG, SPECIAL, decoder, limit
from torch import Tensor

from asr_serve.decoding.hypothesis import Recognition, repeated_tokens
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.decoding.token_rules import MAX_INITIAL
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.errors import Cancelled, OptionError, UnsupportedOption

ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}


def initial_tokens(index: int, options: SearchOptions) -> tuple[str, tuple[int, ...]]:
    """The language, and every token before the answer."""
    language = options.language
    if not language:
        logits = decoder(index).logits((SPECIAL.sot,))
        language = max(SPECIAL.languages, key=lambda code: float(logits[SPECIAL.languages[code]]))
    kept = options.prompt[-(CONFIG.max_target_positions // 2 - 1) :]
    before = (SPECIAL.sot_prev, *kept) if kept else ()
    task = SPECIAL.translate if options.task == "translate" else SPECIAL.transcribe
    times = () if options.timestamps else (SPECIAL.no_timestamps,)
    return language, (*before, SPECIAL.sot, SPECIAL.languages[language], task, *times)


def allowed_logits(logits: Tensor, start: tuple[int, ...], tokens: list[int], options: SearchOptions) -> Tensor:
    """Logits of what may come next, as transformers' generation has them."""
    process = pytest.importorskip("transformers.generation.logits_process", reason="the oracle: a dev dependency")
    ids, begin = torch.tensor([[*start, *tokens]]), len(start) + len(options.prefix)
    rules = [
        process.SuppressTokensLogitsProcessor(list(SPECIAL.suppress)),
        process.SuppressTokensAtBeginLogitsProcessor(list(SPECIAL.suppress_first), begin),
    ]
    if options.timestamps:
        config = SimpleNamespace(
            no_timestamps_token_id=SPECIAL.no_timestamps,
            eos_token_id=SPECIAL.eot,
            max_initial_timestamp_index=MAX_INITIAL,
        )
        rules.append(process.WhisperTimeStampLogitsProcessor(config, begin))
    scores = logits[None]
    for rule in rules:
        scores = rule(ids, scores)
    return scores[0]


@cache
def expected(index: int, options: SearchOptions) -> Recognition:
    """Greedy, a token at a time, by the decoder alone."""
    language, start = initial_tokens(index, options)
    most = min(limit(index), CONFIG.max_target_positions - len(start))
    silence = float(decoder(index).logits(start[: start.index(SPECIAL.sot) + 1]).softmax(0)[SPECIAL.no_speech])
    tokens: list[int] = []
    scores: list[float] = []
    finish = "stop"
    while True:
        logits = decoder(index).logits((*start, *tokens))
        if len(tokens) < len(options.prefix):
            token, known = options.prefix[len(tokens)], logits
        else:
            known = allowed_logits(logits, start, tokens, options)
            token = int(known.argmax())
        scores.append(float(known.log_softmax(0)[token]))
        if token == SPECIAL.eot:
            break
        tokens.append(token)
        if (loop := min(repeated_tokens(tokens), len(tokens) - len(options.prefix))) > 0:
            del tokens[-loop:], scores[-loop:]
            finish = "repetition"
            break
        if len(tokens) == most:
            finish = "length"
            break
    chosen = scores[len(options.prefix) :]
    mean = sum(chosen) / max(1, len(chosen))
    return Recognition(tuple(tokens), mean, 0.0, finish, 1.0, language=language, no_speech_prob=silence)


def expect_same(result: object, wanted: Recognition) -> None:
    assert isinstance(result, Recognition), result
    assert (result.tokens, result.finish, result.language) == (wanted.tokens, wanted.finish, wanted.language)
    assert result.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
    assert result.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=1e-5)


token = st.integers(0, SPECIAL.eot - 1)
requests = st.tuples(
    st.integers(0, len(CLIPS) - 1),
    st.builds(
        SearchOptions,
        language=st.sampled_from(["", *SPECIAL.languages]),
        task=st.sampled_from(["transcribe", "translate"]),
        timestamps=st.booleans(),
        prompt=st.just(()) | st.lists(token, max_size=50).map(tuple),
        prefix=st.just(()) | st.lists(token, max_size=4).map(tuple),
        **{name: st.just(value) for name, value in ONCE.items()},
    ),
)


@pytest.fixture
def moonshine(close_later: Any) -> EngineClient:
    return close_later(tiny_moonshine.start())


def transcribe(client: EngineClient, index: int, draft: DraftTokens = NO_DRAFT, **options: Any) -> Recognition:
    return client.submit(CLIPS[index], SearchOptions(**ONCE | options), draft=draft).future.result(WAIT_S)


# --- what it says ---------------------------------------------------------------------------------


def test_clips_have_answers_that_tell_them_apart():
    plain = [expected(i, SearchOptions(**ONCE)) for i in range(len(CLIPS))]
    timed = [expected(i, SearchOptions(timestamps=True, **ONCE)) for i in range(len(CLIPS))]
    assert len({answer.tokens for answer in plain + timed}) >= 2 * len(CLIPS) - 2
    assert {answer.language for answer in plain} == set(SPECIAL.languages)
    assert {answer.finish for answer in plain + timed} >= {"stop", "length"}


@settings(max_examples=12, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8))
def test_any_batch_equals_the_decoder_alone(client, wanted):
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        expect_same(outcome(ticket), expected(i, options))
    expect_empty(client)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(requests, st.data()), min_size=1, max_size=6))
def test_any_draft_leaves_the_answer_as_without(client, wanted):
    """Drafts come after the initial tokens: right ones, wrong ones, those with accepted tokens."""
    drafts, answers = [], []
    for (i, options), data in wanted:  # all is drawn before any is submitted: a draw may end the example
        right = expected(i, options)
        draft = list(right.tokens)
        fixed = data.draw(st.integers(0, len(draft)))
        if right.finish == "repetition":
            fixed = 0
        match data.draw(st.sampled_from(["right", "flipped", "short", "other"])):
            case "flipped" if fixed < len(draft):
                at = data.draw(st.integers(fixed, len(draft) - 1))
                draft[at] = data.draw(st.integers(0, CONFIG.vocab_size - 1))
            case "short":
                draft = draft[: max(fixed, data.draw(st.integers(0, len(draft))))]
            case "other":
                draft, fixed = data.draw(st.lists(token, max_size=30)), 0
        drafts.append(DraftTokens(tuple(draft), fixed))
        answers.append(right)
    with held(client):
        tickets = [
            client.submit(CLIPS[i], options, "live", draft=draft)
            for ((i, options), _), draft in zip(wanted, drafts, strict=True)
        ]
    for ticket, right in zip(tickets, answers, strict=True):
        result = outcome(ticket)
        assert isinstance(result, Recognition), result
        assert (result.tokens, result.finish, result.language) == (right.tokens, right.finish, right.language)
    expect_empty(client)


def test_cancelled_rows_leave_other_answers_alone(begin):
    client, chance = begin(max_decode_rows=3), random.Random(4)
    tickets, cancelled = [], set()
    kinds = [{"timestamps": True}, {"language": "en"}, {"prompt": (4, 5, 6)}, {"prefix": (9, 8)}, {}]
    for number in range(60):
        i, options = chance.randrange(len(CLIPS)), SearchOptions(**ONCE | chance.choice(kinds))
        tickets.append((i, options, client.submit(CLIPS[i], options, chance.choice(["live", "bulk"]))))
        if chance.random() < 0.3:
            cancelled.add(chance.randrange(number + 1))
            client.cancel(tickets[max(cancelled)][2])
        if chance.random() < 0.2:
            outcome(chance.choice(tickets)[2])
    for i, options, ticket in tickets:
        if (result := outcome(ticket)) is not Cancelled:
            expect_same(result, expected(i, options))
    expect_empty(client)


def test_initial_tokens_and_a_right_draft_cost_one_pass(begin):
    client = begin()
    passes: list[list[int]] = []
    batch = client.backend.loop.executor.decode_runner.batch
    spy(batch, "prefill_inputs", lambda rows, feeds, firsts: passes.append([len(feed) for feed in feeds]))
    plain = transcribe(client, 1, language="en", prompt=(1, 2, 3))
    assert passes == [[8]], "before, three of it, start, language, task, no timestamps"
    steps = client.describe()["steps"]
    assert transcribe(client, 1, DraftTokens(plain.tokens), language="en").finish == "stop"
    passes.clear()
    again = transcribe(client, 1, DraftTokens(plain.tokens), language="en", prompt=(1, 2, 3))
    assert passes == [[8 + len(plain.tokens)]]
    assert again.tokens == plain.tokens
    assert client.describe()["steps"] > steps
    passes.clear()
    transcribe(client, 1)
    assert passes == [[1], [4]], "the language is detected before the rest is decoded"


# --- bounds ---------------------------------------------------------------------------------------


def test_no_position_lies_past_the_models_last(begin):
    client = begin()
    longest: list[int] = []
    runner = client.backend.loop.executor.decode_runner
    spy(runner, "_run_forward", lambda at, rules: longest.append(int(at.token_lengths.max())))
    for extra in ({}, {"timestamps": True}, {"prefix": (5,) * 60}, {"beam": 3}):
        result = transcribe(client, 0, prompt=tuple(range(60)), **extra)
        assert result.finish in ("length", "stop")
        assert max(longest) <= CONFIG.max_target_positions
        assert len(result.tokens) <= limit(0)
    expect_empty(client)


def test_max_tokens_counts_what_is_tokens(begin):
    client = begin()
    answers = [transcribe(client, 0, language="en", prompt=(1,) * count, prefix=(3, 4, 5) * 30) for count in (8, 31)]
    assert [len(answer.tokens) for answer in answers] == [limit(0), CONFIG.max_target_positions - 36]
    assert {answer.finish for answer in answers} == {"length"}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"language": "xx"}, OptionError),
        ({"prefix": (SPECIAL.eot,)}, OptionError),
        ({"prefix": (CONFIG.vocab_size,)}, OptionError),
        ({"prefix": (-1,)}, OptionError),
        ({"prompt": (SPECIAL.sot,)}, OptionError),
        ({"beam": 13}, OptionError),
    ],
)
def test_an_impossible_request_is_refused_alone(begin, options, kind):
    client = begin()
    with held(client):
        wrong = client.submit(CLIPS[0], SearchOptions(**ONCE | options))
        right = client.submit(CLIPS[1], SearchOptions(**ONCE))
    assert outcome(wrong) is kind
    expect_same(outcome(right), expected(1, SearchOptions(**ONCE)))
    expect_empty(client)


@pytest.mark.parametrize("options", [{"task": "translate"}, {"timestamps": True}, {"prompt": (7, 8)}])
def test_a_model_without_prompts_refuses_their_options(moonshine, options):
    ticket = moonshine.submit(tiny_moonshine.clip(0, 16_000), SearchOptions(**options))
    assert outcome(ticket) is UnsupportedOption
    expect_empty(moonshine)


def test_a_prefix_begins_any_models_answer(moonshine):
    pcm, accepted = tiny_moonshine.clip(0, 16_000), DraftTokens((9, 8, 7), accepted_tokens=3)
    prefixed = moonshine.submit(pcm, SearchOptions(prefix=(9, 8, 7), **ONCE))
    drafted = moonshine.submit(pcm, SearchOptions(**ONCE), draft=accepted)
    assert outcome(prefixed).tokens[:3] == (9, 8, 7)
    assert outcome(prefixed).tokens == outcome(drafted).tokens


def test_a_model_without_rules_takes_the_plain_path(moonshine):
    runner = moonshine.backend.loop.executor.decode_runner
    assert runner.prompts.rules is None

    def never(*_: object) -> None:
        raise AssertionError("rules were applied")

    runner._step_ruled = runner._step_timed = runner._step_timed_prefill = never
    runner.batch.prefill_inputs = never
    ticket = moonshine.submit(tiny_moonshine.clip(0, 16_000), SearchOptions(**ONCE))
    assert isinstance(outcome(ticket), Recognition)


# --- silence, tries, rules ------------------------------------------------------------------------


def test_improbable_text_in_silence_is_dropped(begin):
    client = begin()
    speech = transcribe(client, 3)
    assert speech.tokens
    assert speech.no_speech_prob > 0.01
    silent = {"max_no_speech": speech.no_speech_prob / 2}
    empty = transcribe(client, 3, **silent, min_avg_logprob=0.0, temperatures=(0.0, 0.5))
    assert (empty.tokens, empty.logprobs, empty.temperature) == ((), (), 0.0)
    assert empty.avg_logprob == pytest.approx(speech.avg_logprob)
    assert empty.no_speech_prob == speech.no_speech_prob
    assert transcribe(client, 3, **silent).tokens == speech.tokens, "what is probable was spoken"
    certain = transcribe(client, 3, max_no_speech=1.0, min_avg_logprob=0.0)
    assert certain.tokens == speech.tokens, "somebody speaks"


@pytest.mark.parametrize("timestamps", [False, True])
def test_every_fallback_keeps_rules_prompt_and_prefix(begin, timestamps):
    """No answer passes, so each temperature is tried, from the start tokens on."""
    client = begin(window="packed")
    seen: list[Recognition] = []
    runner = client.backend.loop.executor.decode_runner
    spy(runner, "remove_row", lambda row: seen.extend(row.hypothesis.rejected))
    hard = {"temperatures": (0.0, 0.8, 1.5), "min_avg_logprob": 0.0, "max_no_speech": 1.0}
    for i in range(len(CLIPS)):
        transcribe(client, i, **hard, timestamps=timestamps, prompt=(3, 4, 5), prefix=(7, 6))
    assert client.describe()["fallbacks"] == 2 * len(CLIPS)
    assert [answer.temperature for answer in seen] == [0.0, 0.8, 1.5] * len(CLIPS)
    assert len({answer.tokens for answer in seen}) > 2 * len(CLIPS)
    for answer in seen:
        assert answer.tokens[:2] == (7, 6)
        _, start = initial_tokens(0, SearchOptions(language=answer.language, timestamps=timestamps, prompt=(3, 4, 5)))
        for at in range(2, len(answer.tokens)):
            options = SearchOptions(timestamps=timestamps, prefix=(7, 6))
            logits = torch.full((CONFIG.vocab_size,), -50.0)
            logits[answer.tokens[at]] = 0.0
            assert allowed_logits(logits, start, list(answer.tokens[:at]), options)[answer.tokens[at]] == 0
    expect_empty(client)


def test_compression_ignores_special_tokens(begin):
    client = begin()
    judged: list[list[int]] = []
    requests = client.backend.loop.executor.requests
    requests.text = lambda tokens: judged.append(tokens) or ""
    result = transcribe(client, 0, timestamps=True)
    assert judged == [[t for t in result.tokens if t < SPECIAL.eot]]
    assert len(judged[0]) < len(result.tokens)


def test_an_english_model_detects_no_language(begin):
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    runner.model.special_tokens = runner.prompts.special = SPECIAL._replace(multilingual=False)
    for timestamps, first in ((False, (SPECIAL.sot, SPECIAL.no_timestamps)), (True, (SPECIAL.sot,))):
        result = transcribe(client, 1, timestamps=timestamps)
        assert result.language == ""
        silence = float(decoder(1).logits((SPECIAL.sot,)).softmax(0)[SPECIAL.no_speech])
        assert result.no_speech_prob == pytest.approx(silence, abs=1e-5)
        scores = allowed_logits(decoder(1).logits(first), first, [], SearchOptions(timestamps=timestamps))
        assert result.tokens[0] == int(scores.argmax())
    expect_empty(client)


# --- options ----------------------------------------------------------------------------------------


def test_options_and_answers_survive_the_wire():
    options = SearchOptions(
        task="translate", language="de", prompt=(1, 2), prefix=(3,), timestamps=True, beam=5, max_no_speech=0.4
    )
    submit = messages.SubmitUtterance(1, 5, 5, options, "live", DraftTokens(), None, 7)
    sent = messages.decode_to_engine(messages.encode(submit))
    assert sent.options == options
    answer = Recognition((1, 2), -0.5, 0.0, "stop", 1.0, (-0.4, -0.6), language="de", no_speech_prob=0.25)
    assert messages.decode_to_server(messages.encode(messages.UtteranceDone(1, answer))).recognition == answer


@pytest.mark.parametrize(
    "options",
    [
        {"task": "summarise"},
        {"beam": 0},
        {"beam": 65},
        {"max_no_speech": -0.1},
        {"max_no_speech": 1.1},
        {"prompt": (1,) * 5_000},
        {"prefix": (1,) * 5_000},
    ],
)
def test_options_out_of_range_are_refused(options):
    name = next(iter(options))
    with pytest.raises(OptionError, match=name) as refused:
        SearchOptions(**options)
    assert refused.value.param == name
    with pytest.raises(OptionError, match=name):
        msgspec.structs.replace(SearchOptions(), **options)
