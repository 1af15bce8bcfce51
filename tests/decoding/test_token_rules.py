"""What may come next, by our rules and by transformers'."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve.decoding.token_rules import FORCED_TOKEN, MAX_INITIAL, PLAIN_TOKEN, UNTIMED, TokenRule, TokenRules

EOT, NO_TIMESTAMPS, TIMES = 40, 47, 48
VOCABULARY = TIMES + 80
NEVER, NOT_FIRST = (3, 17, *range(EOT + 1, NO_TIMESTAMPS)), (5, EOT)
SPECIAL: Any = SimpleNamespace(
    eot=EOT, no_timestamps=NO_TIMESTAMPS, timestamp_begin=TIMES, suppress=NEVER, suppress_first=NOT_FIRST
)
RULES = TokenRules(SPECIAL, VOCABULARY, torch.device("cpu"))

text = st.integers(0, EOT - 1)
times = st.integers(TIMES, VOCABULARY - 1)
said = st.lists(text | times | st.sampled_from([TIMES, VOCABULARY - 1]), max_size=12)


def reference(tokens: list[int], logits: torch.Tensor, timestamps: bool) -> torch.Tensor:
    """As transformers' generation goes: first what is never said, then the timestamps."""
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    ids = torch.tensor([[1, 2, *tokens]])
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS, eos_token_id=EOT, max_initial_timestamp_index=MAX_INITIAL
    )
    processors = [
        logits_process.SuppressTokensLogitsProcessor(list(NEVER)),
        logits_process.SuppressTokensAtBeginLogitsProcessor(list(NOT_FIRST), 2),
    ]
    if timestamps:
        processors.append(logits_process.WhisperTimeStampLogitsProcessor(config, 2))
    scores = logits[None]
    for process in processors:
        scores = process(ids, scores)
    return scores[0]


def applied(logits: torch.Tensor, rules: list[TokenRule]) -> torch.Tensor:
    done = logits.clone()
    RULES.apply(done, torch.tensor(rules), any(rule.text_from != UNTIMED for rule in rules))
    return done


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(said, st.booleans()), min_size=1, max_size=8),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 2.0, 6.0]),
)
def test_each_row_of_a_batch_has_the_scores_of_transformers(rows, seed, lift):
    """`lift`: how likely timestamps are, so that their sum is above the best text, below it, and near it."""
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, TIMES:] += lift - 3
    expected = torch.stack([reference(said, row, timed) for (said, timed), row in zip(rows, logits, strict=True)])
    came = applied(logits, [RULES.after(said, timed) for said, timed in rows])
    assert torch.equal(came, expected)


def test_sequences_chosen_by_the_rules_themselves():
    """Each token the likeliest that is allowed: timestamps in pairs, never earlier, and no segment empty."""
    chance = random.Random(2)
    for number in range(40):
        generator = torch.Generator().manual_seed(number)
        tokens: list[int] = []
        while len(tokens) < 60:
            logits = torch.randn(VOCABULARY, generator=generator) * 3
            logits[TIMES:] += chance.choice([-4, 0, 3])
            came = applied(logits[None], [RULES.after(tokens, True)])[0]
            assert torch.equal(came, reference(tokens, logits, True))
            token = int(came.argmax())
            if token == EOT:
                break
            tokens.append(token)
        marks = [token for token in tokens if token >= TIMES]
        assert tokens[0] >= TIMES
        assert tokens[0] <= TIMES + MAX_INITIAL
        assert marks == sorted(marks)
        assert not set(tokens) & {*NEVER, NO_TIMESTAMPS}
        for start, end in zip(marks[::2], marks[1::2], strict=False):
            assert start < end


def test_a_given_token_is_free_and_others_beside_it_are_not():
    logits = torch.zeros(3, VOCABULARY)
    came = applied(logits, [FORCED_TOKEN, PLAIN_TOKEN, RULES.after([], True)])
    assert torch.equal(came[0], logits[0])
    assert came[1].isinf().nonzero()[:, 0].tolist() == sorted(NEVER)
    assert came[2].isfinite().nonzero()[:, 0].tolist() == list(range(TIMES, TIMES + MAX_INITIAL + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_equals_the_plain_rule(dtype):
    logits = torch.randn(5, VOCABULARY).to(dtype)
    always = logits.clone()
    RULES.always(always)
    assert torch.equal(always, applied(logits, [PLAIN_TOKEN] * 5))
    assert RULES.after([7], False) == PLAIN_TOKEN


def test_the_first_timestamp_of_a_short_vocabulary():
    short = TokenRules(SPECIAL, TIMES + 10, torch.device("cpu"))
    assert short.after([], True).high == TIMES + 9
