"""Session of FunASR's `/`: text while audio arrives."""

from __future__ import annotations

from contextlib import AbstractContextManager

from asr_serve.audio.pcm import decode_pcm16
from asr_serve.engine.client import EngineClient
from asr_serve.metrics import LiveRouteMetrics
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone, SpeakersRevised
from asr_serve.pipelines.options import ListenOptions
from asr_serve.protocols.funasr.websocket import SentenceEncoder
from asr_serve.server.caller_models import RequestWatch
from asr_serve.server.realtime.async_listener import AsyncListener
from asr_serve.server.realtime.outbox import Outbox
from asr_serve.text.tokenizers import Tokenizer


class FunAsrRealtimeSession:
    """FunAsrSession with a live listener, in FunASR's answers. Belongs to the event loop's thread."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        options: ListenOptions,
        outbox: Outbox,
        meter: LiveRouteMetrics,
        lease: AbstractContextManager[None],
        *,
        only_new: bool,
        api_client: str | None = None,
        watch: RequestWatch | None = None,
    ) -> None:
        """Raises as AsyncListener does."""
        self._outbox, self._meter = outbox, meter
        self._sentences = SentenceEncoder(only_new=only_new, words=options.words is not False, spk=options.speakers)
        self._partial: LivePartial | None = None
        self._listener = AsyncListener(
            client, tokenizer, options, meter, lease, self._on_events, api_client=api_client, watch=watch
        )
        self.language = self._listener.language
        self.wait_writable, self.finish, self.close = (
            self._listener.wait_writable,
            self._listener.finish,
            self._listener.close,
        )

    @property
    def received_samples(self) -> int:
        return self._listener.received_samples

    @property
    def full(self) -> bool:
        return self._listener.full

    def write(self, pcm: bytes | memoryview) -> None:
        self._listener.write(decode_pcm16(pcm))

    async def run(self) -> str:
        await self._listener.run()
        return self._sentences.encode_final(self.received_samples)

    def _on_events(self, events: list[LiveEvent]) -> None:
        changed = False
        for event in events:
            match event:
                case LiveSegmentDone(segment):
                    self._sentences.add_segment(segment, event.language, event.language_prob)
                    changed = True
                    if self._partial is not None and self._partial.start_samples < segment.end_samples:
                        self._partial = None
                case SpeakersRevised(speakers):
                    self._sentences.relabel_speakers(speakers)
                case LivePartial():
                    changed |= self._partial is None or event.text != self._partial.text
                    self._partial = event
        if changed and not self._outbox.send_state(self._send_partial):
            self._meter.dropped.inc()

    def _send_partial(self) -> str:
        partial = self._partial
        if partial is None:
            return self._sentences.encode_partial("", duration_samples=self.received_samples)
        return self._sentences.encode_partial(partial.text, partial.start_samples, self.received_samples)
