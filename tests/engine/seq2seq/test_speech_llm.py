"""Speech LLMs in the engine: prompts with audio in them are fed in parts beside rows that decode, and every answer is
what the decoder says alone."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tiny_speech_llm
from engine_clients import poison_free_pages, spy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_moonshine import WAIT_S, clip, expect_empty, held, outcome
from tiny_speech_llm import CLIPS, CONFIG, EOS, LANGUAGES, STOP, SYSTEM, decoder, limit

from asr_serve.config import EngineConfig
from asr_serve.decoding.beam_search import BeamSearch
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.hypothesis import Recognition, repeated_tokens
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.engine.builder import build_loop
from asr_serve.engine.client import EngineClient
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.prompt_chunks import MIN_CHUNK_POSITIONS
from asr_serve.errors import Cancelled, OptionError, StepFailed, UnsupportedOption
from asr_serve.kernels import PAGE

ENGINE = tiny_speech_llm
ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}


@cache
def expected(index: int, options: SearchOptions) -> Recognition:
    """Greedy, a token at a time, by the decoder alone."""
    alone, most = decoder(index, options.language, options.prompt), limit(index, options)
    tokens: list[int] = []
    scores: list[float] = []
    finish = "stop"
    while True:
        logits = alone.logits(tuple(tokens))
        given = len(tokens) < min(len(options.prefix), most - 1)
        token = options.prefix[len(tokens)] if given else int(logits.argmax())
        scores.append(float(logits.log_softmax(0)[token]))
        if token in (EOS, STOP):
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
    return Recognition(tuple(tokens), sum(chosen) / max(1, len(chosen)), 0.0, finish, 1.0, language=options.language)


@cache
def expected_beams(index: int, options: SearchOptions) -> tuple[int, ...]:
    """Tokens of the best of `options.beam` hypotheses, each followed by the decoder alone."""
    alone = decoder(index, options.language, options.prompt)
    search = BeamSearch(options.beam, EOS, limit(index, options), stop_tokens=(STOP,))
    while True:
        leading = []
        for hypothesis in search.live:
            best = alone.logits(hypothesis.tokens).log_softmax(0).topk(search.choices)
            leading.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        if not search.advance(leading):
            return search.n_best()[0][0].tokens


def expect_right(index: int, options: SearchOptions, result: object) -> None:
    assert isinstance(result, Recognition), result
    if options.beam > 1:
        assert result.tokens == expected_beams(index, options)
        return
    wanted = expected(index, options)
    assert (result.tokens, result.finish, result.language) == (wanted.tokens, wanted.finish, wanted.language)
    assert result.avg_logprob == pytest.approx(wanted.avg_logprob, abs=1e-4)


token = st.integers(0, EOS - 1).filter(lambda token: token != STOP)
requests = st.tuples(
    st.integers(0, len(CLIPS) - 1),
    st.builds(
        SearchOptions,
        language=st.sampled_from(["", *LANGUAGES]),
        prompt=st.just(()) | st.lists(token, max_size=20).map(tuple),
        prefix=st.just(()) | st.lists(token, max_size=4).map(tuple),
        hurried=st.booleans(),
        **{name: st.just(value) for name, value in ONCE.items()},
    ),
)


def transcribe(client: EngineClient, index: int, draft: DraftTokens = NO_DRAFT, **options: Any) -> Recognition:
    return client.submit(CLIPS[index], SearchOptions(**ONCE | options), draft=draft).future.result(WAIT_S)


def test_clips_have_answers_that_tell_them_apart() -> None:
    answers = [expected(i, SearchOptions(language=code, **ONCE)) for i in range(len(CLIPS)) for code in LANGUAGES]
    assert len({answer.tokens for answer in answers}) >= len(answers) - 1
    assert {answer.finish for answer in answers} >= {"stop", "length"}


# --- answers --------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8), st.sampled_from([1, 20, 64, 10_000]))
def test_any_batch_in_any_parts_equals_the_decoder_alone(client, wanted, step_positions) -> None:
    runner = client.backend.loop.executor.decode_runner
    with held(client):
        runner.step_positions = step_positions
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        expect_right(i, options, outcome(ticket))
    expect_empty(client)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(requests, st.data()), min_size=1, max_size=6))
def test_any_draft_leaves_the_answer_as_without(client, wanted) -> None:
    tickets, answers = [], []
    with held(client):
        for (i, options), data in wanted:
            right = expected(i, options)
            draft = list(right.tokens)
            fixed = data.draw(st.integers(0, len(draft))) if right.finish != "repetition" else 0
            if fixed < len(draft) and data.draw(st.booleans()):
                draft[data.draw(st.integers(fixed, len(draft) - 1))] = data.draw(token)
            tickets.append(client.submit(CLIPS[i], options, "live", draft=DraftTokens(tuple(draft), fixed)))
            answers.append(right)
    for ticket, right in zip(tickets, answers, strict=True):
        result = outcome(ticket)
        assert isinstance(result, Recognition), result
        assert (result.tokens, result.finish) == (right.tokens, right.finish)
    expect_empty(client)


def test_beams_equal_a_search_by_the_decoder_alone(client) -> None:
    wanted = [(i, SearchOptions(beam=beam, **ONCE)) for i in range(4) for beam in (1, 2, 4)]
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        expect_right(i, options, outcome(ticket))
    assert len({expected_beams(0, SearchOptions(beam=beam, **ONCE)) for beam in (1, 2, 4)}) > 1
    expect_empty(client)


def test_every_fallback_starts_after_the_prompt(begin) -> None:
    client = begin()
    hard = {"temperatures": (0.0, 0.8, 1.5), "min_avg_logprob": 0.0}
    rejected: list[Recognition] = []
    runner = client.backend.loop.executor.decode_runner
    spy(runner, "remove_row", lambda row: rejected.extend(row.hypothesis.rejected))
    transcribe(client, 0, **hard)
    assert [answer.temperature for answer in rejected] == [0.0, 0.8, 1.5]
    assert rejected[0].tokens == expected(0, SearchOptions(**ONCE)).tokens
    expect_empty(client)


def test_hotwords_are_scored_over_the_prompt(begin) -> None:
    """Words of great weight take the place of others, with the probability that they have after the audio."""
    client, options = begin(), SearchOptions(**ONCE)
    plain = expected(1, options)
    words = [BiasingPhrase(f"w{token}", 1e4) for token in range(EOS) if token not in (*plain.tokens, STOP)]
    biased = transcribe(client, 1, bias=pack_phrases(words))
    pairs = zip(biased.tokens, plain.tokens, strict=True)
    at = next(place for place, (token, said) in enumerate(pairs) if token != said)
    scores = decoder(1).logits(biased.tokens[:at]).log_softmax(0)
    assert biased.logprobs[at] == pytest.approx(float(scores[biased.tokens[at]]), abs=1e-4)
    expect_empty(client)


# --- prefill --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_positions", [24, 50])
def test_a_long_prompt_never_stalls_rows_that_decode(begin, step_positions) -> None:
    """Every pass is bounded, and every row that decodes gets a token in each."""
    client, wanted = begin(), (0, 5, 5, 5)
    runner, options = client.backend.loop.executor.decode_runner, SearchOptions(**ONCE)
    runner.step_positions = step_positions
    passes: list[int] = []
    spy(runner, "_run_forward", lambda at, _: passes.append(len(at.tokens)))
    steps: list[dict[int, int]] = []
    spy(runner, "step", lambda: steps.append({row.request_id: len(row.tokens) for row in runner.rows}))
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i in wanted]
    for i, ticket in zip(wanted, tickets, strict=True):
        expect_right(i, options, outcome(ticket))
    longest = max(step_positions, len(wanted) + MIN_CHUNK_POSITIONS)
    assert max(passes) <= -(-longest // 8) * 8, "rounded up as the device wants it"
    beside = [step for step in steps if 0 < len(step) < len(wanted)]
    assert beside, "no row decoded while a prompt was fed"
    for before, after in pairwise(steps):
        assert all(after[row] == count + 1 for row, count in before.items() if row in after)
    expect_empty(client)


def test_rows_whose_clients_wait_are_fed_first(begin) -> None:
    client = begin()
    runner, fed = client.backend.loop.executor.decode_runner, list[bool]()
    runner.step_positions = 32
    spy(runner.batch, "set_embeddings", lambda _, chunks: fed.append(chunks[0].row.hypothesis.options.hurried))
    options = SearchOptions(**ONCE)
    with held(client):
        slow = [client.submit(CLIPS[5], options) for _ in range(3)]
        fast = client.submit(CLIPS[5], SearchOptions(**ONCE, hurried=True))
    for ticket in (*slow, fast):
        expect_right(5, options, outcome(ticket))
    assert fed == sorted(fed, reverse=True), "a prompt for which nobody waits was fed first"
    assert sum(fed) > 3
    expect_empty(client)


# --- prefix cache ---------------------------------------------------------------------------------


def test_a_shared_prompt_is_computed_once(begin) -> None:
    client = begin(prefix_bytes=1 << 20)
    stats = client.backend.loop.stats
    poison_free_pages(client.backend.loop.executor.decode_runner)
    first = transcribe(client, 0, language="en")
    assert stats.positions_reused == 0
    for count, (i, code) in enumerate([(1, "en"), (3, "de"), (0, "de")], 1):
        expect_right(i, SearchOptions(language=code, **ONCE), transcribe(client, i, language=code))
        assert stats.positions_reused == count * (len(SYSTEM) // PAGE * PAGE)
    assert transcribe(client, 0, language="en").tokens == first.tokens
    assert stats.cache_hits["answer"] == 1, "the same answer is not computed twice"
    expect_empty(client)


def test_the_same_audio_at_once_is_answered_for_all(begin) -> None:
    """Audio in a prompt is in no cache of its own: requests that wait for another's encode theirs."""
    client = begin(prefix_bytes=1 << 20)
    wanted = [SearchOptions(language=code, prompt=prompt, **ONCE) for code in LANGUAGES for prompt in ((), (4, 5))]
    with held(client):
        tickets = [client.submit(CLIPS[3], options) for options in (*wanted, *wanted)]
        client.cancel(tickets[0])
    assert outcome(tickets[0]) is Cancelled
    for options, ticket in zip((*wanted, *wanted)[1:], tickets[1:], strict=True):
        expect_right(3, options, outcome(ticket))
    expect_empty(client)


# --- load and bounds ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_many_requests_with_cancellations(begin, prefix_bytes) -> None:
    client, chance = begin(max_decode_rows=6, prefix_bytes=prefix_bytes), random.Random(prefix_bytes)
    runner = client.backend.loop.executor.decode_runner
    runner.step_positions = 40
    poison_free_pages(runner)
    kinds = [{"language": "en"}, {"prompt": (4, 5, 6)}, {"prefix": (9, 8)}, {"beam": 3}, {"hurried": True}, {}]
    tickets, cancelled = [], 0
    for number in range(64):
        i, options = chance.randrange(len(CLIPS)), SearchOptions(**ONCE | chance.choice(kinds))
        tickets.append((i, options, client.submit(CLIPS[i], options, chance.choice(["live", "bulk"]))))
        if chance.random() < 0.3:
            client.cancel(tickets[chance.randrange(number + 1)][2])
        if chance.random() < 0.2:
            outcome(chance.choice(tickets)[2])
    for i, options, ticket in tickets:
        if (result := outcome(ticket)) is Cancelled:
            cancelled += 1
        else:
            expect_right(i, options, result)
    assert 0 < cancelled < 30
    expect_empty(client)


def test_a_failed_step_fails_its_requests_and_frees_their_pages(begin) -> None:
    client = begin()
    runner = client.backend.loop.executor.decode_runner
    original, calls = runner.model.decode, []

    def fail_second(*inputs: Any) -> Any:
        calls.append(len(inputs[0]))
        if len(calls) == 2:
            raise RuntimeError("the device hiccuped")
        return original(*inputs)

    runner.step_positions = 32
    runner.model.decode = fail_second
    failed = client.submit(CLIPS[5], SearchOptions(**ONCE))
    assert outcome(failed) is StepFailed
    expect_empty(client)
    expect_right(0, SearchOptions(**ONCE), transcribe(client, 0))


def test_answers_end_with_the_models_positions(begin) -> None:
    client = begin()
    prompt = (5,) * (CONFIG.max_position_embeddings - len(SYSTEM) - 3 - 7 - 10)  # clip 2 has 7 frames; 10 are left
    result = transcribe(client, 2, prompt=prompt, min_avg_logprob=-1e9)
    assert len(result.tokens) <= 10
    expect_right(2, SearchOptions(prompt=prompt, **ONCE), result)
    expect_empty(client)


@pytest.mark.parametrize(
    ("samples", "options", "kind"),
    [
        (8 * 16_000, {}, OptionError),
        (16_000, {"prompt": (1,) * 300}, OptionError),
        (16_000, {"words": True}, UnsupportedOption),
        (16_000, {"language": "xx"}, OptionError),
        (16_000, {"task": "translate"}, OptionError),
        (16_000, {"prefix": (-1,)}, OptionError),
        (16_000, {"prefix": (STOP,)}, OptionError),
        (16_000, {"beam": 13}, OptionError),
    ],
)
def test_an_impossible_request_is_refused_alone(begin, samples, options, kind) -> None:
    """Eight seconds are 200 frames, for which the prompt has no room."""
    client = begin()
    with held(client):
        wrong = client.submit(clip(1, samples), SearchOptions(**ONCE | options))
        right = client.submit(CLIPS[1], SearchOptions(**ONCE))
    assert outcome(wrong) is kind
    expect_right(1, SearchOptions(**ONCE), outcome(right))
    expect_empty(client)


def test_audio_takes_pages_of_the_prompt_alone() -> None:
    made = tiny_speech_llm.build()
    runner = DecodeRunner(made.model, made.device, 2, 0, 0)
    assert runner.page_pool.pages == 1 + CONFIG.max_position_embeddings // PAGE, "one longest sequence at least"
    assert runner.pages_needed(100, 20) == -(-(len(SYSTEM) + 3 + 100 + 19) // PAGE)


@pytest.mark.parametrize("settings", [{"role": "encode"}, {"peers": ("127.0.0.1:9",)}])
def test_roles_are_refused(settings: dict[str, Any]) -> None:
    """Peers carry what cross-attention reads."""
    with pytest.raises(OptionError, match="reads audio in its prompt"):
        build_loop(
            tiny_speech_llm.build(),
            tiny_speech_llm.CARD,
            EngineConfig(**settings),
            lambda _: None,
            lambda: None,
            meeting=HandshakeSettings("weights"),
        )
