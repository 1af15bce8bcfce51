"""Which hot words a stretch of text sounds like: an index by the sounds of letters, and how far two are apart.

Letters stand for sounds as in most languages in Latin script, English first; letters of other scripts stand for
themselves. It only proposes: what was said, the model decides.

Source  the classes of sounds are those of Metaphone (Philips 1990), kept apart where letters are; distances:
        Needleman and Wunsch 1970, with changes between sounds of one class at a lower price.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from asr_serve.decoding.biasing import yield_between

LETTERS = (
    ("^(k|g|p)n", "n"),
    ("^wr", "r"),
    ("^wh", "w"),
    ("^ps", "s"),
    ("^x", "s"),
    ("tch|ch", "C"),
    ("sch|sh", "S"),
    ("(t|s|c)i(?=o|a)", "S"),
    ("ph", "f"),
    ("th", "0"),
    ("dg(?=[eiy])", "J"),
    ("gh(?=[aeiouy])", "g"),
    ("gh", ""),
    ("ck|cq", "k"),
    ("qu", "kw"),
    ("q", "k"),
    ("c(?=[eiy])", "s"),
    ("c", "k"),
    ("x", "ks"),
    ("j", "J"),
    ("g(?=[eiy])", "J"),
    ("(?<=[aeiou])h", ""),
    ("(?<=[^aeiou])e$", ""),
    ("(?<=[^aeiou])es$", "s"),
    (r"(.)\1+", r"\1"),
)
RULES = [(re.compile(pattern), sounds) for pattern, sounds in LETTERS]
VOWELS = "aeiouy"
ALIKE = (
    "bp",
    "dt",
    "gk",
    "gJ",
    "kC",
    "vf",
    "sz",
    "sS",
    "SC",
    "CJ",
    "SJ",
    "zJ",
    "mn",
    "lr",
    "wv",
    "0f",
    "0t",
    "0s",
    "0d",
)
WEAK = "hwy"
VOWEL_FOR_VOWEL, ALIKE_FOR_ALIKE, VOWEL_MORE, WEAK_MORE = 0.3, 0.5, 0.5, 0.5
"""What a change costs, against 1 of any other."""
MOST_SOUNDS = 32
"""Of what is compared; a long phrase is known by its beginning."""


def phonetic_key(text: str) -> str:
    """Of a word or phrase; spaces are not heard."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(c))
    found = ""
    for word in re.findall(r"[^\W_]+", plain.replace("'", "")):
        for pattern, into in RULES:
            word = pattern.sub(into, word)
        found += word
    return re.sub(r"(.)\1+", r"\1", found)[:MOST_SOUNDS]


def _features(key: str) -> set[str]:
    """What two that sound alike share: neighbours, also with every vowel taken for any other, and left out."""
    vague = "".join("a" if c in VOWELS else c for c in key)
    bones = "".join(c for c in key if c not in VOWELS)
    found = set()
    for kind, form in enumerate((key, vague, bones)):
        edged = f"^{form}$"
        found |= {f"{kind}{edged[i : i + 2]}" for i in range(len(edged) - 1)}
    return found


class PhoneticCosts:
    """Numbers of sounds, and what changes between them cost: those that are like others come first, and all that
    come behind them are of one kind, for a list may have thousands of letters."""

    def __init__(self, keys: Sequence[str]) -> None:
        own = sorted(set("".join((VOWELS, WEAK, *ALIKE))))
        letters = [*own, *sorted(set("".join(keys)).difference(own))]
        self.number = {letter: i for i, letter in enumerate(letters, start=1)}
        self.kinds = len(own) + 1
        self.other = len(letters) + 1
        """Of what no hot word has."""
        self.change = np.ones((self.kinds + 1, self.kinds + 1), np.float32)
        """By kind; of the last, two that are the same are not asked for here."""
        self.more = np.ones(self.kinds + 1, np.float32)
        for i, a in enumerate(own, start=1):
            self.change[i, i] = 0
            if a in VOWELS or a in WEAK:
                self.more[i] = VOWEL_MORE if a in VOWELS else WEAK_MORE
            for j, b in enumerate(own, start=1):
                if a != b and a in VOWELS and b in VOWELS:
                    self.change[i, j] = VOWEL_FOR_VOWEL
                elif a + b in ALIKE or b + a in ALIKE:
                    self.change[i, j] = ALIKE_FOR_ALIKE

    def numbers(self, key: str) -> np.ndarray:
        found = np.zeros(MOST_SOUNDS, np.int64)
        found[: len(key)] = [self.number.get(c, self.other) for c in key]
        return found


class PhoneticIndex:
    """Of a list of words. Read by any thread."""

    def __init__(self, words: Sequence[str]) -> None:
        self.keys = [phonetic_key(word) for word in yield_between(words)]
        self._sounds = PhoneticCosts(self.keys)
        self._numbers = np.stack([self._sounds.numbers(key) for key in yield_between(self.keys)])
        self._lengths = np.array([len(key) for key in self.keys])
        posted: dict[str, list[int]] = defaultdict(list)
        sizes = []
        for number, key in enumerate(yield_between(self.keys)):
            features = _features(key) if key else set()
            sizes.append(len(features))
            for feature in features:
                posted[feature].append(number)
        self._posted = {feature: np.array(numbers) for feature, numbers in posted.items()}
        self._sizes = np.array(sizes)

    def nearest(self, texts: Sequence[str], most: int, furthest: float) -> list[list[tuple[int, float]]]:
        """For each text up to `most` words, nearest first, and how far they are: changes against the sounds of the
        word, at most `furthest`."""
        keys = [phonetic_key(text) for text in texts]
        pairs: list[tuple[int, int]] = []
        for at, key in enumerate(keys):
            pairs += ((at, word) for word in self._shortlist(key, 2 * most))
        found: list[list[tuple[int, float]]] = [[] for _ in texts]
        for (span, word), distance in zip(pairs, self._far(keys, pairs), strict=True):
            if distance <= furthest:
                found[span].append((word, distance))
        return [sorted(each, key=lambda pair: pair[1])[:most] for each in found]

    def distances(self, texts: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """How far a text and a word are, for each pair of them, as `near` has it."""
        return self._far([phonetic_key(text) for text in texts], pairs)

    def _far(self, keys: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[float]:
        if not pairs:
            return []
        spans, words = np.array(pairs).T
        heard = np.stack([self._sounds.numbers(key) for key in keys])
        lengths = np.array([len(key) for key in keys])
        far: list[float] = (
            self._distances(heard[spans], lengths[spans], words) / self._lengths[words].clip(1)
        ).tolist()
        return far

    def _shortlist(self, key: str, most: int) -> list[int]:
        if not key:
            return []
        features = _features(key)
        lists = [self._posted[feature] for feature in features if feature in self._posted]
        if not lists:
            return []
        shared = np.bincount(np.concatenate(lists), minlength=len(self._sizes))
        alike = 2 * shared / (self._sizes + len(features))
        best = np.argpartition(-alike, most)[:most] if most < len(alike) else np.arange(len(alike))
        return [int(i) for i in best if alike[i] > LEAST_ALIKE]

    def _distances(self, heard: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Of pairs, all at once: (pairs,)."""
        numbers, longest = self._numbers[words], int(lengths.max())
        width = int(self._lengths[words].max())
        more, change, last = self._sounds.more, self._sounds.change, self._sounds.kinds
        kinds, others = np.minimum(numbers, last), bool((numbers >= last).any())
        row = np.concatenate([np.zeros((len(words), 1), np.float32), more[kinds[:, :width]].cumsum(1)], 1)
        rows = [row]
        for i in range(longest):
            mine, kind = heard[:, i], np.minimum(heard[:, i], last)
            new = np.empty_like(row)
            new[:, 0] = row[:, 0] + more[kind]
            for j in range(width):
                changed = change[kind, kinds[:, j]]
                if others:
                    changed[mine == numbers[:, j]] = 0
                swapped = row[:, j] + changed
                dropped = row[:, j + 1] + more[kind]
                added = new[:, j] + more[kinds[:, j]]
                new[:, j + 1] = np.minimum(np.minimum(swapped, dropped), added)
            row = new
            rows.append(row)
        found: np.ndarray = np.stack(rows)[lengths, np.arange(len(words)), self._lengths[words]]
        return found


LEAST_ALIKE = 0.2
"""Of the features of two words, those that they must share."""
