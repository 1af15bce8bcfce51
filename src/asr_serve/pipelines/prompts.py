"""Text that a model reads before it hears: words that may come, then what was said before.

The last of it is nearest to the audio and says most, so hot words come first. A prompt that is too long loses its
beginning; hot words are never lost.

Source  the order, and what is put around the texts: openai-whisper's `initial_prompt`, faster-whisper's `hotwords`
        and `get_prompt`; tests/pipelines/test_prompting.py compares
"""

from __future__ import annotations

from collections.abc import Sequence

from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.card import Card
from asr_serve.text.tokens import Tokenizer

MOST_CHARACTERS = 16_384
"""Of a prompt, and of all hot words: no model reads so much, and cutting it into tokens takes time."""
BETWEEN = ", "
"""Two hot words."""


def prompt_tokens(
    client: EngineClient, tokenizer: Tokenizer, prompt: str, hotwords: Sequence[str]
) -> tuple[int, ...]:
    """What goes into SearchOptions.prompt: the hot words, and as much of the end of `prompt` as the model reads
    beside them. Empty where nothing is given.

    Raises OptionError for what is no text, is too long, or more hot words than half of what the model reads;
    UnsupportedOption where the model reads nothing. `param` is `prompt` or `hotwords`.
    """
    words = hotword_tokens(client, tokenizer, hotwords)
    return behind(client.card, words, _tokens(client.card, tokenizer, "prompt", prompt))


def hotword_tokens(client: EngineClient, tokenizer: Tokenizer, hotwords: Sequence[str]) -> tuple[int, ...]:
    """Those of the hot words alone, at most half of what the model reads. Raises as `prompt_tokens` does."""
    listed = isinstance(hotwords, Sequence) and not isinstance(hotwords, str)
    if not listed or not all(isinstance(word, str) for word in hotwords):
        raise OptionError(f"hotwords={str(hotwords)[:60]!r}", "a list of texts", 'like ["Ada"]', param="hotwords")
    words = BETWEEN.join(word.strip() for word in hotwords if word.strip())
    found, most = _tokens(client.card, tokenizer, "hotwords", words), client.card.prompt_tokens // 2
    if len(found) > most:
        raise OptionError(
            f"hotwords of {len(found)} tokens",
            f"{client.card.name} reads up to {most}",
            "name those that matter most",
            param="hotwords",
        )
    return found


def behind(card: Card, words: tuple[int, ...], said: Sequence[int]) -> tuple[int, ...]:
    """Hot words, and the end of what was said before. `words`: of `hotword_tokens`."""
    room = card.prompt_tokens - len(words)
    return (*words, *said[max(0, len(said) - room) :])


def _tokens(card: Card, tokenizer: Tokenizer, name: str, text: str) -> tuple[int, ...]:
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
    if len(text) > MOST_CHARACTERS:
        raise OptionError(f"{name} of {len(text)} characters", f"up to {MOST_CHARACTERS}", param=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"{name} holds half a surrogate pair", "text that has a form in UTF-8", param=name
        ) from None
    return tuple(tokenizer.encode(f" {text.strip()}"))
