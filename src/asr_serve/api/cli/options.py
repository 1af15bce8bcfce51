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

Model = Annotated[str, typer.Option("--model", "-m", help="Name of the model; see: asr-serve models list")]
Device = Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Data type to compute in: auto, fp32 or bf16.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="auto|none|int8|dynamic",
        help="8-bit quantization. auto: where it is faster on this processor, in the layers that leave a model's error "
        "rate the same; int8: of all weights; dynamic: of the activations too, where that is faster. Default: auto.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None, typer.Option(metavar="DIR", help="Checkpoint folder to load instead of the model's own weights.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="engine.NAME=VALUE",
        help="Engine setting, like engine.use_chunked_inference=true. May be repeated; "
        "asr-serve serve --print-config lists and explains all settings.",
    ),
]
Language = Annotated[
    str | None, typer.Option("--language", "-l", help="Language of the speech, as a code or a name: en, German.")
]
Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help='Text that precedes the speech, for models that read a prompt (Whisper): --prompt "A talk about '
        'Kubernetes." Names, spelling and style follow it. Only the end of a long text is used.',
    ),
]
Hotwords = Annotated[
    list[str] | None,
    typer.Option(
        "--hotwords",
        "--hotword",
        metavar="WORDS|@FILE",
        help="Words and names to favor in recognition: --hotwords 'Beckett,Ada Lovelace', or @names.txt with one per "
        "line. May be repeated.",
    ),
]
LanguageModel = Annotated[
    str | None,
    typer.Option(
        "--language-model",
        metavar="FILE|NAME",
        help="N-gram language model that scores hypotheses in beam search: a file that asr-serve lm build --tokens "
        "wrote, without --tokens for a model that searches a decoding graph; or the NAME of one loaded with --set "
        "engine.language_models=NAME=FILE.",
        show_default=False,
    ),
]
LanguageModelWeight = Annotated[
    float | None,
    typer.Option(
        "--language-model-weight",
        metavar="0..4",
        help="Weight of the language model. Default: 0.1.",
        show_default=False,
    ),
]
Words = Annotated[
    bool,
    typer.Option(
        "--words",
        help="Add times and confidence of each word, in formats that hold them. Subtitles are then split at words.",
    ),
]
Speakers = Annotated[bool, typer.Option("--speakers", help="Label who speaks: SPEAKER_00, SPEAKER_01 and so on.")]
NumSpeakers = Annotated[int | None, typer.Option(help="Number of speakers, if known; implies --speakers.")]
MinSpeakers = Annotated[int | None, typer.Option(help="Least number of speakers; implies --speakers.")]
MaxSpeakers = Annotated[int | None, typer.Option(help="Largest number of speakers; implies --speakers.")]
Itn = Annotated[
    bool | None,
    typer.Option(
        "--itn/--no-itn",
        help="Inverse text normalization: write numbers, dates and money in figures, as $25.30 for twenty-five "
        "dollars and thirty cents. English, Chinese, Japanese; needs the extra itn. A speech LLM does it itself; "
        "--no-itn asks it for the spoken form.",
    ),
]
SilenceSchedulePoints = Annotated[
    str | None,
    typer.Option(
        metavar="MS:MS,...",
        help="Length of the pause that ends a segment, by the length of the segment: 5000:1500,20000:800,inf:300 "
        "means 1.5 s up to 5 s, 0.8 s up to 20 s, then 0.3 s.",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="API key for --server; safer in the variable ASR_SERVE_API_KEY.")
]
VoicesDir = Annotated[
    str | None,
    typer.Option("--voices-dir", metavar="DIR", help="Folder of cloned voices. Default: that of the engine settings."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
MOST_HOTWORD_BYTES = 4 << 20
"""Limit of a file of hotwords: more than the words that any request may have."""


def whole_number(text: str) -> int:
    """Number that an argument stands for. Raises BadParameter, which shows what came."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no whole number, like 4") from None


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
            raise OptionError(
                f"--hotwords {item} is not text", "a file in UTF-8 with a word or phrase per line is needed"
            ) from None
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
