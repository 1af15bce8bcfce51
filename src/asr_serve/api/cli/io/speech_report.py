"""Reports of speech synthesis: its speed, and a file of word times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from asr_serve.api.cli.io.transcript_outputs import write_atomically
from asr_serve.api.cli.progress import ProgressMeter
from asr_serve.errors import OptionError
from asr_serve.pipelines.options import AudioChunk
from asr_serve.text.formats.cues import split_lines
from asr_serve.text.formats.registry import render
from asr_serve.types import Segment, Transcript
from asr_serve.units import resampled_samples, samples_to_s

TABLES = (".json", ".srt", ".vtt")


class SpeechProgressMeter(ProgressMeter):
    """Seconds of audio made, latency of the first, real-time factor."""

    first_s: float | None = None

    def note_audio(self, spoken: AudioChunk) -> int:
        """Records a chunk; returns the samples so far, at 16 kHz."""
        if self.first_s is None and len(spoken.pcm):
            self.first_s = self.wall_s
        return resampled_samples(spoken.start_samples + len(spoken.pcm), spoken.rate_hz)

    def describe(self) -> str:
        return self._describe(f"{self.audio_s:.1f} s of speech")

    def describe_done(self) -> str:
        """Returns `3.2 s of speech in 0.4 s: real-time factor 0.12, first sound after 0.08 s`."""
        return self._describe(f"{self.audio_s:.1f} s of speech in {self.wall_s:.1f} s")

    def _describe(self, said: str) -> str:
        if self.first_s is None:
            return said
        factor = self.wall_s / self.audio_s if self.audio_samples else 0.0
        return f"{said}: real-time factor {factor:.2f}, first sound after {self.first_s:.2f} s"


class WordTimesFile:
    """File of the times at which words are spoken."""

    def __init__(self, path: Path) -> None:
        """Raises OptionError for a suffix not in TABLES."""
        if path.suffix.lower() not in TABLES:
            raise OptionError(f"--words {path}", f"a file whose name ends in {' '.join(TABLES)}")
        self._path, self._form = path, path.suffix.lower()[1:]
        self._sentences: list[AudioChunk] = []
        self._samples = self._rate_hz = 0

    def add_chunk(self, spoken: AudioChunk) -> None:
        if spoken.words:
            self._sentences.append(spoken)
        self._samples, self._rate_hz = spoken.start_samples + len(spoken.pcm), spoken.rate_hz

    def write(self, model: str) -> None:
        """Writes the file. Raises OSError."""
        content = self._json(model) if self._form == "json" else self._captions(model)
        write_atomically(self._path, content.encode("utf-8", "replace"))

    def _json(self, model: str) -> str:
        rate_hz = self._rate_hz or 1
        sentences = [
            {
                "text": chunk.sentence,
                "start": samples_to_s(chunk.words[0].start_samples, rate_hz),
                "end": samples_to_s(chunk.words[-1].end_samples, rate_hz),
                "words": [
                    {
                        "word": word.text,
                        "start": samples_to_s(word.start_samples, rate_hz),
                        "end": samples_to_s(word.end_samples, rate_hz),
                    }
                    for word in chunk.words
                ],
            }
            for chunk in self._sentences
        ]
        document = {"model": model, "duration": samples_to_s(self._samples, rate_hz), "sentences": sentences}
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"

    def _captions(self, model: str) -> str:
        """Renders lines of subtitles, each shown while its words are spoken."""
        segments = tuple(line for chunk in self._sentences for line in self._lines(chunk))
        text = " ".join(chunk.sentence for chunk in self._sentences)
        length = resampled_samples(self._samples, self._rate_hz or 1)
        return render(Transcript("speech", text, "en", length, segments, model), self._form)

    def _lines(self, sentence: AudioChunk) -> Sequence[Segment]:
        tokens = [(token, word) for word in sentence.words for token in word.text.split()]
        lines: list[Segment] = []
        for line in split_lines(" ".join(token for token, _ in tokens)):
            count = len(line.split())
            line_tokens, tokens = tokens[:count], tokens[count:]
            if line_tokens:
                start = resampled_samples(line_tokens[0][1].start_samples, sentence.rate_hz)
                end = resampled_samples(line_tokens[-1][1].end_samples, sentence.rate_hz)
                lines.append(Segment(start, end, line))
        return lines
