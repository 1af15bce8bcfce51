"""FunASR's runtime protocol, of its deployed servers: modes offline, online and 2pass. No sockets here.

Its first message is JSON with the options of a session, samples or a file follow in binary frames, and
`{"is_speaking": false}` ends them.

Source  FunASR's runtime/docs/websocket_protocol.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from asr_serve.errors import MalformedRequest, OptionError, UnsupportedOption
from asr_serve.pipelines.live.events import LivePartial
from asr_serve.protocols.form_fields import FALSE, TRUE, parse_word_list, quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.protocols.speaker_names import funasr_speaker
from asr_serve.text import languages
from asr_serve.text.local_agreement import agreed_count
from asr_serve.text.normalization.inverse import strip_punctuation
from asr_serve.text.word_timing import is_spoken_character, is_unspaced, split_words
from asr_serve.types import Segment, Word
from asr_serve.units import samples_to_ms

MODES = ("offline", "online", "2pass")
Mode = Literal["offline", "online", "2pass"]
MESSAGE_KEYS = frozenset({"mode", "is_speaking"})
"""Keys by which a text message is one of this protocol."""
WITHOUT_EFFECT = ("chunk_size", "chunk_interval", "encoder_chunk_look_back", "decoder_chunk_look_back", "svs_itn")
PCM = "pcm"
MAX_MESSAGE_CHARACTERS = 1 << 20
"""Limit of a text message: ten thousand long hotwords."""
MAX_NAME_CHARACTERS = 200
RATES_HZ = (8_000, 48_000)
USUAL_WEIGHT = 10.0
"""Weight of FunASR's hotwords that is 1 here: theirs go from 1 to 100, and 20 is usual."""
WEIGHTS = (0.1, 10.0)


class RuntimeOptions(msgspec.Struct, frozen=True):
    """Options of a session."""

    mode: str = "2pass"
    wav_name: str = ""
    """Name that comes back in every answer."""
    wav_format: str = PCM
    """`pcm`, or the format of a file."""
    rate_hz: int = 16_000
    """Rate of the samples of `pcm`."""
    hotwords: tuple[str, ...] = ()
    itn: bool = True
    """Whether numbers get their written form, where that is possible."""
    language: str | None = None


class RuntimeMessage(msgspec.Struct, frozen=True):
    """A text message: changed options and, maybe, the start or the end of a session."""

    options: RuntimeOptions
    is_speaking: bool | None = None
    """True: the session starts. False: no more audio comes. None: as `options` are new, at the next start."""
    is_end: bool = False
    """Whether the client waits for `is_end` in an answer."""


def is_runtime_message(text: str) -> bool:
    """Returns whether a text belongs to this protocol: `{"mode": "2pass", "chunk_size": [5, 10, 5], ...}` or
    `{"is_speaking": false}`."""
    if not text.lstrip().startswith("{") or len(text) > MAX_MESSAGE_CHARACTERS:
        return False
    try:
        message = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(message, dict) and not MESSAGE_KEYS.isdisjoint(message)


def parse_runtime_message(text: str, before: RuntimeOptions) -> RuntimeMessage:
    """Parses a text message. `before`: the options so far, which stand where the message has none. One with
    `wav_format` and no `mode` means `offline`: clients of FunASR's offline server send no mode. Raises
    MalformedRequest, OptionError."""
    allowed = 'messages are JSON like {"mode": "2pass", "wav_name": "a", "is_speaking": true}'
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise MalformedRequest(
            f"a text of {len(text)} characters came", f"messages are up to {MAX_MESSAGE_CHARACTERS} characters long"
        )
    sent: object = decode_json(text, object, "a message came that cannot be read", allowed)
    if not isinstance(sent, dict):
        raise MalformedRequest("a message came that is no object", allowed)
    members = JsonMembers(sent)
    for name in WITHOUT_EFFECT:
        members.pop(name)
    is_speaking, is_end = _flag(members, "is_speaking"), _flag(members, "is_end")
    if is_speaking is None and _flag(members, "is_finished"):
        is_speaking = False
    options = RuntimeOptions(
        mode=members.choice("mode", MODES) or ("offline" if "wav_format" in sent else before.mode),
        wav_name=_name(members) or before.wav_name,
        wav_format=(members.text("wav_format") or before.wav_format).lower(),
        rate_hz=_rate(members) or before.rate_hz,
        hotwords=before.hotwords if (words := members.pop("hotwords")) is None else _hotwords(words),
        itn=before.itn if (itn := _flag(members, "itn")) is None else itn,
        language=before.language
        if (language := members.text("svs_lang")) is None
        else languages.requested_language_code(language),
    )
    members.refuse_or_ignore_unknown()
    if options.mode != "offline" and options.wav_format != PCM:
        raise UnsupportedOption(
            f"wav_format={quote_for_message(options.wav_format)} with mode={options.mode}",
            "samples, wav_format=pcm; files of any format with mode=offline",
            param="wav_format",
        )
    return RuntimeMessage(options, is_speaking, bool(is_end))


def _flag(members: JsonMembers, name: str) -> bool | None:
    """Truth value of a member: clients send true, 1 and "true"."""
    value = members.pop(name)
    if value is None or isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in TRUE + FALSE:
        raise OptionError(f"{name} is {quote_for_message(str(value))}", "true or false", param=name)
    return text in TRUE


def _name(members: JsonMembers) -> str | None:
    name = members.text("wav_name")
    if name is not None and len(name) > MAX_NAME_CHARACTERS:
        raise OptionError(f"wav_name has {len(name)} characters", f"up to {MAX_NAME_CHARACTERS}", param="wav_name")
    return name


def _rate(members: JsonMembers) -> int | None:
    value, (least, most) = members.pop("audio_fs"), RATES_HZ
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value[:9])
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        came = f"audio_fs is {quote_for_message(str(value))}"
        raise OptionError(came, f"a whole number from {least} to {most}", param="audio_fs")
    return value


def _hotwords(sent: Any) -> tuple[str, ...]:
    """Hotwords of a member: words with commas, or an object of their weights, as text or as it is."""
    if not sent:
        return ()
    text = sent if isinstance(sent, str) else msgspec.json.encode(sent).decode()
    return (
        tuple(_weighed(word) for word in parse_word_list(text)) if text.lstrip()[:1] == "{" else parse_word_list(text)
    )


def _weighed(word: str) -> str:
    """Hotword with FunASR's weight as one with ours.

    >>> _weighed("Ada:20"), _weighed("Ada:1000")
    ('Ada:2', 'Ada:10')
    """
    text, _, weight = word.rpartition(":")
    least, most = WEIGHTS
    return f"{text}:{min(most, max(least, float(weight) / USUAL_WEIGHT)):g}"


# --- answers ----------------------------------------------------------------------------------------------


class RuntimeSentence(msgspec.Struct, frozen=True):
    """Words up to a punctuation mark; times in ms."""

    text_seg: str
    punc: str
    start: int
    end: int
    ts_list: list[tuple[int, int]]


class RuntimeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer with text, or at the end."""

    mode: str
    text: str
    wav_name: str
    is_final: bool
    """Whether it is the session's last."""
    timestamp: str | None = None
    """Times of the words in ms as JSON, `[[100,200],[200,500]]`; none where the model has no times of words."""
    stamp_sents: list[RuntimeSentence] | None = None
    spk_name: str | None = None
    is_end: bool = False
    start_time: int | None = None
    """Start and end in ms, of a sentence."""
    end_time: int | None = None


def runtime_error(code: str, message: str, retry_after_ms: int | None = None) -> str:
    """Error, for clients that wait for `is_end` too. `message` says what came, what is allowed, what to do."""
    event: dict[str, object] = {"event": "error", "code": code, "message": message, "error": message, "text": ""}
    event |= {"is_final": False, "is_end": True}
    if retry_after_ms is not None:
        event["retry_after_ms"] = retry_after_ms
    return msgspec.json.encode(event).decode()


class RuntimeAnswers:
    """Answers of one session. FunASR's clients join texts of `online` and `2pass-online` as they come, and those of
    `2pass-offline` and `offline`: spaces between are part of them.

    In `online` text that has been sent is final: it is sent when its words are locked. In `2pass` it is corrected at
    the end of its sentence: all words but a hypothesis' last are sent at once, and the last one too if the hypothesis
    before it agrees, without the punctuation around what is sent.
    """

    def __init__(self, options: RuntimeOptions) -> None:
        self._options = options
        self._sent = ""
        """Text of the open sentence that was sent, in `online`."""
        self._sent_words = 0
        """The same in words, in `2pass`, whose hypotheses may change behind them."""
        self._hypothesis: list[str] = []
        """Words of the last hypothesis, in `2pass`."""
        self._any_text = False

    def partial(self, partial: LivePartial) -> str | None:
        """Answer with what is new of an open sentence; None: nothing is."""
        if self._options.mode == "online":
            return self._locked(partial.locked_text)
        text = partial.text
        ranges = split_words(text)
        words = [strip_punctuation(text[first:behind]).casefold() for first, behind in ranges]
        known = max(agreed_count(self._hypothesis, words), len(words) - 1)
        self._hypothesis = words
        sent = self._sent_words
        if not words:  # it was no speech
            self._sent_words = 0
        if known <= sent:
            return None
        self._sent_words = known
        start, end = ranges[sent][0], ranges[known - 1][1]
        new = strip_punctuation(text[start:end])
        if not sent:
            new = self._separated(new)
        elif text[start - 1].isspace():
            new = f" {new}"
        return self._answer("2pass-online", new)

    def _locked(self, text: str) -> str | None:
        if len(text) <= len(self._sent) or not text.startswith(self._sent):
            return None
        new, first = text[len(self._sent) :], not self._sent
        self._sent = text
        new = self._separated(new) if first else new
        self._any_text = True
        return self._answer("online", new)

    def segment(self, segment: Segment) -> list[str]:
        """Answers for a sentence that is final."""
        spoken = segment.spoken or segment.text
        rest = spoken[len(self._sent) :] if spoken.startswith(self._sent) else ""
        text = self._separated(segment.text)
        first = not self._sent
        self._sent, self._sent_words, self._hypothesis = "", 0, []
        if self._options.mode == "online":
            rest = self._separated(rest) if first else rest
            self._any_text |= bool(rest)
            return [self._answer("online", rest)] if rest else []
        self._any_text = True
        return [self._answer("2pass-offline", text, [segment])]

    def whole(self, segments: Sequence[Segment], text: str, *, is_end: bool) -> str:
        """The one answer of `offline`."""
        return self._answer("offline", text, segments, is_final=True, is_end=is_end)

    def end(self, *, is_end: bool) -> str:
        """Last answer, without text."""
        mode = {"2pass": "2pass-offline"}.get(self._options.mode, self._options.mode)
        return self._answer(mode, "", is_final=True, is_end=is_end)

    def _separated(self, text: str) -> str:
        """Text of a sentence, with the space that is between it and the one before."""
        return f" {text}" if self._any_text and text and not is_unspaced(text[0]) else text

    def _answer(
        self, mode: str, text: str, segments: Sequence[Segment] = (), *, is_final: bool = False, is_end: bool = False
    ) -> str:
        words = [word for segment in segments for word in segment.words if _is_spoken(word.text)]
        speakers = {segment.speaker for segment in segments}
        sentence = segments[0] if mode == "2pass-offline" and segments else None
        speaker = speakers.pop() if len(speakers) == 1 else ""
        answer = RuntimeAnswer(
            mode,
            text,
            self._options.wav_name,
            is_final,
            msgspec.json.encode([_times(word) for word in words]).decode() if words else None,
            _sentences(words) if words else None,
            funasr_speaker(speaker) if speaker else None,
            is_end,
            *(
                (samples_to_ms(sentence.start_samples), samples_to_ms(sentence.end_samples))
                if sentence
                else (None, None)
            ),
        )
        return msgspec.json.encode(answer).decode()


def _is_spoken(text: str) -> bool:
    return any(map(is_spoken_character, text))


def _times(word: Word) -> tuple[int, int]:
    return samples_to_ms(word.start_samples), samples_to_ms(word.end_samples)


def _sentences(words: Sequence[Word]) -> list[RuntimeSentence]:
    """Sentences of words, each up to a word with a punctuation mark behind it."""
    sentences, group = list[RuntimeSentence](), list[Word]()
    for word in words:
        group.append(word)
        mark = word.text[-1] if not is_spoken_character(word.text[-1]) else ""
        if mark or word is words[-1]:
            times = [_times(each) for each in group]
            text = " ".join(strip_punctuation(each.text) for each in group)
            sentences.append(RuntimeSentence(text, mark, times[0][0], times[-1][1], times))
            group = []
    return sentences
