"""`asr-serve speak`: text to speech, played or written while it is made."""

from __future__ import annotations

import codecs
import contextlib
import sys
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from asr_serve.api.cli import options as shared
from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.api.cli.options import ApiKey, Device, Dtype, Set, Weights
from asr_serve.config import client_key
from asr_serve.errors import OptionError, SourceNotFound

if TYPE_CHECKING:
    from asr_serve.api.cli.backends import LocalSynthesizer, RemoteSynthesizer
    from asr_serve.api.cli.io.speech_outputs import SpeechWriter
    from asr_serve.models.registry import TtsCard

STDIN_BYTES = 4_096
DEFAULT_MANNER = {
    "speed": 1.0,
    "pitch": 0.0,
    "energy": 0.0,
    "seed": 0,
    "ssml": False,
    "phonemes": False,
    "watermark": False,
}
"""Defaults, which need not be sent to a server."""


@exit_on_error
def speak(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT|-]", help="Text to speak; or - for stdin, which is spoken as it arrives."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|-",
            help="File to write: .wav .mp3 .opus .flac .aac .pcm; or - for stdout. Default: play the speech.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            metavar="FORMAT",
            help="Audio format: wav, mp3, opus, flac, aac or pcm. Default: by the suffix of --output, else wav.",
        ),
    ] = None,
    voice: Annotated[
        str | None, typer.Option(help="Name of the voice; see --list-voices.", show_default="the model's first")
    ] = None,
    speed: Annotated[float, typer.Option(help="Speaking rate, 0.25 to 4 times the voice's own.")] = 1.0,
    pitch: Annotated[float, typer.Option(help="Change of pitch, -12 to 12 semitones.")] = 0.0,
    energy: Annotated[float, typer.Option(help="Change of loudness, -12 to 12 dB.")] = 0.0,
    ssml: Annotated[
        bool, typer.Option("--ssml", help="The text is SSML: <speak>, with break, prosody, say-as, phoneme, sub, p, s.")
    ] = False,
    phonemes: Annotated[
        bool, typer.Option("--phonemes", help="The text is phonemes, in the alphabet of --list-voices.")
    ] = False,
    lexicon: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Pronunciations: a word and its phonemes per line, with comments after #; or a JSON object.",
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            "-l",
            help="Language of the text, en or en-gb, if the model supports it. Default: the voice's own.",
        ),
    ] = None,
    words: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the times of words: .json, or .srt or .vtt for captions."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed: the same seed and text give the same audio.")] = 0,
    rate_hz: Annotated[
        int | None,
        typer.Option("--rate", metavar="HZ", help="Sample rate of the audio.", show_default="the voice's own"),
    ] = None,
    watermark: Annotated[
        bool,
        typer.Option(
            "--watermark", help="Add an inaudible watermark, by which the audio can be detected as synthetic."
        ),
    ] = False,
    list_voices: Annotated[bool, typer.Option("--list-voices", help="List the voices and exit.")] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server that synthesizes the speech, instead of a model in this process: http://127.0.0.1:8000",
        ),
    ] = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Name of the model; see: asr-serve models list",
            show_default="the best voice on this machine, or the server's own",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = None,
    more: Set = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, no progress.")] = False,
) -> int:
    """Synthesize speech from text. It is played, or written to --output, while it is synthesized.

    With - the text is read from stdin as it arrives, and the first clause is
    played before the last one is there: the output of a language model can be
    piped into it.

    \b
    Exit code  0 all done, 1 something failed, 2 wrong usage, 130 ctrl-C

    \b
    Examples
      asr-serve speak "Hello there."
      asr-serve speak "It costs $5.20." -o price.mp3
      asr-serve speak - -o book.opus < book.txt
      asr-serve speak "Slowly, please." --voice emma --speed 0.8 --pitch -2
      asr-serve speak '<speak>One.<break time="1s"/>Two.</speak>' --ssml
      asr-serve speak "Hello there." -o hello.wav --words hello.srt
      asr-serve speak "[Nguyen](/nwˈɪn/) is here."
      asr-serve speak "Hello." --server http://127.0.0.1:8000
      asr-serve speak --list-voices
      llm "Tell me a story" | asr-serve speak -
    """
    from asr_serve.api.cli.io.speech_outputs import check_output, format_of
    from asr_serve.api.cli.io.speech_report import SpeechProgressMeter, WordTimesFile
    from asr_serve.api.cli.progress import ProgressBar
    from asr_serve.text.g2p.frontend import check_text

    manner = {
        "speed": speed,
        "pitch": pitch,
        "energy": energy,
        "seed": seed,
        "ssml": ssml,
        "phonemes": phonemes,
        "watermark": watermark,
        "voice": voice,
        "rate_hz": rate_hz,
    }
    text_options = {"lexicon": None if lexicon is None else read_lexicon(lexicon), "language": language}
    loading = {"device": device, "dtype": dtype, "weights": weights}
    speaker = choose_backend(server, api_key, model, manner, text_options, more, **loading)
    if list_voices:
        return show_voices(speaker, model)
    form = format_of(output, form)
    check_output(output)
    speech_text = choose_text(text, whole=ssml or phonemes or server is not None)
    if isinstance(speech_text, str):
        check_text(speech_text, ssml=ssml, phonemes=phonemes)
    if output is None:
        from asr_serve.api.cli.io.loudspeaker import check_player

        check_player()
    word_times = None if words is None else WordTimesFile(words)
    meter = SpeechProgressMeter()
    write: SpeechWriter | None = None
    with contextlib.ExitStack() as stack, ProgressBar(meter, shown=not quiet, stdout_shared=False) as bar:
        stack.enter_context(speaker)
        meter.start()
        for chunk in stack.enter_context(contextlib.closing(speaker.speak(speech_text))):
            bar.update(meter.note_audio(chunk), None)
            if write is None:
                write = stack.enter_context(open_output(output, form, chunk.rate_hz))
            write(chunk.pcm)
            if word_times is not None:
                word_times.add_chunk(chunk)
        summary = meter.describe_done()
        if word_times is not None:
            word_times.write(speaker.model)
    if not quiet:
        print_error(f"{summary}{f' -> {output}' if output not in (None, '-') else ''}")
    return 0


def choose_text(text: str | None, *, whole: bool) -> str | Iterator[str]:
    """Returns the text; or stdin's, in pieces unless `whole`. Raises OptionError."""
    if text is None:
        raise OptionError("no text came", "a text is needed, or - for stdin", "see: asr-serve speak --help")
    if text != "-":
        return text
    if sys.stdin is None or sys.stdin.isatty():
        raise OptionError("`-` reads stdin, which is a terminal", "a pipe or a file", "write the text in quotes")
    pieces = read_stdin()
    return "".join(pieces) if whole else pieces


def read_stdin() -> Iterator[str]:
    """Yields text as it arrives. Raises OptionError for what is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        read = cast(BufferedReader, sys.stdin.buffer).read1
        while data := read(STDIN_BYTES):
            if text := decoder.decode(data):
                yield text
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise OptionError(f"stdin is no text: {error}", "UTF-8", param="input") from None


def open_output(output: str | None, form: str, rate_hz: int) -> contextlib.AbstractContextManager[SpeechWriter]:
    """Opens the output of audio. Raises what opening it raises."""
    from asr_serve.api.cli.io import speech_outputs
    from asr_serve.audio.encode import AudioEncoder, encoded_file

    if output is None:
        from asr_serve.api.cli.io.loudspeaker import open_player

        return open_player(rate_hz)
    if output == "-":
        return speech_outputs.open_stdout(form, rate_hz, sys.stdout.buffer)
    return encoded_file(Path(output), AudioEncoder(form, rate_hz))


def choose_backend(
    server: str | None,
    api_key: str | None,
    model: str | None,
    manner: dict[str, Any],
    beside: dict[str, Any],
    more: list[str] | None,
    **loading: str | None,
) -> LocalSynthesizer | RemoteSynthesizer:
    """Returns a model in this process, or the server. Raises OptionError."""
    from asr_serve.api.cli.backends import LocalSynthesizer, RemoteSynthesizer
    from asr_serve.models.registry import AUTO_VOICE

    if server is None:
        if api_key is not None:
            raise OptionError("--api-key without --server", "it is for a server", "leave it out")
        engine = shared.engine(more)
        return LocalSynthesizer(voice_model(model or AUTO_VOICE).name, manner, beside, engine=engine, **loading)
    values = {**loading, "set": more or None, "language": beside["language"]}
    for name, value in values.items():
        if value not in ("auto", None):
            raise OptionError(f"--{name} with --server", "the server has the model", "leave it out")
    request = {name: value for name, value in manner.items() if value not in (None, DEFAULT_MANNER.get(name))}
    request |= {"model": model} if model is not None else {}
    request |= {"lexicon": beside["lexicon"]} if beside["lexicon"] else {}
    if "rate_hz" in request:
        request["sample_rate"] = request.pop("rate_hz")
    return RemoteSynthesizer(server, api_key or client_key(), request)


def voice_model(name: str) -> TtsCard:
    """Returns a speech model's card; `auto`: the first whose weights are here. Raises UnknownModel, OptionError."""
    from asr_serve.models.checkpoints.store import auto_voice
    from asr_serve.models.registry import AUTO_VOICE, asr_cards, tts_card, tts_cards

    if name == AUTO_VOICE:
        return auto_voice()
    if name in asr_cards():
        raise OptionError(
            f"--model {name}, which recognizes speech and does not synthesize it", f"one of: {', '.join(tts_cards())}"
        )
    return tts_card(name)


def show_voices(speaker: LocalSynthesizer | RemoteSynthesizer, model: str | None) -> int:
    """Prints a table of the voices of the server, or of the model here."""
    from asr_serve.api.cli.backends import RemoteSynthesizer
    from asr_serve.api.cli.models import print_table
    from asr_serve.config import voices_dir
    from asr_serve.models.registry import AUTO_VOICE
    from asr_serve.voices.voice_store import VoiceStore

    rows: list[tuple[str, ...]]
    if isinstance(speaker, RemoteSynthesizer):
        rows = [(voice["id"], voice["model"], "default" if voice.get("default") else "") for voice in speaker.voices()]
        print_table(("VOICE", "MODEL", ""), rows)
        return 0
    card = voice_model(model or AUTO_VOICE)
    cloned = [clone for clone in VoiceStore(voices_dir(None)).cards() if card.clones and clone.model == card.name]
    rows = [
        (name, card.name, card.language(name), card.alphabet, "" if at else "default")
        for at, name in enumerate(card.voices)
    ]
    rows += [(clone.name, card.name, card.language(clone.name), card.alphabet, "cloned") for clone in cloned]
    print_table(("VOICE", "MODEL", "LANGUAGE", "PHONEMES", ""), rows)
    return 0


def read_lexicon(path: Path) -> dict[str, str]:
    """Reads a lexicon: word -> phonemes. Raises SourceNotFound, OptionError with the line."""
    import msgspec

    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"--lexicon {path} is no text: {error}", "UTF-8") from None
    except OSError as error:
        raise SourceNotFound(f"--lexicon {path} cannot be read: {error.strerror}") from None
    if path.suffix.lower() == ".json":
        try:
            return msgspec.json.decode(content, type=dict[str, str])
        except msgspec.DecodeError as error:
            raise OptionError(f"--lexicon {path}: {error}", 'an object, like {"Nguyen": "nwˈɪn"}') from None
    lexicon: dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not (entry := line.split("#")[0].strip()):
            continue
        word, *phonemes = entry.split(maxsplit=1)
        if not phonemes:
            raise OptionError(f"{path}, line {number}: {word!r} without phonemes", "a word, a blank, its phonemes")
        lexicon[word] = phonemes[0].strip()
    return lexicon
