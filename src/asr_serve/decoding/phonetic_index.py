"""Phonetic index: hotwords that sound like a piece of text, by edit distance between the sounds of their letters.

Letters stand for sounds as in most languages in Latin script, English first; letters of other scripts stand for
themselves. The index only proposes candidates; the model decides.

Source  the sound classes are those of Metaphone (Philips 1990), distinct where their letters are; distances:
        Needleman and Wunsch 1970, with cheaper changes between sounds of one class.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from asr_serve.decoding.biasing_graph import yield_between

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
"""Costs of cheap edits; any other costs 1."""
MOST_SOUNDS = 32
"""Length limit of a key; a long phrase is compared by its beginning."""


def phonetic_key(text: str) -> str:
    """Returns the sounds of a word or phrase; spaces are ignored."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(c))
    sounds = ""
    for word in re.findall(r"[^\W_]+", plain.replace("'", "")):
        for pattern, replacement in RULES:
            word = pattern.sub(replacement, word)
        sounds += word
    return re.sub(r"(.)\1+", r"\1", sounds)[:MOST_SOUNDS]


def _features(key: str) -> set[str]:
    """Returns the features that words of similar sound share: bigrams of the key, of the key with all vowels
    merged, and of the key without vowels."""
    merged = "".join("a" if c in VOWELS else c for c in key)
    consonants = "".join(c for c in key if c not in VOWELS)
    features = set()
    for kind, form in enumerate((key, merged, consonants)):
        edged = f"^{form}$"
        features |= {f"{kind}{edged[i : i + 2]}" for i in range(len(edged) - 1)}
    return features


class PhoneticCosts:
    """Sound numbers and edit costs. Sounds with costs of their own come first; all others share one kind, since a
    list may have thousands of letters."""

    def __init__(self, keys: Sequence[str]) -> None:
        own = sorted(set("".join((VOWELS, WEAK, *ALIKE))))
        letters = [*own, *sorted(set("".join(keys)).difference(own))]
        self.number = {letter: i for i, letter in enumerate(letters, start=1)}
        self.kinds = len(own) + 1
        self.other = len(letters) + 1
        """Number of any sound that no hotword has."""
        self.change = np.ones((self.kinds + 1, self.kinds + 1), np.float32)
        """Substitution cost by kind. Equal sounds of the last kind are compared by number instead."""
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
        numbers = np.zeros(MOST_SOUNDS, np.int64)
        numbers[: len(key)] = [self.number.get(c, self.other) for c in key]
        return numbers


class PhoneticIndex:
    """Phonetic index of a list of words. Read by any thread."""

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
        """Returns for each text up to `most` words, nearest first, as (index, distance): edit cost divided by the
        number of sounds of the word, at most `furthest`."""
        keys = [phonetic_key(text) for text in texts]
        pairs: list[tuple[int, int]] = []
        for index, key in enumerate(keys):
            pairs += ((index, word) for word in self._shortlist(key, 2 * most))
        results: list[list[tuple[int, float]]] = [[] for _ in texts]
        for (span, word), distance in zip(pairs, self._far(keys, pairs), strict=True):
            if distance <= furthest:
                results[span].append((word, distance))
        return [sorted(matches, key=lambda pair: pair[1])[:most] for matches in results]

    def distances(self, texts: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Returns the distance of each (text, word) pair, as in `nearest`."""
        return self._far([phonetic_key(text) for text in texts], pairs)

    def _far(self, keys: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[float]:
        if not pairs:
            return []
        spans, words = np.array(pairs).T
        sounds = np.stack([self._sounds.numbers(key) for key in keys])
        lengths = np.array([len(key) for key in keys])
        distances: list[float] = (
            self._distances(sounds[spans], lengths[spans], words) / self._lengths[words].clip(1)
        ).tolist()
        return distances

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

    def _distances(self, recognized: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns the edit cost of each pair, all at once: (pairs,)."""
        numbers, longest = self._numbers[words], int(lengths.max())
        width = int(self._lengths[words].max())
        more, change, last = self._sounds.more, self._sounds.change, self._sounds.kinds
        kinds, others = np.minimum(numbers, last), bool((numbers >= last).any())
        row = np.concatenate([np.zeros((len(words), 1), np.float32), more[kinds[:, :width]].cumsum(1)], 1)
        rows = [row]
        for i in range(longest):
            sound, kind = recognized[:, i], np.minimum(recognized[:, i], last)
            new = np.empty_like(row)
            new[:, 0] = row[:, 0] + more[kind]
            for j in range(width):
                changed = change[kind, kinds[:, j]]
                if others:
                    changed[sound == numbers[:, j]] = 0
                swapped = row[:, j] + changed
                dropped = row[:, j + 1] + more[kind]
                added = new[:, j] + more[kinds[:, j]]
                new[:, j + 1] = np.minimum(np.minimum(swapped, dropped), added)
            row = new
            rows.append(row)
        costs: np.ndarray = np.stack(rows)[lengths, np.arange(len(words)), self._lengths[words]]
        return costs


LEAST_ALIKE = 0.2
"""Least Dice coefficient of the features of two similar words."""
