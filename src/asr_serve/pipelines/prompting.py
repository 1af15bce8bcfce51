"""Prompts and hotwords: text that a model reads before the audio, and words that are likely in it.

The end of a prompt is nearest to the audio and matters most, so a prompt that is too long loses its beginning.

Source  format of a prompt: openai-whisper's `initial_prompt`, faster-whisper's `get_prompt`;
        tests/pipelines/test_prompting.py compares
"""

from __future__ import annotations

from collections.abc import Sequence

from asr_serve.decoding.biasing_graph import MOST_IN_ALL, MOST_WORDS, pack_phrases, parse_phrase
from asr_serve.engine.client import EngineClient
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.options import ListenOptions
from asr_serve.text.languages import SCRIPTS, script_of
from asr_serve.text.tokenizers import Tokenizer, first_unencodable_letter
from asr_serve.types import LanguageModelChoice, suggest_name

LANGUAGE_MODEL_WEIGHT = 0.1
"""Weight of a language model that a request names without one."""
MAX_PROMPT_CHARACTERS = 16_384
"""Length limit of a prompt: no model reads as much, and tokenizing takes time."""


def prompt_tokens(client: EngineClient, tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Returns SearchOptions.prompt: the end of `prompt`, as much as the model reads; empty for an empty prompt.

    Raises OptionError for a prompt that is no text or too long, UnsupportedOption for a model that reads no
    prompt.
    """
    return truncate_context(client.card, _tokens(client.card, tokenizer, "prompt", prompt))


def truncate_context(card: AsrCard, tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns the end of the previous tokens, as much as the model reads."""
    return tuple(tokens[max(0, len(tokens) - card.prompt_tokens) :])


def hotword_bias(client: EngineClient, tokenizer: Tokenizer, hotwords: Sequence[str]) -> str:
    """Returns SearchOptions.bias for hotwords, each `word` or `word:weight`.

    Raises OptionError (`param` is `hotwords`) for what is no list of texts, for too many words, for a word that is
    empty, too long or not in the model's vocabulary, and for a weight out of range; UnsupportedOption for a model
    that searches a decoding graph.
    """
    is_list = isinstance(hotwords, Sequence) and not isinstance(hotwords, str)
    if not is_list or not all(isinstance(word, str) for word in hotwords):
        raise OptionError(f"hotwords={str(hotwords)[:60]!r}", "a list of texts", 'like ["Ada"]', param="hotwords")
    if len(hotwords) > MOST_WORDS:
        raise OptionError(
            f"{len(hotwords)} hotwords", f"up to {MOST_WORDS}", "name those that matter most", param="hotwords"
        )
    if not hotwords:
        return ""
    if client.card.heads == ("wfst",):
        raise UnsupportedOption(
            "hotwords are not supported",
            f"{client.card.name} searches a fixed graph of words; Moonshine, Whisper and streaming models with a head "
            "ctc, rnnt or tdt can",
            "leave them out, or use such a model",
            param="hotwords",
        )
    words = [parse_phrase(word) for word in hotwords]
    texts = [word.text for word in words]
    if (characters := sum(map(len, texts))) > MOST_IN_ALL:
        came = f"hotwords of {characters} characters together"
        raise OptionError(came, f"up to {MOST_IN_ALL}", "name those that matter most", param="hotwords")
    check_hotword_script(client.card, texts)
    check_hotword_letters(client.card, tokenizer, texts)
    if "hotwords" in client.card.prompt_options:
        if characters > MAX_PROMPT_CHARACTERS:
            came, allowed = (
                f"hotwords of {characters} characters together",
                f"up to {MAX_PROMPT_CHARACTERS} in a prompt",
            )
            raise OptionError(came, allowed, "name those that matter most", param="hotwords")
        words = [word for word in words if word.weight != 1.0]
    return pack_phrases(words) if words else ""


def prompt_hotwords(card: AsrCard, hotwords: Sequence[str]) -> tuple[str, ...]:
    """Returns SearchOptions.hotwords for hotwords that `hotword_bias` has checked: their texts, of a model whose prompt
    names them. There only words with another weight than 1 are boosted too."""
    return tuple(parse_phrase(word).text for word in hotwords) if "hotwords" in card.prompt_options else ()


def prompt_itn(card: AsrCard, itn: bool | None) -> bool:
    """Returns SearchOptions.itn: written form unless it is declined, which only a model whose prompt asks for it
    hears."""
    return itn is not False or "itn" not in card.prompt_options


def normalizes_text(card: AsrCard, itn: bool | None) -> bool:
    """Returns whether inverse text normalization follows recognition: where it is requested of a model that does not do
    it itself."""
    return bool(itn) and "itn" not in card.prompt_options


def language_model_choice(client: EngineClient, name: str, weight: float | None) -> LanguageModelChoice | None:
    """Returns SearchOptions.language_model for a language model's name; None for an empty one. `weight` None: the
    default. Raises UnsupportedOption for a model that has none, OptionError for a name that is not loaded."""
    if not name:
        return None
    loaded, model = client.card.language_models, client.card.name
    if not loaded:
        words = client.card.heads == ("wfst",)
        raise UnsupportedOption(
            f"language_model={name[:60]!r}",
            f"{model} has none loaded that is made of "
            + ("the words of its decoding graph, searched on the CPU" if words else "its tokens"),
            f"make one with asr-serve lm build{'' if words else f' --tokens {model}'}, and load it with "
            "engine.language_models NAME=FILE",
            param="language_model",
        )
    if name not in loaded:
        raise OptionError(
            f"there is no language model {name[:60]!r}",
            f"loaded are: {', '.join(loaded)}",
            suggest_name(name, loaded),
            param="language_model",
        )
    return LanguageModelChoice(name, LANGUAGE_MODEL_WEIGHT if weight is None else float(weight))


def check_language_model_beam(card: AsrCard, name: str, beam: int) -> None:
    """Raises OptionError for greedy search of an attention decoder, which no language model can change."""
    if name and not card.streaming and beam < 2:
        raise OptionError(f"language_model with beam={beam}", "a beam of 2 or more", "4 is usual: beam=4", param="beam")


def live_language_model(client: EngineClient, options: ListenOptions) -> LanguageModelChoice | None:
    """Language model of a live session; None: none. Raises OptionError, see `language_model_choice`, and
    UnsupportedOption for a model without streaming, which decodes live speech greedily."""
    name = options.language_model
    if name and not client.card.streaming:
        raise UnsupportedOption(
            f"language_model={name[:60]!r} for live audio",
            f"{client.card.name} decodes live speech greedily; streaming models with the head ctc, rnnt or tdt can",
            "leave it out, or transcribe a recording with beam=4",
            param="language_model",
        )
    return language_model_choice(client, name, options.language_model_weight)


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
    """Raises OptionError for a word with a letter of a script that none of the model's languages uses."""
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
    """Tokenizes as in training: behind a space, like text that continues."""
    if not isinstance(text, str):
        raise OptionError(f"{name}={str(text)[:60]!r}", "text", param=name)
    if not text.strip():
        return ()
    if not card.prompts:
        raise UnsupportedOption(
            f"{name} is not supported",
            f"{card.name} takes no prompt; every Whisper does",
            "leave it out, or ask for a Whisper",
            param=name,
        )
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise OptionError(f"{name} of {len(text)} characters", f"up to {MAX_PROMPT_CHARACTERS}", param=name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{name} holds half a surrogate pair", "text that has a form in UTF-8", param=name) from None
    return tuple(tokenizer.encode(f" {text.strip()}"))
