"""Language models in the beam search of attention decoders: the engine finds what the search written out plainly
does, beside rows without a model or with another one."""

from __future__ import annotations

import math
from functools import cache

import pytest
import tiny_moonshine
from test_batched_beam_search import expect_searched
from test_batched_beam_search import searched as searched_plainly
from test_decoder_prompts import ONCE, allowed_logits, initial_tokens
from tiny_moonshine import WAIT_S, expect_empty, held, outcome
from tiny_whisper import CLIPS, CONFIG, SPECIAL, limit
from tiny_whisper import decoder as whisper_decoder
from token_language_model import sentence_logprob, token_model

from asr_serve.decoding.beam_search import NEAR, UNSEEN_LOGPROB, BeamSearch, language_scores, language_state_after
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.models.ngram import NgramModel

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


def with_models(client, seeds: dict[SearchOptions, int]) -> None:
    """Gives requests of these options their language models."""
    requests = client.backend.loop.executor.requests
    made = requests.hypothesis
    scorers = {seed: NgramScorer(language_model(seed)) for seed in set(seeds.values())}

    def hypothesis(utterance):
        found = made(utterance)
        if (seed := seeds.get(utterance.options)) is not None:
            found.language_model = LanguageModelFusion(scorers[seed], WEIGHT)
        return found

    requests.hypothesis = hypothesis


def expect_fused(result: object, index: int, options: SearchOptions, seed: int) -> None:
    tokens, mean, finish = searched(index, options, seed)
    assert isinstance(result, Recognition), result
    assert (result.tokens, result.finish) == (tokens, finish)
    assert result.avg_logprob == pytest.approx(mean, abs=1e-4)
    assert len(result.logprobs) == len(tokens)


def test_the_engine_finds_what_the_plain_search_does(begin):
    client = begin()
    kinds = [{}, {"timestamps": True}, {"prefix": (8, 3, 5)}, {"timestamps": True, "prompt": (4, 9, 4)}]
    fused = [SearchOptions(beam=4, **kind, **ONCE) for kind in kinds]
    seeds = dict(zip(fused, (0, 1, 0, 1), strict=True))
    with_models(client, seeds)
    plain = SearchOptions(beam=3, **ONCE)
    wanted = [(i, options) for i in range(3) for options in (*fused, plain)]
    with held(client):
        tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    changed = 0
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        result = outcome(ticket)
        if options == plain:
            expect_searched(result, i, options)
            continue
        expect_fused(result, i, options, seeds[options])
        changed += searched(i, options, seeds[options])[0] != searched_plainly(i, options)[0]
    assert changed >= 5
    expect_empty(client)


def test_any_model_can_be_fused(close_later):
    client = close_later(tiny_moonshine.start())
    pcm, options = tiny_moonshine.clip(3, 64_000), SearchOptions(beam=5, **ONCE)
    plain = client.submit(pcm, SearchOptions(beam=4, **ONCE)).future.result(WAIT_S)
    model = token_model(0, sorted(set(plain.tokens) | set(range(3, 60))))
    requests = client.backend.loop.executor.requests
    made = requests.hypothesis

    def hypothesis(utterance):
        found = made(utterance)
        if utterance.options == options:
            found.language_model = LanguageModelFusion(NgramScorer(model), 2.0)
        return found

    requests.hypothesis = hypothesis
    fused = client.submit(pcm, options).future.result(WAIT_S)

    def mean(result: Recognition) -> float:
        return sentence_logprob(model, result.tokens, ended=False) / max(1, len(result.tokens))

    assert mean(fused) > mean(plain)
    expect_empty(client)


def test_one_query_serves_searches_of_one_model():
    first, second = (NgramScorer(language_model(seed)) for seed in (0, 1))
    queries = []

    class Counted:
        initial_state, state_count, final_logprobs = first.initial_state, first.state_count, first.final_logprobs

        def score(self, states, tokens):
            queries.append(len(states))
            return first.score(states, tokens)

    counted, cpu = Counted(), tiny_moonshine.torch.device("cpu")
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
    assert language_state_after(fusion, (1, 2, 4), tiny_moonshine.torch.device("cpu")) == state
