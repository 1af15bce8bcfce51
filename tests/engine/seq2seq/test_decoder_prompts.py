"""Rows that begin with several tokens: what the engine decodes after them is what the decoder says token by token,
whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tiny_moonshine
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_moonshine import WAIT_S, expect_empty, held, outcome
from tiny_whisper import CLIPS, CONFIG, SPECIAL, decoder, limit, start
from torch import Tensor

from asr_serve.decoding.seq2seq import DraftTokens, Recognition, SearchOptions, repeated_tokens
from asr_serve.decoding.token_rules import MAX_INITIAL
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.errors import Cancelled, OptionError, UnsupportedOption

ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}


def begins(index: int, options: SearchOptions) -> tuple[str, tuple[int, ...]]:
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


def allowed(logits: Tensor, start: tuple[int, ...], said: list[int], options: SearchOptions) -> Tensor:
    """Logits of what may come next, as transformers' generation has them."""
    process = pytest.importorskip("transformers.generation.logits_process", reason="the oracle: a dev dependency")
    ids, begin = torch.tensor([[*start, *said]]), len(start) + len(options.prefix)
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
    language, start = begins(index, options)
    most = min(limit(index), CONFIG.max_target_positions - len(start))
    silence = float(decoder(index).logits(start[: start.index(SPECIAL.sot) + 1]).softmax(0)[SPECIAL.no_speech])
    said: list[int] = []
    scores: list[float] = []
    finish = "stop"
    while True:
        logits = decoder(index).logits((*start, *said))
        if len(said) < len(options.prefix):
            token, known = options.prefix[len(said)], logits
        else:
            known = allowed(logits, start, said, options)
            token = int(known.argmax())
        scores.append(float(known.log_softmax(0)[token]))
        if token == SPECIAL.eot:
            break
        said.append(token)
        if (loop := min(repeated_tokens(said), len(said) - len(options.prefix))) > 0:
            del said[-loop:], scores[-loop:]
            finish = "repetition"
            break
        if len(said) == most:
            finish = "length"
            break
    chosen = scores[len(options.prefix) :]
    mean = sum(chosen) / max(1, len(chosen))
    return Recognition(tuple(said), mean, 0.0, finish, 1.0, language=language, no_speech_prob=silence)


def expect_same(came: object, wanted: Recognition) -> None:
    assert isinstance(came, Recognition), came
    assert (came.tokens, came.finish, came.language) == (wanted.tokens, wanted.finish, wanted.language)
    assert came.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)
    assert came.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=1e-5)


token = st.integers(0, SPECIAL.eot - 1)
asked = st.tuples(
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


@pytest.fixture(scope="module", params=["native", "twins"])
def client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_NATIVE", "1" if request.param == "native" else "0")
        started = start()
    yield started
    started.close()


@pytest.fixture
def begin() -> Iterator:
    started: list[EngineClient] = []

    def starting(**settings: Any) -> EngineClient:
        started.append(start(**settings))
        return started[-1]

    yield starting
    for each in started:
        each.close()


def ask(client: EngineClient, index: int, draft: DraftTokens = DraftTokens(), **options: Any) -> Recognition:  # noqa: B008
    return client.submit(CLIPS[index], SearchOptions(**ONCE | options), draft=draft).future.result(WAIT_S)


# --- what it says ---------------------------------------------------------------------------------


def test_the_clips_tell_apart_what_is_right():
    plain = [expected(i, SearchOptions(**ONCE)) for i in range(len(CLIPS))]
    timed = [expected(i, SearchOptions(timestamps=True, **ONCE)) for i in range(len(CLIPS))]
    assert len({answer.tokens for answer in plain + timed}) >= 2 * len(CLIPS) - 2
    assert {answer.language for answer in plain} == set(SPECIAL.languages)
    assert {answer.finish for answer in plain + timed} >= {"stop", "length"}


@settings(max_examples=12, deadline=None)
@given(st.lists(asked, min_size=1, max_size=8))
def test_any_batch_is_as_the_decoder_alone(client, wanted):
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        expect_same(outcome(ticket), expected(i, options))
    expect_empty(client)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(asked, st.data()), min_size=1, max_size=6))
def test_any_draft_is_as_without(client, wanted):
    """Drafts come after what the row begins with: right ones, wrong ones, those that fix what was said before."""
    tickets, answers = [], []
    with held(client):
        for (i, options), data in wanted:
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
            tickets.append(client.submit(CLIPS[i], options, "live", draft=DraftTokens(tuple(draft), fixed)))
            answers.append(right)
    for ticket, right in zip(tickets, answers, strict=True):
        came = outcome(ticket)
        assert isinstance(came, Recognition), came
        assert (came.tokens, came.finish, came.language) == (right.tokens, right.finish, right.language)
    expect_empty(client)


def test_rows_that_come_and_go_change_nothing(begin):
    client, chance = begin(max_decode_rows=3), random.Random(4)
    tickets, taken_back = [], set()
    kinds = [{"timestamps": True}, {"language": "en"}, {"prompt": (4, 5, 6)}, {"prefix": (9, 8)}, {}]
    for number in range(60):
        i, options = chance.randrange(len(CLIPS)), SearchOptions(**ONCE | chance.choice(kinds))
        tickets.append((i, options, client.submit(CLIPS[i], options, chance.choice(["live", "bulk"]))))
        if chance.random() < 0.3:
            taken_back.add(chance.randrange(number + 1))
            client.cancel(tickets[max(taken_back)][2])
        if chance.random() < 0.2:
            outcome(chance.choice(tickets)[2])
    for i, options, ticket in tickets:
        if (came := outcome(ticket)) is not Cancelled:
            expect_same(came, expected(i, options))
    expect_empty(client)


def test_a_start_costs_one_pass_and_a_right_draft_no_more(begin):
    client = begin()
    passes: list[list[int]] = []
    runner = client.backend.loop.executor.decode_runner
    ahead = runner.batch.prefill_inputs

    def watched(rows, feeds, firsts):
        passes.append([len(feed) for feed in feeds])
        return ahead(rows, feeds, firsts)

    runner.batch.prefill_inputs = watched
    plain = ask(client, 1, language="en", prompt=(1, 2, 3))
    assert passes == [[8]], "before, three of it, start, language, task, no timestamps"
    steps = client.describe()["steps"]
    assert ask(client, 1, DraftTokens(plain.tokens), language="en").finish == "stop"
    passes.clear()
    again = ask(client, 1, DraftTokens(plain.tokens), language="en", prompt=(1, 2, 3))
    assert passes == [[8 + len(plain.tokens)]]
    assert again.tokens == plain.tokens
    assert client.describe()["steps"] > steps
    passes.clear()
    ask(client, 1)
    assert passes == [[1], [4]], "the language is heard before the rest is said"


# --- bounds ---------------------------------------------------------------------------------------


def test_no_position_lies_past_the_models_last(begin):
    client = begin()
    longest: list[int] = []
    runner = client.backend.loop.executor.decode_runner
    forward = runner._run_forward

    def watched(at, rules):
        longest.append(int(at.token_lengths.max()))
        return forward(at, rules)

    runner._run_forward = watched
    for extra in ({}, {"timestamps": True}, {"prefix": (5,) * 60}, {"beam": 3}):
        came = ask(client, 0, prompt=tuple(range(60)), **extra)
        assert came.finish in ("length", "stop")
        assert max(longest) <= CONFIG.max_target_positions
        assert len(came.tokens) <= limit(0)
    expect_empty(client)


def test_max_tokens_counts_what_is_said(begin):
    client = begin()
    begun = [ask(client, 0, language="en", prompt=(1,) * count, prefix=(3, 4, 5) * 30) for count in (8, 31)]
    assert [len(answer.tokens) for answer in begun] == [limit(0), CONFIG.max_target_positions - 36]
    assert {answer.finish for answer in begun} == {"length"}


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
def test_what_the_model_cannot_do_is_refused_alone(begin, options, kind):
    client = begin()
    with held(client):
        wrong = client.submit(CLIPS[0], SearchOptions(**ONCE | options))
        right = client.submit(CLIPS[1], SearchOptions(**ONCE))
    assert outcome(wrong) is kind
    expect_same(outcome(right), expected(1, SearchOptions(**ONCE)))
    expect_empty(client)


@pytest.mark.parametrize("options", [{"task": "translate"}, {"timestamps": True}, {"prompt": (7, 8)}])
def test_a_model_that_only_hears_refuses_the_rest(options):
    client = tiny_moonshine.start()
    try:
        ticket = client.submit(tiny_moonshine.clip(0, 16_000), SearchOptions(**options))
        assert outcome(ticket) is UnsupportedOption
        expect_empty(client)
    finally:
        client.close()


def test_a_prefix_begins_any_models_answer():
    client = tiny_moonshine.start()
    try:
        came = client.submit(tiny_moonshine.clip(0, 16_000), SearchOptions(prefix=(9, 8, 7), **ONCE))
        drafted = client.submit(
            tiny_moonshine.clip(0, 16_000), SearchOptions(**ONCE), draft=DraftTokens((9, 8, 7), accepted_tokens=3)
        )
        assert outcome(came).tokens[:3] == (9, 8, 7)
        assert outcome(came).tokens == outcome(drafted).tokens
    finally:
        client.close()


def test_a_model_without_rules_is_not_slowed(begin):
    client = tiny_moonshine.start()
    try:
        runner = client.backend.loop.executor.decode_runner
        assert runner.prompts.rules is None

        def never(*_: object) -> None:
            raise AssertionError("rules were applied")

        runner._step_ruled = runner._step_timed = runner._step_timed_prefill = never
        runner.batch.prefill_inputs = never
        came = client.submit(tiny_moonshine.clip(0, 16_000), SearchOptions(**ONCE))
        assert isinstance(outcome(came), Recognition)
    finally:
        client.close()


# --- silence, tries, rules ------------------------------------------------------------------------


def test_what_is_improbable_where_nobody_speaks_is_empty(begin):
    client = begin()
    heard = ask(client, 3)
    assert heard.tokens
    assert heard.no_speech_prob > 0.01
    silent = {"max_no_speech": heard.no_speech_prob / 2}
    empty = ask(client, 3, **silent, min_avg_logprob=0.0, temperatures=(0.0, 0.5))
    assert (empty.tokens, empty.logprobs, empty.temperature) == ((), (), 0.0)
    assert empty.avg_logprob == pytest.approx(heard.avg_logprob)
    assert empty.no_speech_prob == heard.no_speech_prob
    assert ask(client, 3, **silent).tokens == heard.tokens, "what is probable was spoken"
    kept = ask(client, 3, max_no_speech=1.0, min_avg_logprob=0.0)
    assert kept.tokens == heard.tokens, "somebody speaks"


@pytest.mark.parametrize("timestamps", [False, True])
def test_every_try_keeps_the_rules_and_what_was_given(begin, timestamps):
    """No answer passes, so each temperature is tried, from the start tokens on."""
    client = begin(window="packed")
    seen: list[Recognition] = []
    runner = client.backend.loop.executor.decode_runner
    leave = runner.remove_row

    def watched(row):
        seen.extend(row.hypothesis.rejected)
        leave(row)

    runner.remove_row = watched
    hard = {"temperatures": (0.0, 0.8, 1.5), "min_avg_logprob": 0.0, "max_no_speech": 1.0}
    for i in range(len(CLIPS)):
        ask(client, i, **hard, timestamps=timestamps, prompt=(3, 4, 5), prefix=(7, 6))
    assert client.describe()["fallbacks"] == 2 * len(CLIPS)
    assert [answer.temperature for answer in seen] == [0.0, 0.8, 1.5] * len(CLIPS)
    assert len({answer.tokens for answer in seen}) > 2 * len(CLIPS)
    for answer in seen:
        assert answer.tokens[:2] == (7, 6)
        _, start = begins(0, SearchOptions(language=answer.language, timestamps=timestamps, prompt=(3, 4, 5)))
        for at in range(2, len(answer.tokens)):
            options = SearchOptions(timestamps=timestamps, prefix=(7, 6))
            logits = torch.full((CONFIG.vocab_size,), -50.0)
            logits[answer.tokens[at]] = 0.0
            assert allowed(logits, start, list(answer.tokens[:at]), options)[answer.tokens[at]] == 0
    expect_empty(client)


def test_compression_is_judged_by_the_words_alone(begin):
    client = begin()
    judged: list[list[int]] = []
    requests = client.backend.loop.executor.requests
    requests.text = lambda tokens: judged.append(tokens) or ""
    came = ask(client, 0, timestamps=True)
    assert judged == [[t for t in came.tokens if t < SPECIAL.eot]]
    assert len(judged[0]) < len(came.tokens)


def test_an_english_model_hears_no_language(begin):
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    runner.model.special_tokens = runner.prompts.special = SPECIAL._replace(multilingual=False)
    for timestamps, first in ((False, (SPECIAL.sot, SPECIAL.no_timestamps)), (True, (SPECIAL.sot,))):
        came = ask(client, 1, timestamps=timestamps)
        assert came.language == ""
        silence = float(decoder(1).logits((SPECIAL.sot,)).softmax(0)[SPECIAL.no_speech])
        assert came.no_speech_prob == pytest.approx(silence, abs=1e-5)
        scores = allowed(decoder(1).logits(first), first, [], SearchOptions(timestamps=timestamps))
        assert came.tokens[0] == int(scores.argmax())
    expect_empty(client)


# --- options ----------------------------------------------------------------------------------------


def test_options_and_answers_travel():
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
