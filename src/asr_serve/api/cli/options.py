"""Options shared by several commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from asr_serve.config import EngineConfig
from asr_serve.config_sources import SettingValue, build_config, collect_values
from asr_serve.errors import OptionError, SourceNotFound

Model = Annotated[str, typer.Option("--model", "-m", help="Which model; see: asr-serve models list")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32 or bf16.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="none|int8|dynamic",
        help="int8: weights of 8 bits; dynamic: activations too, where that is faster here. Default: none.",
    ),
]
Weights = Annotated[str | None, typer.Option(metavar="DIR", help="A checkpoint folder instead of the model's own.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="engine.NAME=VALUE",
        help="A setting of the engine, like engine.use_chunked_inference=true. May be repeated; "
        "asr-serve serve --print-config explains them all.",
    ),
]
Language = Annotated[str | None, typer.Option("--language", "-l", help="A code or a name: en, German.")]
Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help='What was said before, for models that read (a Whisper): --prompt "A talk about Kubernetes." '
        "Names, spelling and style go on from it. Of a long text the end is read.",
    ),
]
Hotwords = Annotated[
    list[str] | None,
    typer.Option(
        "--hotwords",
        "--hotword",
        metavar="WORDS|@FILE",
        help="Names and words that may come: --hotwords 'Beckett,Ada Lovelace', or @names.txt with one a line. "
        "May be repeated.",
    ),
]
LanguageModel = Annotated[
    str | None,
    typer.Option(
        "--language-model",
        metavar="FILE|NAME",
        help="N-grams of the model's tokens, which its beam search adds: a file of asr-serve lm build --tokens, or "
        "one that is loaded with --set engine.language_models=NAME=FILE.",
        show_default=False,
    ),
]
LanguageModelWeight = Annotated[
    float | None,
    typer.Option(
        "--language-model-weight", metavar="0..4", help="How much it counts. Default: 0.3.", show_default=False
    ),
]
Words = Annotated[
    bool,
    typer.Option(
        "--words",
        help="When each word was said, and how sure the model was, in the formats "
        "that tell. Subtitles follow the words then.",
    ),
]
Speakers = Annotated[bool, typer.Option("--speakers", help="Who says it: SPEAKER_00, SPEAKER_01 and so on.")]
NumSpeakers = Annotated[int | None, typer.Option(help="How many speak, if that is known; implies --speakers.")]
MinSpeakers = Annotated[int | None, typer.Option(help="At least so many; implies --speakers.")]
MaxSpeakers = Annotated[int | None, typer.Option(help="At most so many; implies --speakers.")]
Itn = Annotated[
    bool,
    typer.Option(
        "--itn/--no-itn",
        help="Numbers, dates and money as one writes them: $25.30 for twenty-five dollars and thirty cents. "
        "English, Chinese, Japanese; wants the extra itn.",
    ),
]
SilenceSchedulePoints = Annotated[
    str | None,
    typer.Option(
        metavar="MS:MS,...",
        help="How long a pause ends a segment: 5000:1500,20000:800,inf:300 asks for 1.5 s while a "
        "segment is up to 5 s long, 0.8 s up to 20 s, then 0.3 s.",
    ),
]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="For that server; better in ASR_SERVE_API_KEY.")]
VoicesDir = Annotated[
    str | None,
    typer.Option("--voices-dir", metavar="DIR", help="Where voices are kept, if not where they usually are."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
MOST_HOTWORD_BYTES = 4 << 20
"""Limit of a hot-word file: more than the words that any request may have."""


def hotwords(given: list[str] | None) -> tuple[str, ...]:
    """Parses the values of --hotwords: lists with commas, and files with a word or phrase per line, in which
    `#` begins a comment. Raises OptionError, SourceNotFound."""
    words: list[str] = []
    for item in given or []:
        if not item.startswith("@"):
            words += (part.strip() for part in item.split(","))
            continue
        path = Path(item[1:])
        try:
            with path.open("rb") as file:
                content = file.read(MOST_HOTWORD_BYTES + 1)
            lines = content.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise OptionError(f"--hotwords {item} is no text", "UTF-8, a word or phrase a line") from None
        except OSError as error:
            raise SourceNotFound(f"--hotwords {item}: {error.strerror}", "", "check the path") from None
        if len(content) > MOST_HOTWORD_BYTES:
            raise OptionError(f"--hotwords {item} has more than {MOST_HOTWORD_BYTES >> 20} MiB", "a list of words")
        words += (line.partition("#")[0].strip() for line in lines)
    return tuple(dict.fromkeys(word for word in words if word))


def language_model(given: str | None, config: EngineConfig) -> tuple[str, EngineConfig]:
    """Name of the language model of --language-model, and the configuration that loads it: a file has its own name
    without suffixes. Empty for None."""
    if given is None or given in config.language_model_files or not Path(given).is_file():
        return given or "", config
    name = re.sub(r"[\s,=]", "-", Path(given).name.partition(".")[0]) or "language-model"
    return name, msgspec.structs.replace(config, language_models=(*config.language_models, f"{name}={given}"))


def settings(pairs: list[str] | None) -> dict[str, SettingValue]:
    """Maps settings to texts, from the NAME=VALUE of --set. Raises OptionError for one without value, or set twice."""
    given: dict[str, SettingValue] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"--set {pair}", "NAME=VALUE, like --set engine.max_decode_rows=32")
        if name in given:
            raise OptionError(f"{name} is given twice with --set", "once")
        given[name] = SettingValue(value, "flag --set")
    return given


def engine(pairs: list[str] | None, quantize: str | None = None) -> EngineConfig:
    """Builds the engine's settings from --set and --quantize, for commands without a server. Raises OptionError."""
    given = collect_values(None, {}, settings([*(pairs or []), *([f"engine.quantize={quantize}"] if quantize else [])]))
    for name in given:
        if not name.startswith("engine."):
            raise OptionError(
                f"--set {name}", "settings of the engine, engine.NAME", "it is a server's: asr-serve serve --set"
            )
    return build_config(given).engine
