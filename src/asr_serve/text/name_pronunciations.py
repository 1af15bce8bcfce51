"""Well-known names that no lexicon of the library's has, and that its network reads as English words.

Each was heard wrong without this table. Those of which people of that name say several things (Ciara, Jaime) are
left to the caller's lexicon.
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
"""A name in plain small letters, and how it is said: in misaki's alphabet, with every length and every r."""
_vowel = "[ˈˌ]?[AIOQWYæɑɔəɛɜɪiʊuʌ]"


@cache
def name_pronunciations(british: bool) -> dict[str, str]:
    """As the accent says them. American English has no length, British no r but before a vowel."""
    listed = _names.split()
    said = _british if british else _american
    return {name: said(phonemes) for name, phonemes in zip(listed[::2], listed[1::2], strict=True)}


def possessive(phonemes: str) -> str:
    return phonemes + ("s" if phonemes[-1] in "ptkfθ" else "ɪz" if phonemes[-1] in "szʃʒʧʤ" else "z")


def _american(phonemes: str) -> str:
    return phonemes.replace("ː", "")


def _british(phonemes: str) -> str:
    open_ = re.sub(rf"ɪɹ(?!{_vowel})", "ɪə", re.sub(rf"ɛɹ(?!{_vowel})", "ɛː", phonemes))
    return re.sub(rf"ɹ(?!{_vowel})", "", open_).replace("O", "Q").replace("æ", "a")
