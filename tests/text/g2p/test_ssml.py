"""SSML: what is said, how, and what is wrong with a document."""

from __future__ import annotations

import pytest

from asr_serve.errors import EmptyText, MalformedSsml, OptionError, UnsupportedScript
from asr_serve.text.g2p.clauses import Clause, Pause, ProsodySettings
from asr_serve.text.g2p.frontend import TextFrontend


@pytest.fixture(scope="module")
def front():
    return TextFrontend()


def read(front, inner):
    return list(front.passages(f"<speak>{inner}</speak>", ssml=True))


def clauses(front, inner):
    return [passage for passage in read(front, inner) if isinstance(passage, Clause)]


def words(front, inner):
    """Each word and its phonemes."""
    return [
        (word.text, clause.phonemes[word.first : word.last + 1])
        for clause in clauses(front, inner)
        for word in clause.words
    ]


def plain(front, text):
    (clause,) = front.passages(text)
    return clause.phonemes


def test_ssml_of_plain_text_equals_plain_text(front):
    assert read(front, "Hello there, Dr. Smith. It is 5 &lt; 6 &amp; so on.") == list(
        front.passages("Hello there, Dr. Smith. It is 5 < 6 & so on.")
    )


def test_breaks(front):
    first, pause, second = read(front, 'One,<break time="700ms"/> two.')
    assert (pause, first.phonemes, second.phonemes) == (Pause(700, is_requested=True), "wˈʌn,", "tˈu.")
    assert Pause(400, is_requested=True) in read(front, "One<break/>two")
    assert Pause(1_200, is_requested=True) in read(front, 'One<break strength="x-strong"/>two')
    assert not any(isinstance(p, Pause) for p in read(front, 'One.<break strength="none"/>Two.'))
    assert read(front, 'One.<break time="1.5s"/><break time="500ms"/>')[-1] == Pause(2_000, is_requested=True)
    assert read(front, 'One.<break time="9s"/><break time="9s"/>Two.')[1] == Pause(10_000, is_requested=True)


def test_sentences_and_paragraphs(front):
    kinds = [
        p.ms if isinstance(p, Pause) else p.words[0].text for p in read(front, "<p>A b</p><p><s>C</s><s>D</s></p>E")
    ]
    assert kinds == ["A", 500, "C", 250, "D", 500, "E"]


def test_prosody_multiplies(front):
    (clause,) = clauses(
        front,
        'so <prosody rate="80%" pitch="+2st" volume="+3dB">slow <prosody rate="0.5" pitch="+3st">slower</prosody>'
        " again</prosody> over",
    )
    manners = [(s.phonemes.strip(), ProsodySettings(s.speed, s.pitch, s.energy)) for s in clause.phoneme_spans]
    assert manners == [
        ("sˌO", ProsodySettings()),
        ("slˈO", ProsodySettings(0.8, 2, 3)),
        ("slˈOəɹ", ProsodySettings(0.4, 5, 3)),
        ("əɡˈɛn", ProsodySettings(0.8, 2, 3)),
        ("ˈOvəɹ", ProsodySettings()),
    ]
    assert "".join(s.phonemes for s in clause.phoneme_spans) == clause.phonemes
    assert [clause.phonemes[w.first : w.last + 1] for w in clause.words] == [phonemes for phonemes, _ in manners]


def test_prosody_is_limited_to_the_range_of_models(front):
    (clause,) = clauses(
        front, '<prosody rate="4" pitch="x-high"><prosody rate="3" pitch="+12st">fast</prosody></prosody>'
    )
    assert (clause.phoneme_spans[0].speed, clause.phoneme_spans[0].pitch) == (4, 12)


@pytest.mark.parametrize(
    ("attributes", "manner"),
    [
        ('rate="+20%"', ProsodySettings(1.2)),
        ('rate="-50%"', ProsodySettings(0.5)),
        ('rate="x-slow"', ProsodySettings(0.5)),
        ('pitch="+100%"', ProsodySettings(pitch=12)),
        ('pitch="low"', ProsodySettings(pitch=-2)),
        ('volume="soft"', ProsodySettings(energy=-6)),
        ('volume="-3.5dB"', ProsodySettings(energy=-3.5)),
    ],
)
def test_values(front, attributes, manner):
    (clause,) = clauses(front, f"<prosody {attributes}>hello</prosody>")
    stretch = clause.phoneme_spans[0]
    assert (stretch.speed, stretch.pitch, stretch.energy) == manner


def test_emphasis(front):
    (clause,) = clauses(front, 'It is <emphasis level="strong">so</emphasis> good')
    loud = max(clause.phoneme_spans, key=lambda stretch: stretch.energy)
    assert (loud.phonemes.strip(), loud.speed < 1) == ("sˌO", True)


@pytest.mark.parametrize(
    ("kind", "written", "said"),
    [
        ("characters", "A1b&amp;", "A one B and"),
        ("spell-out", "AB", "A.B"),
        ("digits", "1,234", "one two three four"),
        ("cardinal", "1234", "one thousand two hundred thirty-four"),
        ("cardinal", "-5.5", "minus five point five"),
        ("ordinal", "3", "third"),
        ("date", "3/15/2024", "March fifteenth, twenty twenty four"),
        ("time", "17:30", "seventeen thirty"),
        ("time", "5pm", "five P.M"),
        ("telephone", "+1 800 555", "plus one, eight zero zero, five five five"),
    ],
)
def test_say_as(front, kind, written, said):
    (clause,) = clauses(front, f'so <say-as interpret-as="{kind}">{written}</say-as> now')
    assert clause.phonemes == plain(front, f"so {said} now")
    assert [word.text for word in clause.words] == ["so", written.replace("&amp;", "&"), "now"]


def test_dates_have_forms(front):
    said = '<say-as interpret-as="date" format="dmy">3/4/2024</say-as>'
    assert clauses(front, said)[0].phonemes == plain(front, "April third, twenty twenty four")


def test_substitutes_and_phonemes(front):
    assert words(front, 'the <sub alias="World Wide Web">WWW</sub>, <phoneme ph="təˈmeɪtoʊ">tomato</phoneme>!') == [
        ("the", "ðə"),
        ("WWW,", "wˈɜɹld wˈId wˈɛb"),
        ("tomato!", "təˈmAtO"),
    ]
    ours = '<phoneme alphabet="x-misaki" ph="kˈOkəɹO">Kokoro</phoneme>'
    assert words(front, ours) == [("Kokoro", "kˈOkəɹO")]


def test_white_space_of_the_document_is_ignored(front):
    inside = "\n\n   Hello\n   there.\n\n"
    assert [p.phonemes for p in read(front, inside)] == [plain(front, "Hello there.")]


@pytest.mark.parametrize(
    ("document", "line", "column", "told"),
    [
        ("Hello", 1, 1, "broken"),
        ("<speak>Hello", 1, 13, "broken"),
        ("<speak>a & b</speak>", 1, 11, "&amp;"),
        ("<speak>\n <b>x</b></speak>", 2, 2, "<prosody>"),
        ("<p>x</p>", 1, 1, "<speak>"),
        ("<speak><speak>x</speak></speak>", 1, 8, "<p>"),
        ("<!DOCTYPE speak [<!ENTITY a 'b'>]><speak>&a;</speak>", 1, 17, "document type"),
        ("<speak>&nbsp;</speak>", 1, 8, "broken"),
        ('<speak>x<break time="11s"/></speak>', 1, 9, "0ms to 10s"),
        ('<speak>x<break length="1s"/></speak>', 1, 9, "time, strength"),
        ('<speak><prosody rate="9">x</prosody></speak>', 1, 8, "0.25 to 4"),
        ('<speak><prosody pitch="50Hz">x</prosody></speak>', 1, 8, "st"),
        ("<speak><prosody>x</prosody></speak>", 1, 8, "rate, pitch, volume"),
        ('<speak><emphasis level="huge">x</emphasis></speak>', 1, 8, "strong"),
        ("<speak><say-as>x</say-as></speak>", 1, 8, "interpret-as"),
        ('<speak>\n<say-as interpret-as="money">5</say-as></speak>', 2, 1, "telephone"),
        ('<speak><say-as interpret-as="digits">x</say-as></speak>', 1, 8, "digits"),
        ('<speak><say-as interpret-as="date">2/31x</say-as></speak>', 1, 8, "date"),
        ('<speak><phoneme ph="日">x</phoneme></speak>', 1, 8, "U+65E5"),
        ('<speak><phoneme alphabet="x-sampa" ph="a">x</phoneme></speak>', 1, 8, "ipa, x-misaki"),
        ('<speak><sub alias="a"><p>x</p></sub></speak>', 1, 23, "text"),
        ('<speak xml:lang="de">x</speak>', 1, 1, "en"),
        ("<speak>" + "<emphasis>" * 40 + "x" + "</emphasis>" * 40 + "</speak>", 1, 318, "at most 32"),
        (f"<speak><sub alias='{'a ' * 600}'>x</sub></speak>", 1, 8, "at most 1,000"),
        (f"<speak><say-as interpret-as='digits'>{'1' * 1_001}</say-as></speak>", 1, 1039, "at most 1,000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_their_place_in_the_document(front, document, line, column, told):
    with pytest.raises(MalformedSsml) as caught:
        front.passages(document, ssml=True)
    error = caught.value
    assert (error.line, error.column) == (line, column), error
    assert told in str(error)
    assert f"line {line}, column {column}: " in str(error)
    assert error.param == "input"


def test_other_errors(front):
    with pytest.raises(EmptyText):
        front.passages("<speak> <p/> </speak>", ssml=True)
    with pytest.raises(UnsupportedScript, match="line 2"):
        front.passages("<speak>\nпривет</speak>", ssml=True)
    with pytest.raises(OptionError, match="ssml and phonemes"):
        front.passages("<speak>x</speak>", ssml=True, phonemes=True)


def test_a_document_may_be_silence_alone(front):
    assert read(front, '<break time="2s"/>') == [Pause(2_000, is_requested=True)]
