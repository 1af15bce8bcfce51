"""A streaming model whose tokens are written into the audio, behind a client that answers when it is told to: the
expected result is known exactly, whatever happens on the way."""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np
from live_client import LiveClient

from asr_serve.config import EngineConfig
from asr_serve.engine.partial_rate import PartialRateController
from asr_serve.errors import Cancelled, StepFailed
from asr_serve.models.registry import asr_card
from asr_serve.types import SearchResult, SearchToken
from asr_serve.units import ms_to_samples, s_to_samples

FRAME = 320
CHUNK = 16
WINDOW = 512
SPEECH, MARK, STEP = 0.9, 0.3, 2e-5
"""Level of speech; and of the sample at which token k is said: MARK + k * STEP."""


def sample_of(token: int) -> float:
    return MARK + STEP * token


def tokens_in(pcm: np.ndarray) -> list[tuple[int, int]]:
    """(sample, token) of each token in the audio."""
    marked = ((pcm > MARK - STEP / 2) & (pcm < SPEECH - STEP)).nonzero()[0]
    return [(int(at), round((float(pcm[at]) - MARK) / STEP)) for at in marked]


class Script(NamedTuple):
    pcm: np.ndarray
    pieces: list[str]
    """Text of each token."""

    @property
    def tokens(self) -> list[int]:
        return [token for _, token in tokens_in(self.pcm)]


def script(*stretches: tuple[float, float], chance: random.Random, unspaced: bool = False) -> Script:
    """Seconds of speech, then of silence, in turns: words of one to three tokens, two to five a second."""
    parts: list[np.ndarray] = []
    pieces: list[str] = []
    for speech_s, silence_s in stretches:
        speech = np.full(s_to_samples(speech_s), SPEECH, np.float32)
        at = ms_to_samples(40)
        while at < len(speech) - ms_to_samples(40):
            for part in range(chance.randint(1, 3)):
                if at >= len(speech) - ms_to_samples(40):
                    break
                speech[at] = sample_of(len(pieces))
                word = chr(0x4E00 + len(pieces)) if unspaced else f"{'' if part else '▁'}{len(pieces)}."
                pieces.append(word)
                at += chance.randint(ms_to_samples(40), ms_to_samples(100))
            at += chance.randint(ms_to_samples(60), ms_to_samples(220))
        parts += [speech, np.zeros(s_to_samples(silence_s), np.float32)]
    return Script(np.concatenate(parts), pieces)


class _VadSession:
    """Voice activity by loudness."""

    state = b"none: each window is judged by itself"

    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self.tokenizer = self
        client.sessions.add(self)

    def submit_windows(self, pcm: np.ndarray) -> Future[np.ndarray]:
        loud = np.abs(pcm.reshape(-1, WINDOW)).max(1) > MARK / 2
        return self._client.later(loud.astype(np.float32))

    def close(self) -> None:
        self._client.sessions.discard(self)


class _Stream:
    """Emits a token once its chunk and `late` more samples are there, `drift` samples late; the last `held` tokens
    may still change."""

    def __init__(self, client: FakeClient, words: bool) -> None:
        self._client, self._words = client, words
        self.tokenizer = self
        self._pcm = np.zeros(0, np.float32)
        self._told = self._timed = 0
        self.under_way = self.failed = self.ended = False
        client.streams.add(self)

    def submit_audio(self, pcm: np.ndarray, *, last: bool = False, timed: bool = False) -> Future[SearchResult]:
        assert self in self._client.streams, "a piece of a stream that is closed"
        assert not self.under_way, "one piece at a time"
        assert not self.failed, "a failed stream is begun again"
        assert not self.ended, "a piece after the last"
        client = self._client
        self.under_way, self.ended = True, last
        self._pcm = np.concatenate([self._pcm, pcm])
        if last:
            client.heard_samples.append(len(self._pcm))
        self.failed = client.failures > 0 and client.chance.random() < 0.2
        if self.failed:
            client.failures -= 1
            return client.later(client.chance.choice([StepFailed, Cancelled])("on purpose"), self)
        steps = (len(self._pcm) - client.late) // (CHUNK * FRAME)
        known = len(self._pcm) if last else max(0, steps * CHUNK * FRAME)
        content = [SearchToken(token, (at + client.drift) // FRAME, -0.5) for at, token in tokens_in(self._pcm[:known])]
        fixed = len(content) if last else max(self._told, len(content) - client.held)
        runs: list[tuple[int, int]] = []
        if timed:
            assert self._words, "times of a stream that is not asked for any"
            runs = [(token.frame, token.frame + 1) for token in content[self._timed : fixed]]
            self._timed = fixed
        found, self._told = SearchResult(content[self._told : fixed], content[fixed:], runs), fixed
        return client.later(found, self)

    def close(self) -> None:
        self._client.streams.discard(self)


class FakeClient:
    """As much of EngineClient as a live session sees. `work` answers pending requests in random order."""

    turn_model = None

    def __init__(
        self, chance: random.Random, *, late_ms: int = 200, held: int = 0, failures: int = 0, drift_ms: int = 0
    ) -> None:
        self.config, self.partial_rate = EngineConfig(), PartialRateController()
        self.chance, self.late, self.held, self.failures = chance, ms_to_samples(late_ms), held, failures
        self.card = msgspec.structs.replace(
            asr_card("armspeech-hy"), frame_samples=FRAME, chunk=CHUNK, lookahead_samples=self.late
        )
        self.drift = ms_to_samples(drift_ms)
        self.streams: set[_Stream] = set()
        """Streams that are open."""
        self.sessions: set[_VadSession] = set()
        self.heard_samples: list[int] = []
        """Length of the audio of each stream that came to its end."""
        self._waiting: deque[tuple[Future[Any], Any, _Stream | None]] = deque()

    def open_vad_session(self, *, live: bool, api_client: str | None, state: bytes | None = None) -> _VadSession:
        return _VadSession(self)

    def open_stream(self, *, live: bool, words: bool = False, bias: str = "", language_model: None = None) -> _Stream:
        return _Stream(self, words)

    def later(self, answer: Any, stream: _Stream | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, answer, stream))
        return future

    def work(self) -> bool:
        """Answer one request; False when none is pending."""
        if not self._waiting:
            return False
        self._waiting.rotate(self.chance.randrange(len(self._waiting)))
        future, answer, stream = self._waiting.popleft()
        if stream is not None:
            stream.under_way = False
            if stream not in self.streams:
                answer = Cancelled("the stream was closed")
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return True


class ScriptedSession(LiveClient):
    """A live client whose engine is a FakeClient."""

    def __init__(self, client: FakeClient, content: Script, **options: object) -> None:
        self.client = client
        self._client = client
        self.tokenizer = self
        super().__init__(self, **options)  # type: ignore[arg-type]
        self.pieces = content.pieces

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.pieces[token] for token in tokens).replace("▁", " ").strip()

    def answer(self) -> None:
        assert self.client.work() or self.changed.is_set(), "nobody wakes this session any more"
        self.advance()

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]


def run_script(
    client: FakeClient,
    content: Script,
    sizes: list[int],
    *,
    answers: int = 1_000,
    flushes: tuple[int, ...] = (),
    **options: object,
) -> ScriptedSession:
    """A whole session in packets of these sizes; after each, up to so many answers. Flushes at these positions."""
    with ScriptedSession(client, content, **options) as session:
        at = packet = 0
        due = deque(flushes)
        while at < len(content.pcm):
            end = min(len(content.pcm), at + sizes[packet % len(sizes)], *list(due)[:1])
            session.write(content.pcm[at:end])
            at, packet = end, packet + 1
            if due and due[0] == at:
                session.flush(str(due.popleft()))
            for _ in range(client.chance.randint(0, answers) if answers < 1_000 else answers):
                if not client.work():
                    break
                session.advance()
        session.finish()
    assert not client.streams | client.sessions, "something was left open"
    return session
