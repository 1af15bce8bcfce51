"""The nouns every room shares. Plain frozen data; positions are samples at 16 kHz since the start."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from asr_serve import units

Priority = Literal["live", "interactive", "bulk"]
"""`live`: somebody is speaking. `interactive`: somebody waits for the answer. `bulk`: a batch job that takes what
is left. Most urgent first."""


class Span(msgspec.Struct, frozen=True, order=True):
    """A half-open range of samples, `start_samples` up to but not including `end_samples`."""

    start_samples: int
    end_samples: int

    @property
    def samples(self) -> int:
        return self.end_samples - self.start_samples


class Phases(msgspec.Struct, frozen=True):
    """When an utterance passed through the engine: `time.time_ns`, which the server's clock reads too."""

    submitted_ns: int
    encode_start_ns: int
    encode_end_ns: int
    decode_end_ns: int


class Token(NamedTuple):
    """Something a search found."""

    id: int
    frame: int
    """Encoder frame of the session at which it was said."""
    logprob: float
    """Natural log."""


class Found(NamedTuple):
    """What a step of a search says of one session."""

    fixed: list[Token]
    """New, and for ever."""
    tail: list[Token]
    """After everything fixed: what is likeliest now, and may change."""
    runs: list[tuple[int, int]] = []  # noqa: RUF012
    """Where it was asked for: the first frame of each token, and the one behind its last, of all that were fixed
    since this was told last, these included."""


class Guess(NamedTuple):
    """One entry of an n-best list, after what is fixed."""

    tokens: list[Token]
    logprob: float
    """Of all that was heard, by the search; natural log."""
    gain: float = 0.0
    """What the caller's hot words in it are worth besides."""


class Stretch(msgspec.Struct, frozen=True):
    """Part of a sentence, all said in one manner."""

    phonemes: str
    """In the model's alphabet, a character each."""
    speed: float = 1.0
    """0.25 to 4 times as fast as the voice would by itself."""
    pitch: float = 0.0
    """Semitones, -12 to 12."""
    energy: float = 0.0
    """dB, -12 to 12."""


class Sentence(msgspec.Struct, frozen=True):
    """What a voice says in one breath: an engine encodes it once. Without pauses of its own at the ends."""

    stretches: tuple[Stretch, ...]
    voice: str
    seed: int = 0
    """Of what is random: the same sentence and seed give the same samples, in any company."""

    @property
    def phonemes(self) -> str:
        """Of all stretches."""
        return "".join(stretch.phonemes for stretch in self.stretches)


class Sound(NamedTuple):
    """A piece of a sentence as it is said, in order."""

    pcm: bytes
    """int16, little-endian, mono, at the card's rate."""
    ends: tuple[int, ...]
    """With the first piece only: the sample at which each phoneme of the sentence ends."""
    last: bool


class Word(msgspec.Struct, frozen=True):
    """A word of a segment, or a character of a script that has no spaces, and when it was said."""

    text: str
    """As in the segment's text, with the marks that touch it, without spaces around it."""
    start_samples: int
    end_samples: int
    confidence: float = 0.0
    """0 to 1: the geometric mean of its tokens' probabilities."""
    speaker: str = ""
    """Who said it, where speakers were wanted: one of the names in `Transcript.turns`."""
    spoken: str = ""
    """Of the written form: the words that were said for it, where they are others."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class SpeakerTurn(msgspec.Struct, frozen=True):
    """Somebody speaks. Turns of two speakers may overlap."""

    speaker: str
    start_samples: int
    end_samples: int


class Segment(msgspec.Struct, frozen=True):
    """One closed utterance and its text."""

    start_samples: int
    end_samples: int
    text: str
    tokens: tuple[int, ...] = ()
    avg_logprob: float = 0.0
    """Mean natural-log probability of the tokens, end-of-text included."""
    temperature: float = 0.0
    """0 for greedy; above it when the greedy answer was rejected and sampled again."""
    finish: Literal["stop", "length", "repetition"] = "stop"
    """Why decoding ended: end-of-text, the token limit, or the repetition guard."""
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token."""
    no_speech_prob: float = 0.0
    """How sure the model was that nobody speaks; 0 of one that cannot tell."""
    words: tuple[Word, ...] = ()
    """In order, inside the segment, never overlapping; empty unless they were wanted."""
    speaker: str = ""
    """Who said it, where speakers were wanted."""
    spoken: str = ""
    """Where the written form was wanted and is another: the text as it was said."""

    @property
    def start_s(self) -> float:
        return units.samples_to_s(self.start_samples)

    @property
    def end_s(self) -> float:
        return units.samples_to_s(self.end_samples)


class Transcript(msgspec.Struct, frozen=True):
    """What one input said. `segments` are in order and never overlap."""

    key: str
    text: str
    language: str
    duration_samples: int
    segments: tuple[Segment, ...]
    model: str = ""
    cached_samples: int = 0
    """Of what was heard in it, how much somebody had brought before: it was not computed anew, or not all."""
    language_prob: float = 0.0
    """How sure the model was of the language, where it was to hear it; 0 where it was told."""
    turns: tuple[SpeakerTurn, ...] = ()
    """Who spoke when, where speakers were wanted, in order of their starts."""

    @property
    def duration_s(self) -> float:
        return units.samples_to_s(self.duration_samples)

    @property
    def cached_s(self) -> float:
        return units.samples_to_s(self.cached_samples)
