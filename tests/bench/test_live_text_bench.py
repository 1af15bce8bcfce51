"""The bench of live text: how late words are locked, and that its rules are those of the product."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from bench_modules import bench_modules

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens
from asr_serve.pipelines.live.repeated_segment import LOCKING

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")

S = 16_000


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("live_text") as modules:
        yield modules.live_text


def test_the_rule_of_the_product_is_among_those_that_are_compared(bench: SimpleNamespace) -> None:
    assert LOCKING in bench.RULES


def test_words_that_are_never_locked_wait_for_the_end(bench: SimpleNamespace) -> None:
    assert bench.delays_of(4.0, 4, [3.0, 3.0]) == [2.0, 1.0, 2.5, 1.5]
    assert bench.delays_of(4.0, 2, [3.0, 3.0, 3.0]) == [1.0, -1.0], "the free final is shorter than what was locked"


def test_what_a_segment_locks_is_told_with_its_time(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(
        client=None, tokenizer=SimpleNamespace(decode=lambda tokens: " ".join(f"w{token}" for token in tokens))
    )

    def heard(*tokens: int) -> Recognition:
        return Recognition(tokens, -0.2, 0.0, "stop", 1.0, (-0.2,) * len(tokens))

    said = {2 * S: heard(1, 2), 4 * S: heard(1, 3), 6 * S: heard(1, 3, 4)}
    drafts = []

    def recognize(model: object, questions: list[tuple[np.ndarray, DraftTokens]], options: object) -> list[Recognition]:
        drafts.extend(draft for _, draft in questions)
        return [said[len(pcm)] for pcm, _ in questions]

    monkeypatch.setattr(bench, "recognize", recognize)
    segments, ends = [np.zeros(8 * S, np.float32)] * 2, [[2 * S, 4 * S, 6 * S], [2 * S]]
    assert bench.lock(model, segments, ends) == [((1, 3), [4.0, 6.0]), ((), [])]
    assert [(draft.tokens, draft.accepted_tokens) for draft in drafts[2:]] == [((1, 2), 0), ((1, 3), 1)]
    monkeypatch.setattr("asr_serve.pipelines.live.repeated_segment.LOCKING", ((3, 0.1),))
    assert bench.lock(model, segments, ends)[0] == ((1,), [6.0])
