"""What a caller gives a model beside audio: text that it reads before it hears, and words that may come.

The last of a text is nearest to the audio and says most, so one that is too long loses its beginning.

Source  what is put around a text: openai-whisper's `initial_prompt`, faster-whisper's `get_prompt`;
        tests/pipelines/test_prompting.py compares
"""

from __future__ import annotations

from collections.abc import Sequence

from asr_serve.decoding.biasing import MOST_IN_ALL, MOST_WORDS, pack_phrases, parse_phrase
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.text.languages import SCRIPTS, script_of
from asr_serve.text.tokenizers import Tokenizer, first_unencodable_letter

MAX_PROMPT_CHARACTERS = 16_384
"""Of a prompt: no model reads so much, and cutting it into tokens takes time."""


def prompt_tokens(client: EngineClient, tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """What goes into SearchOptions.prompt: as much of the end of `prompt` as the model reads. Empty where nothing
    is given.

    Raises OptionError for what is no text or is too long; UnsupportedOption where the model reads nothing.
    """
    return truncate_context(client.card, _tokens(client.card, tokenizer, "prompt", prompt))


def truncate_context(card: AsrCard, said: Sequence[int]) -> tuple[int, ...]:
    """The end of what was said before, as much of it as the model reads."""
    return tuple(said[max(0, len(said) - card.prompt_tokens) :])


def hotword_bias(client: EngineClient, tokenizer: Tokenizer, hotwords: Sequence[str]) -> str:
    """What goes into SearchOptions.bias, of words as a caller writes them: `word` or `word:weight`.

    Raises OptionError for what is no list of texts, too many, an empty or too long one, one that the model cannot
    write, a weight out of range. `param` is `hotwords`.
    """
    listed = isinstance(hotwords, Sequence) and not isinstance(hotwords, str)
    if not listed or not all(isinstance(word, str) for word in hotwords):
        raise OptionError(f"hotwords={str(hotwords)[:60]!r}", "a list of texts", 'like ["Ada"]', param="hotwords")
    if len(hotwords) > MOST_WORDS:
        raise OptionError(
            f"{len(hotwords)} hotwords", f"up to {MOST_WORDS}", "name those that matter most", param="hotwords"
        )
    if not hotwords:
        return ""
    words = [parse_phrase(word) for word in hotwords]
    texts = [word.text for word in words]
    if (characters := sum(map(len, texts))) > MOST_IN_ALL:
        came = f"hotwords of {characters} characters together"
        raise OptionError(came, f"up to {MOST_IN_ALL}", "name those that matter most", param="hotwords")
    check_hotword_script(client.card, texts)
    check_hotword_letters(client.card, tokenizer, texts)
    return pack_phrases(words)


def check_hotword_letters(card: AsrCard, tokenizer: Tokenizer, words: Sequence[str]) -> None:
    """Raises OptionError for a word with a letter or digit that the model's vocabulary does not have."""
    for word in words:
        if missing := first_unencodable_letter(tokenizer, word):
            raise OptionError(
                f"hotword {word[:60]!r} has {missing!r}",
                f"the vocabulary of {card.name} has no such letter",
                "write it as it is spoken, in the letters that the model writes",
                param="hotwords",
            )


def check_hotword_script(card: AsrCard, words: Sequence[str]) -> None:
    """Raises OptionError for a word with a letter of a script that the model was never taught."""
    scripts = {name for code in card.languages for name in SCRIPTS.get(code, ("",))}
    if "" in scripts:
        return
    foreign = {c for c in set("".join(words)) if c.isalpha() and script_of(c) not in scripts}
    for word in words if foreign else ():
        if wrong := next((c for c in word if c in foreign), ""):
            known = " and ".join(sorted(name.capitalize() for name in scripts))
            raise OptionError(
                f"hotword {word[:60]!r} has the letter {wrong!r}",
                f"{card.name} writes {known} letters",
                "write it as the model would, or ask for a model of that language",
                param="hotwords",
            )


def _tokens(card: AsrCard, tokenizer: Tokenizer, name: str, text: str) -> tuple[int, ...]:
    """As the model was taught: behind a space, like text that goes on."""
    if not isinstance(text, str):
        raise OptionError(f"{name}={str(text)[:60]!r}", "text", param=name)
    if not text.strip():
        return ()
    if not card.prompts:
        raise UnsupportedOption(
            f"{name} is not supported",
            f"{card.name} hears audio only; every Whisper reads text beside it",
            "leave it out, or ask for a Whisper",
            param=name,
        )
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise OptionError(f"{name} of {len(text)} characters", f"up to {MAX_PROMPT_CHARACTERS}", param=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"{name} holds half a surrogate pair", "text that has a form in UTF-8", param=name
        ) from None
    return tuple(tokenizer.encode(f" {text.strip()}"))
