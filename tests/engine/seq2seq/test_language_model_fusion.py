"""Language models in the beam search of attention decoders: the engine finds what the search written out plainly
does, beside rows without a model or with another one."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import pytest
import tiny_moonshine
import torch
from test_batched_beam_search import expect_searched
from test_batched_beam_search import searched as searched_plainly
from test_decoder_prompts import ONCE, allowed_logits, initial_tokens
from tiny_moonshine import WAIT_S, expect_empty, held, outcome
from tiny_whisper import CARD, CLIPS, CONFIG, SPECIAL, build, limit
from tiny_whisper import decoder as whisper_decoder
from token_language_model import sentence_logprob, token_model

from asr_serve.config import EngineConfig
from asr_serve.decoding.beam_search import NEAR, BeamSearch, language_scores, language_state_after
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import UNSEEN_LOGPROB, LanguageModelFusion
from asr_serve.decoding.language_model.token_models import TokenLanguageModel
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import UnsupportedOption
from asr_serve.models.ngram import NgramModel
from asr_serve.types import LanguageModelChoice

WEIGHT = 0.6


@cache
def language_model(seed: int) -> NgramModel:
    """Model of two in three of the text tokens."""
    return token_model(seed, [token for token in range(SPECIAL.eot) if token % 3 != seed % 3])


@cache
def searched(index: int, options: SearchOptions, seed: int) -> tuple[tuple[int, ...], float, str]:
    """Every path that goes on from the best few, ranked by the decoder and the language model together: the tokens,
    the mean of the decoder's log-probabilities with that of the end, and how it ends."""
    _, start = initial_tokens(index, options)
    fixed, model = list(options.prefix), language_model(seed)
    most = min(limit(index), CONFIG.max_target_positions - len(start))

    def language(tokens: list[int]) -> float:
        """Sum over text and, behind it, end-of-text; times are ignored."""
        state, total = model.start_state, 0.0
        for at, token in enumerate([*fixed, *tokens]):
            if token > SPECIAL.eot:
                continue
            after = state
            logprob = float(model.final_logprobs[state])
            if token != SPECIAL.eot:
                logprob, after = model.step(state, token)
            total += max(logprob, UNSEEN_LOGPROB) if at >= len(fixed) else 0.0
            state = after
        return total

    Path = tuple[float, float, list[int]]  # ranked by, of the decoder alone, tokens
    live: list[Path] = [(0.0, 0.0, [])]
    ended: list[Path] = []
    for _ in range(most - len(fixed)):
        paths: list[Path] = []
        for _, heard, said in live:
            logits = whisper_decoder(index).logits((*start, *fixed, *said))
            scores = allowed_logits(logits, start, fixed + said, options).log_softmax(0)
            for token in scores.topk(min(len(scores), options.beam + 1 + NEAR)).indices.tolist():
                if scores[token] > -math.inf:
                    longer, total = [*said, token], heard + float(scores[token])
                    paths.append((total + WEIGHT * language(longer), total, longer))
        paths.sort(key=lambda path: -path[0])
        live = []
        for path in paths:
            if path[2][-1] == SPECIAL.eot:
                if len(ended) < options.beam:
                    ended.append((*path[:2], path[2][:-1]))
            else:
                live.append(path)
                if len(live) == options.beam:
                    break
        if len(ended) == options.beam:
            break
    closed = len(ended)
    ended += sorted(live, key=lambda path: -path[0])[: options.beam - closed]
    best = max(range(len(ended)), key=lambda i: ended[i][0] / max(1, len(ended[i][2])))
    _, heard, said = ended[best]
    return (*fixed, *said), heard / (len(said) + (best < closed)), "stop" if best < closed else "length"


NAMES = ("first", "second")
"""Of the language models of seeds 0 and 1."""


def start(close_later, models: dict[str, NgramModel]) -> EngineClient:
    """An engine of tiny_whisper with language models."""
    scorers = {name: TokenLanguageModel(NgramScorer(model), name.encode()) for name, model in models.items()}
    config = EngineConfig(max_decode_rows=12, kv_bytes=2 << 20, max_sessions=2, prefix_bytes=0)
    backend = thread_backend(CARD, lambda: build()._replace(language_models=scorers))
    return close_later(EngineClient(config, backend))


def expect_fused(result: object, index: int, options: SearchOptions, seed: int) -> None:
    tokens, mean, finish = searched(index, options, seed)
    assert isinstance(result, Recognition), result
    assert (result.tokens, result.finish) == (tokens, finish)
    assert result.avg_logprob == pytest.approx(mean, abs=1e-4)
    assert len(result.logprobs) == len(tokens)


def test_the_engine_finds_what_the_plain_search_does(close_later):
    client = start(close_later, {name: language_model(seed) for seed, name in enumerate(NAMES)})
    assert client.card.language_models == NAMES
    kinds = [{}, {"timestamps": True}, {"prefix": (8, 3, 5)}, {"timestamps": True, "prompt": (4, 9, 4)}]
    plain = [SearchOptions(beam=4, **kind, **ONCE) for kind in kinds]
    wanted = [(i, options, seed) for i in range(3) for options, seed in zip(plain, (0, 1, 0, 1), strict=True)]
    with held(client):
        tickets = [
            client.submit(
                CLIPS[i], msgspec.structs.replace(options, language_model=LanguageModelChoice(NAMES[seed], WEIGHT))
            )
            for i, options, seed in wanted
        ]
        others = [client.submit(CLIPS[i], plain[0]) for i in range(3)]
    changed = 0
    for (i, options, seed), ticket in zip(wanted, tickets, strict=True):
        expect_fused(outcome(ticket), i, options, seed)
        changed += searched(i, options, seed)[0] != searched_plainly(i, options)[0]
    for i, ticket in enumerate(others):
        expect_searched(outcome(ticket), i, plain[0])
    assert changed >= 5
    expect_empty(client)


def test_a_model_that_is_not_loaded_is_refused(close_later):
    client = start(close_later, {"first": language_model(0)})
    options = SearchOptions(beam=2, language_model=LanguageModelChoice("frist", 0.5), **ONCE)
    with pytest.raises(UnsupportedOption, match=r"language_model=frist.*first"):
        client.submit(CLIPS[0], options).future.result(WAIT_S)
    expect_empty(client)


def test_any_model_can_be_fused(close_later):
    pcm, options = tiny_moonshine.clip(3, 64_000), SearchOptions(beam=5, **ONCE)
    client = close_later(tiny_moonshine.start())
    plain = client.submit(pcm, options).future.result(WAIT_S)
    model = token_model(0, sorted(set(plain.tokens) | set(range(3, 60))))
    loaded = {"tokens": TokenLanguageModel(NgramScorer(model), b"")}
    components = tiny_moonshine.build()._replace(language_models=loaded)
    fusing = close_later(EngineClient(client.config, thread_backend(tiny_moonshine.CARD, lambda: components)))
    fused = fusing.submit(
        pcm, msgspec.structs.replace(options, language_model=LanguageModelChoice("tokens", 2.0))
    ).future.result(WAIT_S)

    def mean(result: Recognition) -> float:
        return sentence_logprob(model, result.tokens, ended=False) / max(1, len(result.tokens))

    assert mean(fused) > mean(plain)
    expect_empty(fusing)


def test_one_query_serves_searches_of_one_model():
    first, second = (NgramScorer(language_model(seed)) for seed in (0, 1))
    queries = []

    class Counted:
        initial_state, state_count, final_logprobs = first.initial_state, first.state_count, first.final_logprobs

        def score(self, states, tokens):
            queries.append(len(states))
            return first.score(states, tokens)

    counted, cpu = Counted(), torch.device("cpu")
    fusions = [LanguageModelFusion(counted, 0.5), LanguageModelFusion(second, 0.5), LanguageModelFusion(counted, 2.0)]
    searches = [BeamSearch(2, SPECIAL.eot, 9, fusion=each, text_below=SPECIAL.eot) for each in fusions]
    for search in searches:
        search.live = [search.live[0]._replace(language_state=search.fusion.scorer.initial_state)]
    leading = [[[(1, -0.5), (SPECIAL.eot, -1.0), (SPECIAL.eot + 1, -2.0)]]] * 3
    found = language_scores(searches, leading, cpu)
    assert queries == [6]
    for fusion, ((text, end, special),) in zip(fusions, found, strict=True):
        model = language_model(0 if fusion.scorer is counted else 1)
        logprob, after = model.step(model.start_state, 1)
        assert text == pytest.approx((fusion.weight * max(logprob, UNSEEN_LOGPROB), after))
        expected = fusion.weight * float(model.final_logprobs[model.start_state])
        assert end == pytest.approx((expected, model.start_state))
        assert special == (0.0, model.start_state)


def test_tokens_before_the_search_are_context():
    model = language_model(0)
    fusion = LanguageModelFusion(NgramScorer(model), 1.0)
    state = model.start_state
    for token in (1, 2, 4):
        state = model.step(state, token)[1]
    assert language_state_after(fusion, (1, 2, 4), torch.device("cpu")) == state
