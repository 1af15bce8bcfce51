"""The front end: any text to clauses, whole or while it is written."""

from __future__ import annotations

import re
import threading
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_serve import errors
from asr_serve.text.g2p.clauses import Clause, Pause
from asr_serve.text.g2p.frontend import TextFrontend, check_text
from asr_serve.text.g2p.phoneme_alphabets import alphabet_letters
from asr_serve.text.name_pronunciations import name_pronunciations

FRONT = TextFrontend()
BRITISH = TextFrontend(british=True)
RAINBOW = (
    "When the sunlight strikes raindrops in the air, they act as a prism and form a rainbow. The rainbow is a "
    "division of white light into many beautiful colors. "
)


def clauses(text, front=FRONT, **options):
    return [passage for passage in front.passages(text, **options) if isinstance(passage, Clause)]


def phonemes(text, front=FRONT, **options):
    return " ".join(clause.phonemes for clause in clauses(text, front, **options))


def words(passages):
    return [word.text for clause in passages if isinstance(clause, Clause) for word in clause.words]


def sounding(text, front=FRONT, **options):
    """Each word and its phonemes."""
    return [
        (word.text, clause.phonemes[word.first : word.last + 1])
        for clause in clauses(text, front, **options)
        for word in clause.words
    ]


def put(text, size, front=FRONT):
    live = front.open_stream()
    found = [passage for at in range(0, len(text), size) for passage in live.append_text(text[at : at + size])]
    return [*found, *live.finish()]


def holds(clause, most=400):
    """What must be so of any clause."""
    said = clause.phonemes
    assert 0 < len(said) <= most
    assert set(said) <= alphabet_letters("misaki")
    assert said == said.strip()
    assert all(stretch.phonemes for stretch in clause.phoneme_spans)
    end = -1
    for word in clause.words:
        assert end < word.first <= word.last < len(said)
        assert not set(said[word.first] + said[word.last]) & set(" .,;:!?")
        end = word.last


# text to phonemes


def test_a_sentence():
    assert phonemes("Hello there.") == "həlˈO ðˈɛɹ."
    assert phonemes("Hello there.", BRITISH) == "həlˈQ ðˈɛː."


def test_the_part_of_speech_decides_the_pronunciation():
    assert sounding("I read it yesterday; I will read it.")[1][1] == "ɹˈɛd"
    assert sounding("I read it yesterday; I will read it.")[-2][1] == "ɹˈid"


def test_words_are_those_of_the_text():
    assert sounding("Dr. Smith paid $5.99, on 3/15.") == [
        ("Dr.", "dˈɑktəɹ"),
        ("Smith", "smˈɪθ"),
        ("paid", "pˈAd"),
        ("$5.99,", "fˈIv dˈɑləɹz ænd nˈIndinˌIn sˈɛnts"),
        ("on", "ˌɔn"),
        ("3/15.", "mˈɑɹʧ fˌɪftˈinθ"),
    ]


def test_words_pronounced_as_one():
    assert words(FRONT.passages("It was on March 15, 2024, that 2 1/2 cups fell.")) == [
        *("It", "was", "on", "March", "15, 2024,", "that", "2 1/2", "cups", "fell.")
    ]


def test_dashes_and_punctuation_are_no_words():
    assert words(FRONT.passages("So — **this** is `it` - *yes* ...")) == ["So", "this", "is", "it", "yes"]


def test_an_abbreviation_ends_a_sentence_too():
    assert phonemes("We met at 5 p.m.").endswith(".")


@pytest.mark.parametrize(
    ("written", "as_if"),
    [
        ("Ｈｅｌｌｏ　ｗｏｒｌｄ！", "Hello world!"),
        ("Šimon and Dvořak", "Simon and Dvorak"),
        ("e\u0301clair", "éclair"),
        ("π is 3.14", "pi is 3.14"),
        ("Great 👍🏽, thanks 🙏!", "Great, thanks!"),
        ("I ❤️ it 👨‍👩‍👧", "I it"),
        ("٣ apples", "3 apples"),
        ("a\u200bb\x00c", "abc"),
        ("oﬃce ½ № 5", "office 1/2 No 5"),
        ("don’t ‘quote’", "don't quote"),
        ("12\u202f500 people", "12,500 people"),
        ("1\xa0234\xa0567", "1,234,567"),
        ("+1\xa0800\xa0555\xa00199", "+1 800 555 0199"),
        ("so\ud800 it goes", "so it goes"),
    ],
)
def test_characters_are_folded(written, as_if):
    assert phonemes(written) == phonemes(as_if)


def test_marks_that_matter_are_kept():
    assert phonemes("résumé").endswith("mˈA")
    assert phonemes("resume").endswith("m")


@pytest.mark.parametrize(
    ("text", "letter", "at"),
    [
        ("你好世界", "CJK UNIFIED IDEOGRAPH-4F60", 1),
        ("say привет", "CYRILLIC SMALL LETTER PE", 5),
        ("a ひ", "HIRAGANA", 3),
    ],
)
def test_another_script_is_refused_by_name(text, letter, at):
    with pytest.raises(errors.UnsupportedScript) as caught:
        FRONT.passages(text)
    assert letter in str(caught.value)
    assert f"character {at}," in str(caught.value)
    assert "English" in caught.value.allowed
    assert caught.value.param == "input"


def test_a_greek_word_is_another_script():
    with pytest.raises(errors.UnsupportedScript, match="GREEK"):
        FRONT.passages("The word λόγος.")


@pytest.mark.parametrize("text", ["", "  \n ", "…", "🙂🙂", "--- ***", "\x00\u200b", "()"])
def test_a_text_without_words_is_refused(text):
    with pytest.raises(errors.EmptyText):
        FRONT.passages(text)


@pytest.mark.parametrize("text", ["<speak>Hi</speak>", ' \n<speak version="1.1">Hi', "<speak/>"])
def test_undeclared_ssml_is_refused(text):
    with pytest.raises(errors.TextError, match="ssml: true, or --ssml") as caught:
        FRONT.passages(text)
    assert caught.value.param == "input"
    live = FRONT.open_stream()
    with pytest.raises(errors.TextError, match="--ssml"):
        live.append_text(f"{text} ")
    assert words(put("Say <speak> now.", 5)) == ["Say", "<speak>", "now."]


def test_a_live_text_that_begins_later_is_looked_at_too():
    live = FRONT.open_stream()
    assert live.append_text("\n ") == []
    with pytest.raises(errors.TextError, match="--ssml"):
        live.append_text("<speak>Hi there. ")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", errors.EmptyText),
        ("🙂", errors.EmptyText),
        ("你好", errors.UnsupportedScript),
        ("[a 你](/ˈA/)", errors.UnsupportedScript),
        ("<speak>Hi</speak>", errors.TextError),
    ],
)
def test_checks_without_a_voice_refuse_invalid_text(text, kind):
    with pytest.raises(kind) as caught:
        check_text(text)
    assert type(caught.value) is kind


def test_what_cannot_be_refused_without_a_voice():
    check_text("It is [Nguyen](/nwˈɪn/).")
    check_text("[Nguyen](/ʨ/)")
    check_text("<speak>Hi</speak>", ssml=True)
    check_text("həlˈO", phonemes=True)


def test_too_long():
    with pytest.raises(errors.TextTooLong, match="100,001 characters") as caught:
        FRONT.passages("x" * 100_001)
    assert "100,000" in caught.value.allowed
    with pytest.raises(errors.TextTooLong, match="11 characters"):
        TextFrontend(max_characters=10).passages("x" * 11)


def test_the_first_clause_of_a_hundred_thousand_characters_needs_no_other():
    long = (RAINBOW * 700)[:99_990]
    asked = []
    front = TextFrontend()
    read = front._clauses._voice.pronounce
    front._clauses._voice = type("Counted", (), {"pronounce": lambda _, chunks: asked.append(chunks) or read(chunks)})()
    passages = front.passages(long)
    assert [asked and len(asked), next(passages).words[0].text] == [1, "When"]
    list(islice(passages, 6))
    assert len(asked) < 6


def test_long_sentences_are_cut_where_clauses_end():
    long = RAINBOW.replace(". ", ", ") * 3
    found = list(FRONT.passages(long))
    spoken = [passage for passage in found if isinstance(passage, Clause)]
    assert all(len(clause.phonemes) <= 200 for clause in spoken)
    assert all(clause.phonemes.endswith(",") for clause in spoken[:-1])
    assert found[1::2] == [Pause(150)] * (len(spoken) - 1)
    assert words(found) == long.split()


def test_a_sentence_without_clauses_is_cut_evenly_at_words():
    text = " ".join(["rainbow"] * 40)
    spoken = clauses(text)
    assert all(100 < len(clause.phonemes) <= 200 for clause in spoken)
    assert words(spoken) == text.split()


def test_a_voice_with_a_short_limit():
    front = TextFrontend(max_phonemes=40)
    for clause in clauses(RAINBOW + "1" * 60, front):
        holds(clause, 40)


def test_pauses():
    found = list(FRONT.passages("One. Two.\n\nThree"))
    assert [passage.ms for passage in found if isinstance(passage, Pause)] == [250, 500]
    assert isinstance(found[0], Clause)
    assert isinstance(found[-1], Clause)


# what the caller knows better


def test_phonemes_in_the_text():
    found = sounding("I like [Kokoro](/kˈOkəɹO/)'s voice, [it](/ˈɪʔɾ/).")
    assert found[2:] == [("Kokoro's", "kˈOkəɹOz"), ("voice,", "vˈYs"), ("it.", "ˈɪʔɾ")]
    assert phonemes("[a link](https://example.com)") == phonemes("a link")
    with pytest.raises(errors.UnknownPhoneme, match=r"\[word\] has '#'"):
        FRONT.passages("A [word](/w#d/).")


def test_phonemes_alone():
    (first, pause, second) = FRONT.passages("həlˈO wˈɜɹld.\nfˈu", phonemes=True)
    assert (first.phonemes, pause, second.phonemes) == ("həlˈO wˈɜɹld.", Pause(250), "fˈu")
    assert [(word.text, word.first, word.last) for word in first.words] == [("həlˈO", 0, 4), ("wˈɜɹld.", 6, 11)]
    with pytest.raises(errors.UnknownPhoneme, match="'ñ'") as caught:
        FRONT.passages("ñ", phonemes=True)
    assert "ɹ" in caught.value.allowed
    with pytest.raises(errors.UnknownPhoneme, match="no phonemes"):
        FRONT.passages("...", phonemes=True)


@pytest.mark.parametrize(
    ("name", "american", "british"),
    [
        ("Siobhan", "ʃɪvˈɔn", "ʃɪvˈɔːn"),
        ("Joaquín", "wɑkˈin", "wɑːkˈiːn"),
        ("NGUYEN", "wˈɪn", "wˈɪn"),
        ("Saoirse", "sˈɪɹʃə", "sˈɪəʃə"),
        ("Jorge", "hˈɔɹhA", "hˈɔːhA"),
        ("José", "hOzˈA", "hQzˈA"),
        ("Siobhan's", "ʃɪvˈɔnz", "ʃɪvˈɔːnz"),
        ("Rhys's", "ɹˈisɪz", "ɹˈiːsɪz"),
        ("(Nguyen),", "wˈɪn", "wˈɪn"),
    ],
)
def test_names(name, american, british):
    assert dict(sounding(f"I met {name} today."))[name] == american
    assert dict(sounding(f"I met {name} today.", BRITISH))[name] == british


def test_pronunciations_of_the_request_come_first():
    assert dict(sounding("I met Nguyen.", TextFrontend(lexicon={"Nguyen": "nwˈɪn"})))["Nguyen."] == "nwˈɪn"


@pytest.mark.parametrize("british", [False, True])
def test_names_are_in_the_alphabet(british):
    found = name_pronunciations(british)
    assert set("".join(found.values())) <= alphabet_letters("misaki")
    assert all(name.isascii() and name.islower() for name in found)


def test_a_lexicon():
    front = TextFrontend(lexicon={"nginx": "ˈɛnʤɪn ˈɛks", "Polish": "pˈOlɪʃ", "C++": "sˈi"})
    assert sounding("Nginx's NGINX, Polish polish in C++.", front) == [
        ("Nginx's", "ˈɛnʤɪn ˈɛksɪz"),
        ("NGINX,", "ˈɛnʤɪn ˈɛks"),
        ("Polish", "pˈOlɪʃ"),
        ("polish", dict(sounding("so polish"))["polish"]),
        ("in", "ɪn"),
        ("C++.", "sˈi"),
    ]
    assert phonemes("nginx") != phonemes("nginx", front)


@pytest.mark.parametrize(
    ("lexicon", "kind"),
    [
        ({"word": "w#d"}, errors.UnknownPhoneme),
        ({"word": ""}, errors.UnknownPhoneme),
        ({"two words": "tu"}, errors.OptionError),
        ({"": "tu"}, errors.OptionError),
        ({"x" * 65: "tu"}, errors.OptionError),
        ({"word": "t" * 201}, errors.OptionError),
        ({f"word{at}": "tu" for at in range(1_001)}, errors.OptionError),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_invalid_lexicon_is_refused(lexicon, kind):
    with pytest.raises(kind) as caught:
        TextFrontend(lexicon=lexicon)
    assert caught.value.param == "lexicon"
    assert caught.value.allowed


# a text that is still being written


def test_a_clause_is_returned_when_it_is_complete():
    live = FRONT.open_stream()
    assert [live.append_text(token) for token in ("Sure", ",", " here", " is", " it", ":")] == [[]] * 6
    (clause,) = live.append_text(" the ")
    assert words([clause]) == ["Sure,", "here", "is", "it:"]
    assert live.append_text("value is 3") == []
    pause, clause = live.append_text(".14. Dr")
    assert (pause, words([clause])) == (Pause(150), ["the", "value", "is", "3.14."])
    assert live.append_text(". Smi") == []
    assert words(live.append_text("th knows. ")) == ["Dr.", "Smith", "knows."]
    assert words(live.finish()) == []


def test_a_link_in_pieces():
    assert words(put("So [a b](/bˈi/) is [c](d) it.", 1)) == ["So", "a b", "is", "c", "it."]


def test_a_live_text_ends_and_another_begins():
    live = FRONT.open_stream()
    live.append_text("One")
    assert words(live.finish()) == ["One"]
    assert live.finish() == []
    live.append_text("Two")
    (clause,) = live.finish()
    assert words([clause]) == ["Two"]


def test_a_letter_that_cannot_be_read_does_not_end_a_live_text():
    live = FRONT.open_stream()
    live.append_text("So ")
    with pytest.raises(errors.UnsupportedScript):
        live.append_text("猫 ")
    live.append_text("it goes")
    assert words(live.finish()) == ["So", "it", "goes"]


# anything

ODD = st.text(max_size=120)
ASCII = st.text("abcAB01 .,!?-'\"()[]/:$%*_#@\n", max_size=200)
HARD = """
Dr. Smith the $5 3.14 5 p.m. No. etc. https://a.com/b?x=1 2024-01-02 5:30 1,000 x@y.co Chapter IV I'm - -- — don't
1990s 10-20 50% C++ #1 @me U.S. St. 1/2 555-123-4567 **bold** hello, world. What? Yes! (so) “hi” e.g.
[Kokoro](/kˈOkəɹO/)
naïve 👍
"""
TOKENS = st.lists(st.sampled_from(HARD.split()), max_size=60).map(" ".join)


@settings(deadline=None)
@given(ODD | ASCII | TOKENS)
def test_any_text_has_phonemes_or_is_refused(text):
    try:
        found = list(FRONT.passages(text))
    except errors.TextError:
        return
    assert isinstance(found[0], Clause)
    for passage in found:
        if isinstance(passage, Clause):
            holds(passage)


@settings(deadline=None)
@given(TOKENS, st.integers(1, 30))
def test_a_live_text_has_the_same_words(text, size):
    live = put(text, size)
    for passage in live:
        if isinstance(passage, Clause):
            holds(passage)
    whole = list(FRONT.passages(text)) if live else []
    assert " ".join(words(live)) == " ".join(words(whole))


@settings(deadline=None)
@given(ASCII)
def test_phonemes_are_deterministic(text):
    def said():
        try:
            return list(FRONT.passages(text))
        except errors.TextError as error:
            return str(error)

    assert said() == said()


@settings(deadline=None)
@given(st.text(max_size=100))
def test_any_document_is_read_or_refused(text):
    for document in (text, f"<speak>{text}</speak>", f'<speak><prosody rate="{text}">a</prosody></speak>'):
        try:
            found = list(FRONT.passages(document, ssml=True))
        except errors.TextError:
            continue
        assert found


def test_threads_may_share_a_frontend():
    texts = [f"The {n}th {word} is worth ${n}." for n in range(4, 8) for word in ("zorble", "live", "wind", "read")]
    alone = [phonemes(text) for text in texts]
    found = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: mine.extend(phonemes(text) for text in texts)) for mine in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [alone] * 4


def test_text_that_breaks_the_library_has_phonemes_all_the_same(monkeypatch):
    voice = FRONT._clauses._voice
    breaks = voice._g2p.phonemize_tokens

    def broken(tokens):
        if any(token.text == "bad" for token in tokens):
            raise IndexError("a word that nobody thought of")
        return breaks(tokens)

    monkeypatch.setattr(voice._g2p, "phonemize_tokens", broken)
    found = sounding("A bad day.")
    assert [word for word, _ in found] == ["A", "bad", "day."]
    assert re.fullmatch("[bædˈ]+", found[1][1])
