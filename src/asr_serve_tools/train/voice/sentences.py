"""Sentences to synthesize: from any text, with templates and random words for what such texts lack.

Sentences are held out by a hash of their text: they are synthesized too, but no run trains on sentences that
another run is tested with.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from asr_serve.errors import OptionError

HELD_OUT = 20
"""Period of held-out sentences: one in this many is never trained on."""
CHARACTERS = (12, 150)
PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'?!$%-]+[.?!]")
ENDS = re.compile(r"(?<=[a-z0-9][.?!])\s+(?=[A-Z])")
TITLE = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|No|Sen|Rep|Gov|Gen|Capt|U\.S)\.$")
SENTENCE_TEMPLATES = (
    "Your appointment is on {weekday}, {month} {day}, at {hour}:{minute} {half}.",
    "The total comes to ${dollars}.{cents}.",
    "Your order number is {number}.",
    "That will be {small} items, for {dollars} dollars.",
    "Please hold for about {small} minutes.",
    "Could you repeat that, please?",
    "Thank you for calling. How can I help you today?",
    "I am sorry, I did not catch that.",
    "Let me check that for you.",
    "One moment, please.",
    "The temperature is {small} degrees, with a {percent}% chance of rain.",
    "Turn left in {number} feet.",
    "Your flight leaves from gate {small} at {hour}:{minute} {half}.",
    "Press {small} to speak with someone.",
    "Yes.",
    "No.",
    "Okay.",
    "All right.",
    "Of course!",
    "Hello!",
    "Goodbye.",
    "Great, {name}. You are all set for {weekday}.",
    "Is this {name}?",
    "Hi, my name is {name}. What is yours?",
    "It is {month} {day}, {year}.",
    "Really? I had no idea!",
    "What time does it open on {weekday}?",
    "The meeting has moved to {hour}:{minute}.",
    "About {percent}% of people agree.",
    "We are open from {small} to {hour}, every day but {weekday}.",
)
"""Templates of a voice agent's sentences, which books lack."""
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
MONTHS = "January February March April May June July August September October November December"
NAMES = (
    "Anna Ben Chloe David Emma Frank Grace Henry Isabel Jack Karen Liam Maria Nathan Olivia Paul Quinn Rachel "
    "Samuel Teresa Ursula Victor Wendy Xavier Yvonne Zachary Priya Diego Yuki Ahmed Fatima Wei"
)
TEMPLATE_SHARE, WORDS_SHARE = 0.12, 0.08
"""Shares of template sentences, and of random word sequences, which have phoneme pairs that sentences lack."""


def held_out(sentence: str) -> bool:
    return int(hashlib.sha256(sentence.encode()).hexdigest(), 16) % HELD_OUT == 0


def sentences(paths: Iterable[Path], longest: int = CHARACTERS[1]) -> list[str]:
    """Distinct sentences of plain words and suitable length, in the order of their hashes, so that any part of
    the list is a fair sample. Raises OptionError for a file that is not text, and if no sentence is found."""
    found: set[str] = set()
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as failure:
            raise OptionError(f"{path}: {failure}", "a text in UTF-8", param="sentences") from failure
        found.update(cut(text, longest))
    if not found:
        raise OptionError("no sentence was found", f"some of {CHARACTERS[0]} to {longest} characters, plain words")
    return sorted(found, key=lambda sentence: hashlib.sha256(sentence.encode()).digest())


def cut(text: str, longest: int = CHARACTERS[1]) -> Iterator[str]:
    pending = ""
    for part in ENDS.split(" ".join(text.replace("’", "'").replace("--", ", ").split())):
        part = f"{pending} {part}" if pending else part
        pending = part if TITLE.search(part) and len(part) < longest else ""
        if not pending and CHARACTERS[0] <= len(part) <= longest and PLAIN.fullmatch(part):
            yield part


def reading_order(found: list[str], seed: int, *, test: bool = False) -> Iterator[str]:
    """Endless sequence of sentences to read, held-out ones included. `test`: held-out sentences only."""
    chance = random.Random(seed)
    chosen = [sentence for sentence in found if held_out(sentence) or not test]
    words = sorted({word for sentence in chosen for word in re.findall(r"[A-Za-z]{3,}", sentence)})
    chance.shuffle(chosen)
    while True:
        for sentence in chosen:
            kind = 1.0 if test else chance.random()
            if kind < TEMPLATE_SHARE:
                yield random_template_sentence(chance)
            elif kind < TEMPLATE_SHARE + WORDS_SHARE:
                drawn = [chance.choice(words).lower() for _ in range(chance.randint(2, 12))]
                yield " ".join(drawn).capitalize() + chance.choice("..?!")
            else:
                yield sentence


def random_template_sentence(chance: random.Random) -> str:
    return chance.choice(SENTENCE_TEMPLATES).format(
        weekday=chance.choice(WEEKDAYS.split()),
        month=chance.choice(MONTHS.split()),
        day=chance.randint(1, 28),
        hour=chance.randint(1, 12),
        minute=f"{chance.randint(0, 59):02}",
        half=chance.choice(("am", "pm")),
        dollars=chance.randint(1, 999),
        cents=f"{chance.randint(0, 99):02}",
        number=chance.randint(100, 99_999),
        small=chance.randint(1, 20),
        percent=chance.randint(1, 100),
        year=chance.randint(1950, 2030),
        name=chance.choice(NAMES.split()),
    )
