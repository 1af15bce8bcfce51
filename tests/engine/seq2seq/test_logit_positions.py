"""What a row begins with is fed to the decoder whole, but the vocabulary is asked only where it tells anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_decoder_prompts import ONCE, expect_same, expected
from tiny_moonshine import expect_empty, held, outcome
from tiny_whisper import CLIPS, CONFIG, start

from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient

PROMPT = tuple(range(CONFIG.max_target_positions // 2 - 1))


@pytest.fixture
def client() -> Iterator[EngineClient]:
    started = start()
    yield started
    started.close()


@pytest.fixture
def told(client: EngineClient) -> list[int]:
    """Of each pass, how many positions the vocabulary was multiplied with."""
    model, counts = client.backend.loop.executor.model, []
    head = model.head
    model.head = lambda x: counts.append(len(x)) or head(x)
    return counts


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"language": "en"}, 2),
        ({"language": "en", "timestamps": True}, 2),
        ({"language": "en", "prefix": (9, 8, 7)}, 5),
        ({"language": "en", "beam": 3}, 3),
        ({}, 2),
    ],
)
def test_a_prompt_is_fed_and_not_told(client, told, asked, most):
    options = SearchOptions(**ONCE, prompt=PROMPT, **asked)
    came = client.submit(CLIPS[1], options).future.result(60)
    assert max(told) <= client.backend.device.padded_rows(most)
    if "beam" not in asked:
        expect_same(came, expected(1, options))
    assert client.backend.loop.executor.decode_runner.positions_fed > len(PROMPT)
    expect_empty(client)


def test_rows_that_begin_beside_drafts_are_told_apart(client, told):
    """Prompts of every length, with and without drafts, in one pass: each gets its own answer and silence."""
    wanted = []
    for length in (0, 3, 17, len(PROMPT)):
        for draft in ((), (5, 6, 7), None):
            options = SearchOptions(**ONCE, prompt=PROMPT[:length], language="en", timestamps=length == 3)
            right = expected(length % len(CLIPS), options)
            wanted.append((length % len(CLIPS), options, right, right.tokens if draft is None else draft))
    with held(client):
        tickets = [client.submit(CLIPS[i], o, "live", draft=DraftTokens(draft)) for i, o, _, draft in wanted]
    for ticket, (_, _, right, _) in zip(tickets, wanted, strict=True):
        expect_same(outcome(ticket), right)
    assert max(told) < sum(len(options.prompt) for _, options, _, _ in wanted)
    expect_empty(client)


def test_what_rows_begin_with_is_made_once(client):
    """However many ask for the same, and however often each is asked for it."""
    model, made = client.backend.loop.executor.model, []
    begin = model.prompt_tokens
    model.prompt_tokens = lambda options: made.append(options) or begin(options)
    for _ in range(3):
        client.submit(CLIPS[1], SearchOptions(**ONCE, prompt=PROMPT, language="en")).future.result(60)
    assert len(made) == 1
