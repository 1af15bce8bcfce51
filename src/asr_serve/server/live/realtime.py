"""FunASR's realtime session: text while somebody speaks."""

from __future__ import annotations

from contextlib import AbstractContextManager

from asr_serve.audio.pcm import decode_pcm16
from asr_serve.engine.client import EngineClient
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import ListenOptions, LiveEvent, LivePartial, LiveSegmentDone, SpeakersRevised
from asr_serve.protocols.funasr_live import Sentences
from asr_serve.server.live.caller import Caller
from asr_serve.server.live.outbox import Outbox
from asr_serve.text.tokenizers import Tokenizer


class Realtime:
    """A Hearing: a live caller, told in FunASR's answers. Belongs to the event loop's thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        outbox: Outbox,
        meter: LiveRouteMetrics,
        using: AbstractContextManager[None],
        *,
        only_new: bool,
    ) -> None:
        """Raises what Caller does."""
        self._outbox, self._meter = outbox, meter
        self._sentences = Sentences(only_new=only_new, words=options.words, spk=options.speakers)
        self._partial: LivePartial | None = None
        self._caller = Caller(client, tokenizer, options, meter, using, self._hear)
        self.language = self._caller.language
        self.room, self.finish, self.close = self._caller.room, self._caller.finish, self._caller.close

    @property
    def received_samples(self) -> int:
        return self._caller.received_samples

    @property
    def full(self) -> bool:
        return self._caller.full

    def write(self, pcm: bytes | memoryview) -> None:
        self._caller.write(decode_pcm16(pcm))

    async def run(self) -> str:
        await self._caller.run()
        return self._sentences.final(self.received_samples)

    def _hear(self, events: list[LiveEvent]) -> None:
        news = False
        for event in events:
            match event:
                case LiveSegmentDone(segment):
                    self._sentences.lock(segment, event.language, event.language_prob)
                    news = True
                    if self._partial is not None and self._partial.start_samples < segment.end_samples:
                        self._partial = None
                case SpeakersRevised(speakers):
                    self._sentences.know(speakers)
                case LivePartial():
                    news |= self._partial is None or event.text != self._partial.text
                    self._partial = event
        if news and not self._outbox.show(self._answer):
            self._meter.dropped.inc()

    def _answer(self) -> str:
        partial = self._partial
        if partial is None:
            return self._sentences.answer("", duration_samples=self.received_samples)
        return self._sentences.answer(partial.text, partial.start_samples, self.received_samples)
