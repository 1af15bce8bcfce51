"""Pronunciations of well-known names that the library's lexicons lack and its network reads as English words.

Each was mispronounced without this table. Names with several pronunciations (Ciara, Jaime) are left to the
request's lexicon.
"""

from __future__ import annotations

import re
from functools import cache

_names = """
aine ˈɔːnjə  anais ˌænɑːˈiːs  aoife ˈiːfə  caoimhe kˈiːvə  cillian kˈɪliən  domhnall dˈOnəl  eilidh ˈAli  eoin ˈOɪn
grainne ɡɹˈɔːnjə  niamh nˈiːv  oisin ʌʃˈiːn  rhys ɹˈiːs  roisin ɹOʃˈiːn  saoirse sˈɪɹʃə  sean ʃˈɔːn  sian ʃˈɑːn
sinead ʃɪnˈAd  siobhan ʃɪvˈɔːn  tadhg tˈIɡ
guillermo ɡiːˈɛɹmO  joao ʒuːˈW  joaquin wɑːkˈiːn  jorge hˈɔːɹhA  jose hOzˈA  luis luːˈiːs  thiago tiːˈɑːɡO
ximena hɪmˈAnə
benoit bənwˈɑː  beyonce biːˈɑːnsA  camus kæmˈuː  chalamet ʃˈæləmA  foucault fuːkˈO  guillaume ɡiːˈOm
jacques ʒˈɑːk  mbappe ɛmbˈæpA  renee ɹənˈA
chiara kɪˈɑːɹə  gianna ʤiːˈɑːnə  giulia ʤˈuːliə  giuseppe ʤuːsˈɛpA  luigi luːˈiːʤi
chloe klˈOi  zoe zˈOi  hermione həɹmˈIəni  charlize ʃɑːɹlˈiːz  goethe ɡˈɜːɹtə
djokovic ʤˈOkəvɪʧ  mikhail mɪkˈIl  sergei sɛɹɡˈA  wojciech vˈYʧɛk
ahmed ˈɑːmɛd  hussein hʊsˈAn  yousef jˈuːsɛf  nguyen wˈɪn  xu ʃˈuː  zhang ʤˈɑːŋ
huawei wˈɑːwA  hyundai hˈʌndA  kubernetes kuːbəɹnˈɛtiz  xiaomi ʃˈWmi
"""
"""Names in plain lower case, each with its phonemes: in misaki's alphabet, with every length and every r."""
_vowel = "[ˈˌ]?[AIOQWYæɑɔəɛɜɪiʊuʌ]"


@cache
def name_pronunciations(british: bool) -> dict[str, str]:
    """Pronunciations in one accent. American English has no length; British has r only before a vowel."""
    entries = _names.split()
    convert = _british if british else _american
    return {name: convert(phonemes) for name, phonemes in zip(entries[::2], entries[1::2], strict=True)}


def possessive(phonemes: str) -> str:
    return phonemes + ("s" if phonemes[-1] in "ptkfθ" else "ɪz" if phonemes[-1] in "szʃʒʧʤ" else "z")


def _american(phonemes: str) -> str:
    return phonemes.replace("ː", "")


def _british(phonemes: str) -> str:
    open_ = re.sub(rf"ɪɹ(?!{_vowel})", "ɪə", re.sub(rf"ɛɹ(?!{_vowel})", "ɛː", phonemes))
    return re.sub(rf"ɹ(?!{_vowel})", "", open_).replace("O", "Q").replace("æ", "a")
