"""Phonemes by espeak-ng, where that program is."""

from __future__ import annotations

import shutil

import pytest

from asr_serve.errors import ProgramFailed, ProgramMissing, UnknownPhoneme
from asr_serve.text.g2p import espeak
from asr_serve.text.g2p.clauses import Clause
from asr_serve.text.g2p.espeak import EspeakPronouncer
from asr_serve.text.g2p.frontend import TextFrontend
from asr_serve.text.g2p.phoneme_alphabets import ESPEAK_LETTERS, from_ipa, from_misaki

needed = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


def sounding(text, **options):
    return [
        (word.text, clause.phonemes[word.first : word.last + 1])
        for clause in TextFrontend("espeak", **options).passages(text)
        if isinstance(clause, Clause)
        for word in clause.words
    ]


@needed
def test_words_pronounced_as_one_are_separated():
    assert sounding("I went out of the house, for the $5.") == [
        *(("I", "aɪ"), ("went", "wɛnt"), ("out", "ˌaʊɾ"), ("of", "əv"), ("the", "ðə"), ("house,", "hˈaʊs")),
        *(("for", "fɚ"), ("the", "ðə"), ("$5.", "fˈaɪv dˈɑːlɚz")),
    ]


@needed
def test_punctuation_is_kept_for_the_voice():
    (clause,) = TextFrontend("espeak").passages("Well, “yes” (or no)!")
    assert clause.phonemes == "wˈɛl, “jˈɛs” (ɔːɹ nˈoʊ)!"
    assert set(clause.phonemes) <= ESPEAK_LETTERS


@needed
def test_given_phonemes_are_used():
    assert sounding("My [word](/wˈɜːd/), foo.", lexicon={"foo": "bˈɑː"}) == [
        ("My", "maɪ"),
        ("word,", "wˈɜːd"),
        ("foo.", "bˈɑː"),
    ]
    document = '<speak><phoneme alphabet="x-misaki" ph="təmˈAɾO">t</phoneme></speak>'
    (clause,) = TextFrontend("espeak").passages(document, ssml=True)
    assert clause.phonemes == "təmˈeɪɾoʊ"
    with pytest.raises(UnknownPhoneme, match="'A'"):
        TextFrontend("espeak").passages("təmˈAtO", phonemes=True)


@needed
def test_accents():
    assert sounding("no", british=True) == [("no", "nˈəʊ")]
    assert sounding("no") == [("no", "nˈoʊ")]


def test_a_missing_program_is_an_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ProgramMissing, match="apt install espeak-ng"):
        TextFrontend("espeak")


@pytest.mark.parametrize(
    ("script", "told"), [("exit 3", "exit status 3"), ("sleep 60", "timed out"), ("printf '\\377\\n'", "decode")]
)
def test_a_failing_program_is_an_error(monkeypatch, tmp_path, script, told):
    program = tmp_path / "broken-espeak"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(espeak, "TIMEOUT_S", 0.5)
    with pytest.raises(ProgramFailed, match=told):
        EspeakPronouncer(program=str(program)).pronounce([("hello",)])


@pytest.mark.parametrize(
    ("ipa", "misaki"),
    [("təˈmeɪtoʊ", "təˈmAtO"), ("tʃɜːtʃ", "ʧɜɹʧ"), ("ˈdʒɑːɡwɑr", "ˈʤɑɡwɑɹ"), ("bɝd", "bɜɹd"), ("ˈbʌ.tn̩", "ˈbʌtᵊn")],
)
def test_ipa_in_the_alphabet_of_our_voice(ipa, misaki):
    assert from_ipa(ipa, "misaki") == misaki


def test_misaki_in_ipa():
    assert from_misaki("ʤˈAzO", "espeak") == "dʒˈeɪzoʊ"
    assert from_ipa("ˈga.re", "espeak") == "ˈɡare"
