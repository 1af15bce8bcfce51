"""Text front end: complete or streamed text to clauses of phonemes. The entry point of this package.

    character_folding -> ssml or links -> sentence_splitter -> normalization -> word_alignment
    -> hibari_english or espeak -> clause_builder

Clauses are computed lazily: the first costs some milliseconds, however long the text. A TextFrontend is immutable,
so threads may share it; its large parts are shared by all instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from asr_serve.errors import EmptyText, OptionError, TextError, TextTooLong
from asr_serve.text.g2p import phoneme_alphabets
from asr_serve.text.g2p.character_folding import fold_characters, has_speech
from asr_serve.text.g2p.clause_builder import ClauseBuilder
from asr_serve.text.g2p.clauses import (
    NEUTRAL_PROSODY,
    OVERRIDE_PLACEHOLDER,
    Clause,
    Passage,
    Pause,
    PronunciationOverride,
)
from asr_serve.text.g2p.espeak import EspeakPronouncer
from asr_serve.text.g2p.phoneme_alphabets import Alphabet, Lexicon
from asr_serve.text.g2p.sentence_splitter import (
    LIVE_SPLIT_POLICY,
    OFFLINE_SPLIT_POLICY,
    BreakKind,
    SentenceSplitter,
    SplitSentence,
)
from asr_serve.text.g2p.ssml import LONGEST_BREAK_MS, SsmlBreak, SsmlScript, parse_ssml
from asr_serve.text.hibari_english import load_hibari

MAX_CHARACTERS = 100_000
MAX_PHONEMES = 400
PAUSE_MS: dict[BreakKind, int] = {"none": 0, "clause": 150, "sentence": 250, "paragraph": 500}
BLOCK_CHARACTERS = 512
"""Characters of a long text that are split at once."""
LINK = re.compile(r"\[([^\[\]\n]{1,200})\]\(([^()\n]{0,2000})\)")
"""misaki's syntax for pronunciations: `[word](/phonemes/)`. Without the slashes it is a Markdown link, whose words
are read."""
_document = re.compile(r"\s*<speak[\s/>]")
_open_link = re.compile(r"\[[^\[\]\n]{0,200}(?:\](?:\([^()\n]{0,2000})?)?\Z")


class TextFrontend:
    """Front end for English text, for voices of one alphabet."""

    def __init__(
        self,
        alphabet: Alphabet = "misaki",
        lexicon: Mapping[str, str] | None = None,
        *,
        british: bool = False,
        max_characters: int = MAX_CHARACTERS,
        max_phonemes: int = MAX_PHONEMES,
    ) -> None:
        """`lexicon`: words -> their phonemes in the alphabet. `british`: the accent, and the reading of dates.
        `max_phonemes`: most phonemes of a clause, from the voice's card.

        Raises OptionError, UnknownPhoneme for the lexicon, ProgramMissing.
        """
        self.alphabet, self.british, self.max_characters = alphabet, british, max_characters
        known = Lexicon(lexicon or {}, alphabet)
        voice = EspeakPronouncer(british) if alphabet == "espeak" else load_hibari(british)
        self._clauses = ClauseBuilder(voice, known, british, max_phonemes)

    def passages(self, text: str, *, ssml: bool = False, phonemes: bool = False) -> Iterator[Passage]:
        """Clauses and the silence between them, in order, computed lazily.

        `ssml`: the text is a <speak> document. `phonemes`: it is phonemes of the alphabet with spaces between
        words.

        Raises, before anything is returned: TextTooLong, EmptyText, UnsupportedScript, MalformedSsml,
        UnknownPhoneme; and TextError for SSML without `ssml`.
        """
        if len(text) > self.max_characters:
            raise TextTooLong(
                f"{len(text):,} characters", f"at most {self.max_characters:,}", "send it in parts", param="input"
            )
        if ssml and phonemes:
            raise OptionError("ssml and phonemes together", "one of them", "use <phoneme>", param="phonemes")
        _expect_plain(text, ssml or phonemes)
        if phonemes:
            found = self._phoneme_passages(" ".join(text.split()))
        else:
            found = self._script_passages(
                parse_ssml(text, self.alphabet, self.british) if ssml else _plain(text, self.alphabet)
            )
        first = next(found, None)
        if first is None:
            raise _nothing()
        return chain((first,), found)

    def open_stream(self) -> StreamingTextFrontend:
        """Streaming front end for a text that is still being written."""
        return StreamingTextFrontend(self)

    def _script_passages(self, script: SsmlScript) -> Iterator[Passage]:
        overrides = iter(script.overrides)
        manners, silence, first = script.prosody_changes, _PauseAccumulator(), True
        for begin, end, stop in _parts(script):
            splitter = SentenceSplitter(
                OFFLINE_SPLIT_POLICY if first else OFFLINE_SPLIT_POLICY._replace(first=OFFLINE_SPLIT_POLICY.clause)
            )
            for piece in _pieces(splitter, script.text, begin, end):
                silence.break_(piece.after)
                clauses = self._clauses.clauses_of_text(piece.text, overrides, manners, begin + piece.start)
                for clause in silence.around(clauses):
                    first = False
                    yield clause
            silence.stop(stop)
        yield from silence.last()

    def _phoneme_passages(self, phonemes: str) -> Iterator[Passage]:
        phoneme_alphabets.check_phonemes(phonemes, self.alphabet)
        silence = _PauseAccumulator()
        for piece in _pieces(SentenceSplitter(abbreviations=False), phonemes, 0, len(phonemes)):
            silence.break_(piece.after)
            yield from silence.around(self._clauses.clauses_of_phonemes(piece.text))


def check_text(text: str, *, ssml: bool = False, phonemes: bool = False) -> None:
    """Check a text as far as possible without a voice. Raises EmptyText, UnsupportedScript, and TextError for SSML
    without `ssml`."""
    _expect_plain(text, ssml or phonemes)
    if not (ssml or phonemes or has_speech(_plain(text, None).text)):
        raise _nothing()


def _expect_plain(text: str, marked: bool = False) -> None:
    """Raise EmptyText for a blank text, and TextError for SSML unless `marked`: declared as SSML or phonemes."""
    if not text.strip():
        raise EmptyText("the text is empty", "text with at least one word is needed", param="input")
    if not marked and _document.match(text):
        raise TextError(
            "a text that begins with <speak>, as SSML does, and is not said to be SSML",
            "ssml: true, or --ssml",
            "to hear the brackets, begin with another word",
            param="input",
        )


def _nothing() -> EmptyText:
    return EmptyText("a text with nothing in it to say", "letters or digits", param="input")


def _plain(text: str, alphabet: Alphabet | None) -> SsmlScript:
    """Script of a plain text with links. Without an alphabet the phonemes of links are not checked."""
    overrides: list[PronunciationOverride] = []
    parts, at = [], 0
    for link in LINK.finditer(text):
        written, target = fold_characters(link[1], start=link.start(1)), link[2].strip()
        parts.append(fold_characters(text[at : link.start()], start=at))
        if len(target) > 2 and target[0] == target[-1] == "/":
            phonemes = target[1:-1].strip()
            if alphabet:
                phoneme_alphabets.check_phonemes(phonemes, alphabet, f"[{link[1]}]")
            overrides.append(PronunciationOverride(written, phonemes=phonemes))
            written = OVERRIDE_PLACEHOLDER
        parts.append(written)
        at = link.end()
    parts.append(fold_characters(text[at:], start=at))
    return SsmlScript("".join(parts), overrides, [(0, NEUTRAL_PROSODY)], [])


class StreamingTextFrontend:
    """Front end for text that comes token by token from a language model, for one stream."""

    def __init__(self, front: TextFrontend) -> None:
        self._frontend = front
        self._begin()

    def _begin(self) -> None:
        self._splitter, self._silence = SentenceSplitter(LIVE_SPLIT_POLICY), _PauseAccumulator()
        self._overrides: list[PronunciationOverride] = []
        self._raw, self._begun = "", False

    def append_text(self, text: str) -> list[Passage]:
        """Append text; return the passages that are ready. Raises the errors of `TextFrontend.passages`; refused
        text is left out, and more may follow."""
        self._raw += text
        ready = self._ready()
        complete, self._raw = self._raw[:ready], self._raw[ready:]
        return self._take(complete) if complete else []

    def finish(self) -> list[Passage]:
        """Remaining passages, if any. Text appended afterwards is a new text."""
        remaining, self._raw = self._raw, ""
        found = [*self._take(remaining), *self._passages(self._splitter.finish())]
        self._begin()
        return found

    def _ready(self) -> int:
        """Number of buffered characters that later text cannot change: whole words, whole links."""
        raw = self._raw
        if len(raw) > BLOCK_CHARACTERS * 4:
            return len(raw)
        blank = max(raw.rfind(" "), raw.rfind("\n"))
        open_link = _open_link.search(raw)
        ready = min(blank + 1, open_link.start() if open_link else len(raw))
        return next((link.start() for link in LINK.finditer(raw) if link.start() < ready < link.end()), ready)

    def _take(self, text: str) -> list[Passage]:
        if not self._begun and text.strip():
            _expect_plain(text)
            self._begun = True
        script = _plain(text, self._frontend.alphabet)
        self._overrides += script.overrides
        return self._passages(self._splitter.append_text(script.text))

    def _passages(self, pieces: Iterator[SplitSentence]) -> list[Passage]:
        found: list[Passage] = []
        for piece in pieces:
            count = piece.text.count(OVERRIDE_PLACEHOLDER)
            overrides, self._overrides = self._overrides[:count], self._overrides[count:]
            self._silence.break_(piece.after)
            clauses = self._frontend._clauses.clauses_of_text(piece.text, iter(overrides), [(0, NEUTRAL_PROSODY)], 0)
            found += self._silence.around(clauses)
        return found


class _PauseAccumulator:
    """Accumulates breaks between two clauses into one pause before the second; a text has no pauses at its ends
    except requested ones."""

    def __init__(self) -> None:
        self._kind: BreakKind = "none"
        self._requested_ms: int | None = None
        self._begun = False

    def break_(self, kind: BreakKind) -> None:
        if PAUSE_MS[kind] > PAUSE_MS[self._kind]:
            self._kind = kind

    def stop(self, stop: SsmlBreak | None) -> None:
        if stop:
            self.break_(stop.kind)
            if stop.ms is not None:
                self._requested_ms = min((self._requested_ms or 0) + stop.ms, LONGEST_BREAK_MS)

    def around(self, clauses: Iterator[tuple[BreakKind, Clause]]) -> Iterator[Passage]:
        for kind, clause in clauses:
            self.break_(kind)
            ms = PAUSE_MS[self._kind] if self._begun else 0
            if self._requested_ms is not None:
                ms = self._requested_ms
            if ms:
                yield Pause(ms, self._requested_ms is not None)
            yield clause
            self._begun, self._kind, self._requested_ms = True, "none", None

    def last(self) -> Iterator[Pause]:
        """Pause after the text: only a requested one."""
        if self._requested_ms:
            yield Pause(self._requested_ms, is_requested=True)


def _pieces(splitter: SentenceSplitter, text: str, begin: int, end: int) -> Iterator[SplitSentence]:
    for at in range(begin, end, BLOCK_CHARACTERS):
        yield from splitter.append_text(text[at : min(at + BLOCK_CHARACTERS, end)])
    yield from splitter.finish()


def _parts(script: SsmlScript) -> Iterator[tuple[int, int, SsmlBreak | None]]:
    """Character ranges between breaks, each with the break that ends it."""
    begin = 0
    for stop in script.breaks:
        yield begin, stop.at, stop
        begin = stop.at
    yield begin, len(script.text), None
