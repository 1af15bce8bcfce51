"""Session of FunASR's `/ws`: audio is transcribed as a file while it arrives, and answered at its end."""

from __future__ import annotations

from asr_serve.protocols.funasr.websocket import SentenceEncoder
from asr_serve.server.realtime.recording_session import RecordingSession


class FunAsrOfflineSession(RecordingSession):
    """FunAsrSession with the job of `POST /asr`. Sends nothing before the end."""

    async def run(self) -> str:
        sentences = SentenceEncoder(words=self._options.words is not False)
        transcript = await self.transcribe()
        if transcript is None:
            return sentences.encode_final(0)
        for segment in transcript.segments:
            sentences.add_segment(segment)
        return sentences.encode_final(transcript.duration_samples, transcript.language, transcript.language_prob)
