"""What is kept of rows while they decode, to tell when their tokens were said: that of each token, and no more."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import tiny_moonshine
import torch
from tiny_moonshine import WAIT_S, clip, held

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.cache.lru_cache import LruCache
from asr_serve.engine.client import EngineClient
from asr_serve.engine.seq2seq import encoder_cache
from asr_serve.engine.seq2seq.token_aligner import FinishedRow, TokenAligner

PLAIN = SearchOptions(temperatures=(0.0,), min_avg_logprob=-1e9, max_compression_ratio=1e9)
WORDS = msgspec.structs.replace(PLAIN, words=True)


def ask(client: EngineClient, pcm: Any, options: SearchOptions) -> Recognition:
    return client.submit(pcm, options).future.result(WAIT_S)


def test_an_answer_sampled_after_beams_has_queries_of_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    look = TokenAligner.attention_scores

    def looks(self: TokenAligner, ended: list[FinishedRow]) -> list[torch.Tensor]:
        for each in ended:
            if self._has_queries(each):
                mine, theirs = self._scores_from_queries(each), self._scores_by_forward([each])[0]
                torch.testing.assert_close(mine, theirs[:, : mine.shape[1]], atol=1e-3, rtol=1e-3)
                compared.append(len(each.recognition.tokens))
        return look(self, ended)

    monkeypatch.setattr(TokenAligner, "attention_scores", looks)
    client = tiny_moonshine.start()
    for seed in range(8):
        options = SearchOptions(
            words=True, temperatures=(0.0, 1.5), beam=2, prefix=(9,), min_avg_logprob=0.0, max_no_speech=1.0
        )
        ask(client, clip(seed, 3_000 * (seed + 1)), options)
    client.close()
    assert compared


def test_a_row_with_word_times_holds_no_queries_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    client = tiny_moonshine.start(max_decode_rows=8)
    held_bytes: list[tuple[int, int]] = []
    timed = TokenAligner.add_times

    def counted(self: TokenAligner, ended: list[FinishedRow]) -> list[FinishedRow]:
        for each in ended:
            blocks = {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in each.row.alignment_queries}
            held_bytes.append((sum(blocks.values()), sum(a.nbytes for a in each.row.alignment_queries)))
        return timed(self, ended)

    monkeypatch.setattr(TokenAligner, "add_times", counted)
    with held(client):
        tickets = [client.submit(clip(i, 16_000), WORDS if i == 3 else PLAIN) for i in range(8)]
    answers = [ticket.future.result(WAIT_S) for ticket in tickets]
    client.close()
    assert [bool(answer.times) for answer in answers] == [i == 3 for i in range(8)]
    assert sorted(held_bytes)[:-1] == [(0, 0)] * 7
    all_of_it, its_own = max(held_bytes)
    assert 0 < all_of_it == its_own


def test_the_cache_counts_the_bytes_of_answers_with_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    put = LruCache.insert

    def counting(self: LruCache[Any], name: bytes, value: Any, nbytes: int) -> None:
        if isinstance(value, Recognition):
            counted.append(nbytes)
        put(self, name, value, nbytes)

    monkeypatch.setattr(LruCache, "insert", counting)
    client = tiny_moonshine.start(prefix_bytes=1 << 20)
    listed = msgspec.structs.replace(PLAIN, beam=3, hypotheses=3)
    plain, words, several = (ask(client, clip(1, 16_000), each) for each in (PLAIN, WORDS, listed))
    client.close()
    assert len(plain.tokens) == len(words.tokens) > 0
    assert counted[1] - counted[0] == len(plain.tokens) * encoder_cache.TIMES_BYTES
    tokens = len(several.tokens) + sum(len(each.tokens) for each in several.hypotheses)
    assert len(several.hypotheses) == 3
    assert counted[2] == encoder_cache.ANSWER_BYTES + tokens * encoder_cache.TOKEN_BYTES
