"""Calls behind the edge's gate, from packets to text: the words are those of the same calls without a gate, but for
those that are listed here."""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np
import pytest
import soxr
from rtp_sender import RtpSender
from running_edge import RunningEdge, text_of
from running_server import Running
from test_edge_service import check_account, words

from asr_serve.audio import read_audio
from asr_serve.audio.pcm import companding_codes, mulaw_table
from asr_serve.edge.rtp import RtpPacket, build_rtp

NOISES_DBFS = (None, -60.0, -45.0)
TURNS_S = ((0.0, 7.0), (11.0, 16.0), (22.0, 29.0), (33.0, 38.5))
"""Of one recording, whose own pauses stay inside the turns."""
PAUSES_S = (3.5, 4.7, 0.9, 4.1, 3.3)
CHANGED: dict[float | None, list[str]] = {None: [], -60.0: ["the > it"], -45.0: []}
"""What the gate may change in the call with that noise, as `words > words`: with 8-bit products one word, of two that
are about as likely."""


def telephone_call(speech: np.ndarray, noise_dbfs: float | None, ssrc: int) -> list[bytes]:
    """A call with 60 % speech, as packets of PCMU."""
    parts = [np.zeros(round(PAUSES_S[0] * 16_000), np.float32)]
    for (begin_s, end_s), pause_s in zip(TURNS_S, PAUSES_S[1:], strict=True):
        parts += [speech[round(begin_s * 16_000) : round(end_s * 16_000)], np.zeros(round(pause_s * 16_000))]
    narrow = soxr.resample(np.concatenate(parts), 16_000, 8_000)
    if noise_dbfs is not None:
        narrow = narrow + 10 ** (noise_dbfs / 20) * np.random.default_rng(7).standard_normal(len(narrow))
    codes = companding_codes(mulaw_table())[np.rint(narrow * 32_767).clip(-32_768, 32_767).astype(np.int16).view("u2")]
    return [
        build_rtp(RtpPacket(0, False, number, 160 * number, ssrc, codes[160 * number : 160 * (number + 1)].tobytes()))
        for number in range(len(codes) // 160)
    ]


def changes(before: list[str], after: list[str]) -> list[str]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        f"{' '.join(before[a:b])} > {' '.join(after[c:d])}"
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


@pytest.mark.parametrize("noise_dbfs", NOISES_DBFS)
def test_the_gate_changes_no_word_but_those_listed(noise_dbfs: float | None, server: Running, cities: Path) -> None:
    speech = read_audio(cities)
    texts, sent_s = [], 0.0
    for gated in (False, True):
        edge = RunningEdge(server.url, voice_activity=gated, options={"partial_ms": 60_000})
        sender = RtpSender(edge.driver.port)
        session = edge.create()
        assert session.ssrc is not None
        packets = telephone_call(speech, noise_dbfs, session.ssrc)
        sender.send(packets, 0.0005)
        edge.taken(session.id, len(packets))
        events = edge.end(session.id)
        check_account(events[-1])
        assert events[-1]["duration_s"] == pytest.approx(0.02 * len(packets))
        texts.append(words(text_of(events)))
        sent_s = events[-1]["sent_speech_s"]
        sender.close()
        edge.close()
    assert len(texts[0]) > 40
    assert set(changes(*texts)) <= set(CHANGED[noise_dbfs])
    assert sent_s < 0.85 * 0.02 * len(packets)
