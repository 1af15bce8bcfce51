"""What is written, and how it is read: the hard cases, one to a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.errors import UnsupportedOption
from asr_serve.text.normalization.verbalize import verbalize

READ = [
    # numbers
    ("I have 3 apples.", "I have three apples."),
    ("1,234,567 people", "one million two hundred thirty-four thousand five hundred sixty-seven people"),
    ("It was 3.14159 exactly.", "It was three point one four one five nine exactly."),
    ("-5 degrees", "minus five degrees"),
    ("3.10", "three point one zero"),
    ("$.50", "fifty cents"),
    ("12,345.67", "twelve thousand three hundred forty-five point six seven"),
    ("007", "zero zero seven"),
    ("9" * 21, " ".join(["nine"] * 21)),
    ("the 21st century", "the twenty-first century"),
    ("1st, 2nd, 3rd, 11th", "first, second, third, eleventh"),
    ("the 1,000,000th visitor", "the one millionth visitor"),
    ("#1", "number one"),
    ("10k", "ten thousand"),
    ("5M users", "five million users"),
    ("3x faster", "three times faster"),
    ("1920x1080", "nineteen twenty by ten eighty"),
    ("a 1080p screen", "a ten eighty p screen"),
    ("4K video", "four K video"),
    ("10-20 people", "ten to twenty people"),
    ("The score was 3-2.", "The score was three to two."),
    ("a 10-year-old boy", "a ten year-old boy"),
    ("1/2 cup", "one half cup"),
    ("2 1/2 cups", "two and a half cups"),
    ("2½ cups", "two and a half cups"),
    ("3/4 of it", "three quarters of it"),
    ("a 1/16 inch gap", "a one sixteenth inch gap"),
    ("16/9", "sixteen over nine"),
    ("24/7", "twenty-four seven"),
    ("5 + 3 = 8", "five plus three equals eight"),
    ("10 - 4 = 6", "ten minus four equals six"),
    ("2 * 3", "two times three"),
    ("10^6", "ten to the power of six"),
    ("1e6", "one times ten to the power of six"),
    ("x < y", "x less than y"),
    ("±3", "plus or minus three"),
    ("~5", "about five"),
    # years, days, times
    ("in 1905", "in nineteen oh five"),
    ("in 2005", "in two thousand five"),
    ("in 2024", "in twenty twenty four"),
    ("in 1066", "in ten sixty six"),
    ("the 1990s and the '80s", "the nineteen nineties and the eighties"),
    ("from 1914-1918", "from nineteen fourteen to nineteen eighteen"),
    ("On 2024-03-15 we met.", "On March fifteenth, twenty twenty four we met."),
    ("03/15/2024", "March fifteenth, twenty twenty four"),
    ("15/03/2024", "March fifteenth, twenty twenty four"),
    ("March 15, 2024", "March fifteenth, twenty twenty four"),
    ("15 March 2024", "the fifteenth of March twenty twenty four"),
    ("Sept. 11, 2001", "September eleventh, two thousand one"),
    ("May 10-12", "May tenth to twelfth"),
    ("the 4th of July", "the fourth of July"),
    ("9/11", "nine eleven"),
    ("1970-01-01T09:30:00Z", "January first, nineteen seventy, nine thirty"),
    ("Mon-Fri", "Monday to Friday"),
    ("5:30 pm", "five thirty P.M"),
    ("At 5 p.m.", "At five P.M."),
    ("9:05 a.m.", "nine oh five A.M."),
    ("17:45", "seventeen forty-five"),
    ("12:00", "twelve o'clock"),
    ("00:15", "zero fifteen"),
    ("Meet me at 5:30-6:00 pm.", "Meet me at five thirty to six P.M."),
    ("12:30:45", "twelve thirty and forty-five seconds"),
    ("1h30m", "one hour thirty minutes"),
    ("16:9 screens", "sixteen to nine screens"),
    ("John 3:16", "John three sixteen"),
    # money
    ("$5", "five dollars"),
    ("$1", "one dollar"),
    ("$5.99", "five dollars and ninety-nine cents"),
    ("$1,234.56", "one thousand two hundred thirty-four dollars and fifty-six cents"),
    ("$1.5 million", "one point five million dollars"),
    ("$3bn", "three billion dollars"),
    ("$100k", "one hundred thousand dollars"),
    ("-$5", "minus five dollars"),
    ("$5-10 per day", "five to ten dollars per day"),
    ("$10/month", "ten dollars per month"),
    ("£1.01", "one pound and one penny"),
    ("€3.50", "three euros and fifty cents"),
    ("¥500", "five hundred yen"),
    ("₹100", "one hundred rupees"),
    ("100 USD", "one hundred dollars"),
    ("5¢", "five cents"),
    # measures
    ("20%", "twenty percent"),
    ("5-10%", "five to ten percent"),
    ("50°C", "fifty degrees Celsius"),
    ("-40 °F", "minus forty degrees Fahrenheit"),
    ("1 km", "one kilometer"),
    ("5kg", "five kilograms"),
    ("100 km/h", "one hundred kilometers per hour"),
    ("5 m/s", "five meters per second"),
    ("10 m²", "ten meters squared"),
    ("2.4 GHz", "two point four gigahertz"),
    ("16 oz.", "sixteen ounces."),
    ("6'2\" tall", "six feet two tall"),
    ('He said "I am 12"', 'He said "I am twelve"'),
    # abbreviations and names
    ("Dr. Smith and Mrs. Brown", "Dr Smith and Mrs Brown"),
    ("St. John lives on Main St.", "Saint John lives on Main Street."),
    ("Prof. Lee, Ph.D.", "Professor Lee, P.H.D."),
    ("e.g. this, i.e. that, etc.", "for example, this, that is, that, et cetera."),
    ("No. 5", "Number five"),
    ("I said no.", "I said no."),
    ("We orbit the Sun.", "We orbit the Sun."),
    ("Fig. 3", "Figure three"),
    ("pp. 5-10", "pages five to ten"),
    ("Chapter IV", "Chapter four"),
    ("World War II", "World War two"),
    ("Henry VIII", "Henry the eighth"),
    ("Gen Z likes it.", "Generation Z likes it."),
    ("C++ and C#", "C plus plus and C sharp"),
    ("Node.js", "Node dot J.S"),
    ("AT&T's R&D", "A.T and T's R and D"),
    ("rock 'n' roll", "rock and roll"),
    ("'Tis the season.", "Tis the season."),
    ("MP3, H2O, B2B, COVID-19", "M.P three, H two O, B two B, COVID nineteen"),
    ("flight AA123 from gate 101", "flight A.A one twenty-three from gate one oh one"),
    ("NASA and the U.S. policy", "NASA and the U.S. policy"),
    # addresses
    ("£2.50 at shop.example.org/a_b", "two pounds and fifty pence at shop dot example dot org slash A underscore B"),
    ("https://www.example.com/path", "W.W.W dot example dot com slash path"),
    ("See example.com.", "See example dot com."),
    ("john.doe+spam@mail.co.uk", "john dot doe plus spam at mail dot co dot U.K"),
    ("192.168.0.1", "one nine two dot one six eight dot zero dot one"),
    ("v2.0.1", "version two point zero point one"),
    ("open /usr/bin/env or main.py", "open slash usr slash bin slash env or main dot P.Y"),
    ("snake_case_name", "snake case name"),
    ("(555) 123-4567", "five five five, one two three, four five six seven"),
    ("+44 20 7946 0958", "plus four four, two zero, seven nine four six, zero nine five eight"),
    ("call 911", "call nine one one"),
    ("Your order number is 48213.", "Your order number is four eight two one three."),
    # signs that hold each other
    ("a -> b", "a to b"),
    ("7 >= 3", "seven is greater than or equal to three"),
    ("x <= 8", "x less than or equal to eight"),
    ("7 ≥ 3", "seven is greater than or equal to three"),
    ("≥ 5", "at least five"),
    ("10 > 9", "ten is greater than nine"),
    ("5 < -3", "five is less than minus three"),
    ("for values > 5", "for values greater than five"),
    ("6 x 7", "six times seven"),
    ("What is 6 × 7?", "What is six times seven?"),
    ("6 x 7 = 42", "six times seven equals forty-two"),
    ("6 x 7 in", "six by seven inches"),
    ("6x4 m", "six by four meters"),
    ("3 x 5 x 7 cm", "three by five by seven centimeters"),
    ("a 3 x 3 grid", "a three by three grid"),
    ("a 4 x 4 in the garage", "a four by four in the garage"),
    # numbers as others group them
    ("5 000 CHF", "five thousand Swiss francs"),
    ("12 500 €", "twelve thousand five hundred euros"),
    ("$1 000", "one thousand dollars"),
    ("100 000 people", "one hundred thousand people"),
    ("1 234 567", "one million two hundred thirty-four thousand five hundred sixty-seven"),
    ("rooms 101 102 103", "rooms one hundred one one hundred two one hundred three"),
    ("in 2020 300 people", "in twenty twenty three hundred people"),
    ("12,50 €", "twelve euros and fifty cents"),
    ("€12,50", "twelve euros and fifty cents"),
    ("1.234,56 EUR", "one thousand two hundred thirty-four euros and fifty-six cents"),
    ("10,5 °C", "ten point five degrees Celsius"),
    ("1,5 kg", "one point five kilograms"),
    ("5 zł", "five zloty"),
    ("20.50 PLN", "twenty zloty and fifty grosz"),
    # from, to
    ("7-8 p.m.", "seven to eight P.M."),
    ("From 9am–5pm.", "From nine A.M to five P.M."),
    ("7 p.m.-8", "seven P.M to eight"),
    ("2:30-3", "two thirty to three"),
    ("John 3:16-18", "John three sixteen to eighteen"),
    ("1st-3rd", "first to third"),
    ("10:05:30 a.m.", "ten oh five and thirty seconds A.M."),
    ("10:00:01 pm today", "ten and one second P.M today"),
    ("in 45:30", "in forty-five thirty"),
    ("in 31:05", "in thirty-one oh five"),
    ("in 25:00", "in twenty-five minutes"),
    ("60:40", "sixty to forty"),
    # parts and their units
    ("3 1/2 in.", "three and a half inches."),
    ("3 1/2 in. wide", "three and a half inches wide"),
    ("5 in. of rain", "five inches of rain"),
    ("1 in.", "one inch."),
    ("He came in.", "He came in."),
    ("5 in 10", "five in ten"),
    ("1/2 in the bag", "one half in the bag"),
    ("3/4 in favor", "three quarters in favor"),
    ("0.5 in., or less", "zero point five inches, or less"),
    ("3/4 in.", "three quarters of an inch."),
    ("2 1/2 oz of gin", "two and a half ounces of gin"),
    ("10 lb. 4 oz.", "ten pounds four ounces."),
    ("Add 3/4 cup", "Add three quarters of a cup"),
    ("3/4-inch bolts and a 1/2-in. nut", "three quarters inch bolts and a one half inch nut"),
    ("3/4 cup of milk", "three quarters of a cup of milk"),
    ("a 3/4 inch bolt", "a three quarters inch bolt"),
    # abbreviations, Roman numbers
    ("E.g. this.", "For example, this."),
    ("I.e., that.", "That is, that."),
    ("ext. 12", "extension twelve"),
    ("ext4", "ext four"),
    ("Ext. 1234", "Extension twelve thirty-four"),
    ("port 8080", "port eighty eighty"),
    ("port 443", "port four forty-three"),
    ("room 1204", "room twelve oh four"),
    ("Henry VIII's wives", "Henry the eighth's wives"),
    ("Chapter IV's end", "Chapter four's end"),
    ("Malcolm X's life", "Malcolm X's life"),
    ("USB Type C", "USB Type C"),
    ("Grade C's", "Grade C's"),
    ("foo.io", "foo dot I.O"),
    # what is no text
    ("**bold** and `code` [1]", "bold and code one"),
    ("# Heading", "Heading"),
    ("nice :) <3", "nice"),
    ("wait... what?!", "wait... what?!"),
    ("Really???", "Really?"),
]
BRITISH = [
    ("03/04/2024", "the third of April, twenty twenty four"),
    ("1,234 km", "one thousand two hundred and thirty-four kilometres"),
    ("5 meters", "five metres"),
]


@pytest.mark.parametrize(("written", "read"), READ, ids=[written for written, _ in READ])
def test_written_forms_are_verbalized(written, read):
    assert verbalize(written) == read


@pytest.mark.parametrize(("written", "read"), BRITISH)
def test_british(written, read):
    assert verbalize(written, "en-gb") == read
    assert verbalize(written) != read


def test_another_language():
    with pytest.raises(UnsupportedOption, match="en, en-gb") as caught:
        verbalize("eins", "de")
    assert caught.value.param == "language"


@given(st.text(max_size=80) | st.text("0123456789.,:/-+$%'\" abxkmM€½@#", max_size=60))
def test_any_text_is_verbalized_without_digits(text):
    assert not any(letter in "0123456789" for letter in verbalize(text))


PLAIN = ["The", "quick,", "brown", "fox;", "jumps", "over", "a", "lazy", "dog.", "Why?", "I'd", "say:", "never!"]


@given(st.lists(st.sampled_from(PLAIN)))
def test_plain_words_stay_as_they_are(words):
    assert verbalize(" ".join(words)) == " ".join(words)
