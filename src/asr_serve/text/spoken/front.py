"""The front end: text, as it is written or while it is being written, to clauses of phonemes. START HERE.

    characters -> ssml or links -> splitting -> normal -> alignment -> english or espeak -> clauses

A clause is worked out when it is asked for: the first costs some milliseconds, however long the text. A Front
holds nothing that changes, so threads may share it; what is large behind it is shared by all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from asr_serve.errors import EmptyText, OptionError, TextError, TextTooLong
from asr_serve.text.spoken.characters import clean, speakable
from asr_serve.text.spoken.clauses import Clauses
from asr_serve.text.spoken.passages import PLAIN, PRESET, Clause, Passage, Pause, Said
from asr_serve.text.spoken.sounds import alphabets
from asr_serve.text.spoken.sounds.alphabets import Alphabet, Lexicon
from asr_serve.text.spoken.sounds.english import english
from asr_serve.text.spoken.sounds.espeak import Espeak
from asr_serve.text.spoken.splitting import CALM, LIVE, Break, Piece, Splitter
from asr_serve.text.spoken.ssml import LONGEST_BREAK_MS, Script, Stop, parse

MAX_CHARACTERS = 100_000
MAX_PHONEMES = 400
PAUSE_MS: dict[Break, int] = {"none": 0, "clause": 150, "sentence": 250, "paragraph": 500}
BLOCK = 512
"""Characters of a long text that are looked at at once."""
LINK = re.compile(r"\[([^\[\]\n]{1,200})\]\(([^()\n]{0,2000})\)")
"""misaki's: `[word](/phonemes/)`. Without the strokes it is Markdown's, of which the words are read."""
_document = re.compile(r"\s*<speak[\s/>]")
_open_link = re.compile(r"\[[^\[\]\n]{0,200}(?:\](?:\([^()\n]{0,2000})?)?\Z")


class Front:
    """Reads English aloud, for voices of one alphabet."""

    def __init__(
        self,
        alphabet: Alphabet = "misaki",
        lexicon: Mapping[str, str] | None = None,
        *,
        british: bool = False,
        max_characters: int = MAX_CHARACTERS,
        max_phonemes: int = MAX_PHONEMES,
    ) -> None:
        """`lexicon`: words, and their phonemes in the alphabet. `british`: the accent, and how dates are read.
        `max_phonemes`: of a clause, as the voice's card has it.

        Raises OptionError, UnknownPhoneme for the lexicon, ProgramMissing.
        """
        self.alphabet, self.british, self.max_characters = alphabet, british, max_characters
        known = Lexicon(lexicon or {}, alphabet)
        voice = Espeak(british) if alphabet == "espeak" else english(british)
        self._clauses = Clauses(voice, known, british, max_phonemes)

    def passages(self, text: str, *, ssml: bool = False, phonemes: bool = False) -> Iterator[Passage]:
        """Clauses and the silence between them, in order, each made when it is asked for.

        `ssml`: the text is a <speak> document. `phonemes`: it is written in the alphabet, words apart.

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
            found = self._given(" ".join(text.split()))
        else:
            found = self._written(
                parse(text, self.alphabet, self.british) if ssml else _plain(text, self.alphabet)
            )
        first = next(found, None)
        if first is None:
            raise _nothing()
        return chain((first,), found)

    def live(self) -> LiveText:
        """For a text that is still being written."""
        return LiveText(self)

    def _written(self, script: Script) -> Iterator[Passage]:
        said = iter(script.said)
        manners, silence, first = script.manners, _Silence(), True
        for begin, end, stop in _parts(script):
            splitter = Splitter(CALM if first else CALM._replace(first=CALM.clause))
            for piece in _pieces(splitter, script.text, begin, end):
                silence.break_(piece.after)
                clauses = self._clauses.written(piece.text, said, manners, begin + piece.start)
                for clause in silence.around(clauses):
                    first = False
                    yield clause
            silence.stop(stop)
        yield from silence.last()

    def _given(self, phonemes: str) -> Iterator[Passage]:
        alphabets.check(phonemes, self.alphabet)
        silence = _Silence()
        for piece in _pieces(Splitter(abbreviations=False), phonemes, 0, len(phonemes)):
            silence.break_(piece.after)
            yield from silence.around(self._clauses.given(piece.text))


def expect_text(text: str, *, ssml: bool = False, phonemes: bool = False) -> None:
    """What can be known without a voice. Raises EmptyText, UnsupportedScript, and TextError for SSML that is not
    said to be such."""
    _expect_plain(text, ssml or phonemes)
    if not (ssml or phonemes or speakable(_plain(text, None).text)):
        raise _nothing()


def _expect_plain(text: str, marked: bool = False) -> None:
    """`marked`: the caller says that it is SSML, or phonemes."""
    if not text.strip():
        raise EmptyText("an empty text", "words to be said", param="input")
    if not marked and _document.match(text):
        raise TextError(
            "a text that begins with <speak>, as SSML does, and is not said to be SSML",
            "ssml: true, or --ssml",
            "to hear the brackets, begin with another word",
            param="input",
        )


def _nothing() -> EmptyText:
    return EmptyText("a text with nothing in it to say", "letters or digits", param="input")


def _plain(text: str, alphabet: Alphabet | None) -> Script:
    """Its links read. Without an alphabet their phonemes are not looked at."""
    said: list[Said] = []
    parts, at = [], 0
    for link in LINK.finditer(text):
        written, given = clean(link[1], start=link.start(1)), link[2].strip()
        parts.append(clean(text[at : link.start()], start=at))
        if len(given) > 2 and given[0] == given[-1] == "/":
            phonemes = given[1:-1].strip()
            if alphabet:
                alphabets.check(phonemes, alphabet, f"[{link[1]}]")
            said.append(Said(written, phonemes=phonemes))
            written = PRESET
        parts.append(written)
        at = link.end()
    parts.append(clean(text[at:], start=at))
    return Script("".join(parts), said, [(0, PLAIN)], [])


class LiveText:
    """A text token by token, as a language model writes it. For one caller."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._begin()

    def _begin(self) -> None:
        self._splitter, self._silence = Splitter(LIVE), _Silence()
        self._said: list[Said] = []
        self._raw, self._begun = "", False

    def put(self, text: str) -> list[Passage]:
        """What can be said now. Raises as `Front.passages` does; the text that was refused is left out, and the
        next one may come."""
        self._raw += text
        ready = self._ready()
        taken, self._raw = self._raw[:ready], self._raw[ready:]
        return self._take(taken) if taken else []

    def end(self) -> list[Passage]:
        """The rest. What is put in afterwards is another text. Nothing where nothing was left to say."""
        taken, self._raw = self._raw, ""
        found = [*self._take(taken), *self._passages(self._splitter.end())]
        self._begin()
        return found

    def _ready(self) -> int:
        """Characters of what is held that nothing to come can change: whole words, whole links."""
        raw = self._raw
        if len(raw) > BLOCK * 4:
            return len(raw)
        blank = max(raw.rfind(" "), raw.rfind("\n"))
        open_link = _open_link.search(raw)
        ready = min(blank + 1, open_link.start() if open_link else len(raw))
        return next((link.start() for link in LINK.finditer(raw) if link.start() < ready < link.end()), ready)

    def _take(self, text: str) -> list[Passage]:
        if not self._begun and text.strip():
            _expect_plain(text)
            self._begun = True
        script = _plain(text, self._front.alphabet)
        self._said += script.said
        return self._passages(self._splitter.put(script.text))

    def _passages(self, pieces: Iterator[Piece]) -> list[Passage]:
        found: list[Passage] = []
        for piece in pieces:
            presets = piece.text.count(PRESET)
            said, self._said = self._said[:presets], self._said[presets:]
            self._silence.break_(piece.after)
            clauses = self._front._clauses.written(piece.text, iter(said), [(0, PLAIN)], 0)
            found += self._silence.around(clauses)
        return found


class _Silence:
    """Adds up what lies between two clauses, and is told before the second one: never at the ends of a text."""

    def __init__(self) -> None:
        self._kind: Break = "none"
        self._asked: int | None = None
        self._begun = False

    def break_(self, kind: Break) -> None:
        if PAUSE_MS[kind] > PAUSE_MS[self._kind]:
            self._kind = kind

    def stop(self, stop: Stop | None) -> None:
        if stop:
            self.break_(stop.kind)
            if stop.ms is not None:
                self._asked = min((self._asked or 0) + stop.ms, LONGEST_BREAK_MS)

    def around(self, clauses: Iterator[tuple[Break, Clause]]) -> Iterator[Passage]:
        for kind, clause in clauses:
            self.break_(kind)
            ms = PAUSE_MS[self._kind] if self._begun else 0
            if self._asked is not None:
                ms = self._asked
            if ms:
                yield Pause(ms, self._asked is not None)
            yield clause
            self._begun, self._kind, self._asked = True, "none", None

    def last(self) -> Iterator[Pause]:
        """After the text: only what was asked for."""
        if self._asked:
            yield Pause(self._asked, asked=True)


def _pieces(splitter: Splitter, text: str, begin: int, end: int) -> Iterator[Piece]:
    for at in range(begin, end, BLOCK):
        yield from splitter.put(text[at : min(at + BLOCK, end)])
    yield from splitter.end()


def _parts(script: Script) -> Iterator[tuple[int, int, Stop | None]]:
    """What lies between stops."""
    begin = 0
    for stop in script.stops:
        yield begin, stop.at, stop
        begin = stop.at
    yield begin, len(script.text), None
