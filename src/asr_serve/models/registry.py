"""Model cards, and the registry that finds model files.

A model file holds CARDS, one for each published size, and what models/model_files.py says of its task. There is no
list to edit: a file with CARDS in the folder of its task is a model, and so is a module that an installed package
names in the entry point group `asr_serve.models`. An entry point reaches the engine's process too, which a call in
the caller's process would not.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import pkgutil
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from asr_serve import units
from asr_serve.errors import ModelError, OptionError, UnknownModel, WrongModel
from asr_serve.types import Int8Calibration

if TYPE_CHECKING:
    from asr_serve.models.model_files import AsrModelFile, GatheredModelFile, TtsModelFile, TurnModelFile, VocoderFile


class PackagedWeights(msgspec.Struct, frozen=True):
    """Weights that an installable package carries."""

    requirement: str
    """Requirement for pip, with its version."""
    module: str
    folder: str
    """Folder inside the module that holds the files."""
    sha256: dict[str, str]
    """File name -> sha256 of the files that are read."""
    also: dict[str, str] = {}
    """Module -> folder, as above, of further packages that hold the rest of the files."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One published set of weights: its properties and its source."""

    name: str
    task: str
    kind: str
    """Name of the model file that reads it."""
    languages: tuple[str, ...]
    parameters: int
    licence: str
    source: str
    """Paper or reference implementation."""
    hub: str
    """Hugging Face repository; empty where there is none."""
    revision: str = "main"
    packaged: PackagedWeights | None = None
    files: tuple[str, ...] = ("config.json", "model.safetensors", "tokenizer.json")
    """Patterns of the files that are downloaded from the hub repository."""
    shipped: str = ""
    """Folder with the weights inside this package; empty where they come from elsewhere."""
    rate_hz: int = units.RATE_HZ

    @property
    def package(self) -> str | None:
        return self.packaged.requirement if self.packaged else None

    @property
    def weights_revision(self) -> str:
        """Name of exactly these weights, as evaluations record it: package and version, or repository and revision."""
        if self.packaged is not None:  # without pip's own options
            return " ".join(part for part in self.packaged.requirement.split() if not part.startswith("-"))
        return f"{self.hub}@{self.revision}" if self.hub else self.revision


PromptOption = Literal["hotwords", "itn"]


class TimestampTokens(msgspec.Struct, frozen=True):
    """Timestamp tokens of a model."""

    first: int
    """Token for the start of the audio; each token after it is `step_samples` later."""
    words_below: int
    """Tokens below this are text."""
    step_samples: int = units.ms_to_samples(20)


class AsrCard(ModelCard, frozen=True, kw_only=True, tag="hears", tag_field="does"):
    """Speech recognition model and its capabilities."""

    max_segment_ms: int
    """Longest utterance that the model was trained for; longer speech is cut."""
    min_segment_ms: int
    """Shortest input; shorter utterances are padded with silence."""
    tokens_per_s: float
    """Limit of tokens for a second of audio: more are a hallucination, and decoding stops there."""
    pads_segments: bool = True
    """Whether segments that voice activity detection cuts get digital silence on both sides. A model that normalizes
    features by what it heard before makes words of such silence."""
    heads: tuple[str, ...] = ()
    """Output heads of a streaming model (ctc, rnnt, tdt), the default first. Empty for models that read whole
    utterances."""
    chunk: int = 0
    """Encoder frames of a step of a streaming model."""
    frame_samples: int = 0
    """Samples from one encoder frame of a streaming model to the next. The engine fills in this and the next field
    from the model that it has loaded."""
    lookahead_samples: int = 0
    """Look-ahead of a streaming model: samples after a chunk that it needs before it emits the chunk's tokens.
    Negative where a frame covers earlier audio."""

    int8: Int8Calibration | None = None
    """Layers that are quantized by default where that is faster; None: none are."""
    tasks: tuple[str, ...] = ("transcribe",)
    """Supported tasks; `translate` is into English."""
    detects: bool = False
    """Detects which of its languages is spoken where none is requested."""
    prompt_tokens: int = 0
    """Most tokens of prompt (previous text, expected words) that it reads; 0: none."""
    prompt_options: tuple[PromptOption, ...] = ()
    """Options that stand in its prompt: `hotwords`, and `itn`, the written form of numbers and dates."""
    times: TimestampTokens | None = None
    """Timestamp tokens; None: it predicts no times. The engine fills this in from the model that it has loaded."""
    word_times: bool = True
    """Whether it has times of words. The engine fills this in for speech LLMs, from the model that it has loaded."""
    language_models: tuple[str, ...] = ()
    """Names of the language models that the engine has loaded for it. The engine fills this in."""

    def quantization(self, quantize: str) -> str:
        """Returns what evaluations of the model record with the setting `engine.quantize` on a machine where 8 bits are
        faster: none for `auto` where no layer may be quantized."""
        return "none" if quantize == "auto" and self.int8 is None else quantize

    def language(self, wanted: str | None = None) -> str:
        """Returns the language of the audio as far as it is known before decoding: empty where the model detects
        it."""
        return wanted or ("" if self.detects else self.languages[0])

    @property
    def prompts(self) -> bool:
        """Returns whether it reads a text prompt beside the audio."""
        return self.prompt_tokens > 0

    @property
    def streaming(self) -> bool:
        return bool(self.heads)

    def lag_samples(self, chunk: int = 0) -> int:
        """Returns the longest delay in samples between audio and its words, in steps of `chunk` frames (0: the
        card's). The end of a word may fall into the first frame of a chunk, and between two frames. 0 for models
        that read whole utterances."""
        return ((chunk or self.chunk) + 1) * self.frame_samples + self.lookahead_samples if self.chunk else 0

    @property
    def incremental_encoder(self) -> bool:
        """Returns whether the encoder runs while an utterance is spoken; the decoder then reads all of it each time."""
        return self.chunk > 0 and not self.heads


class TurnCard(ModelCard, frozen=True, kw_only=True):
    """End-of-turn model: predicts whether a speaker has finished."""

    hears_ms: int
    """Length of the context: the end of a turn that the model reads."""


class TtsCard(ModelCard, frozen=True, kw_only=True, tag="speaks", tag_field="does"):
    """Text-to-speech model."""

    alphabet: Literal["misaki", "espeak"]
    """Phoneme alphabet."""
    voices: tuple[str, ...]
    """Voices, the default first. Cloned voices are known to the engine alone."""
    british: tuple[str, ...] = ()
    """Voices whose default is British English; all others default to American English."""
    max_phonemes: int
    """Most phonemes in a sentence."""
    chunk_frames: int = 0
    """Frames of a step; 0: it synthesizes a sentence as a whole."""
    clones: bool = False
    """Whether voices can be cloned with it."""
    vocoder: str = ""
    """Vocoder of a model that makes frames: a name among the cards of models/tts/vocoders."""

    def language(self, voice: str | None = None) -> str:
        """Returns the default language of a voice, or of the first voice: en, or en-gb."""
        return "en-gb" if (voice or self.voices[0]) in self.british else "en"


class VocoderCard(ModelCard, frozen=True, kw_only=True):
    """Vocoder: turns frames into samples."""


P = TypeVar("P", bound=ModelCard)
AnyCard = AsrCard | TtsCard
"""Card of a model that an engine runs."""
AUTO_VOICE = "auto"
MULTILINGUAL = "multilingual"
"""Name that stands for the multilingual Whisper whose weights are on this machine."""
MAX_AUTO_PARAMETERS = 1_000_000_000
"""Size up to which the largest Whisper is MULTILINGUAL."""
AUTO_VOICES = ("fastpitch-en", "hibari")
"""Candidates for AUTO_VOICE: the first whose weights are on this machine is used."""


_FOLDERS = {
    "asr": "asr",
    "tts": "tts",
    "vocoder": "tts.vocoders",
    "turn": "auxiliary",
    "segmentation": "auxiliary",
    "speaker": "auxiliary",
}
"""Task -> folder of its model files under models/."""
log = logging.getLogger(__name__)

ENTRY_POINTS = "asr_serve.models"
"""Entry point group in which an installed package names its model files, one module each."""


@cache
def model_modules(task: str = "asr") -> dict[str, ModuleType]:
    """Finds the model files of a task: modules with CARDS of the task, in its folder, in the families in it, and
    among the entry points of installed packages.

    Returns: modules by the `kind` of their cards, which is the file name of one in the folder.
    Raises ModelError for an unknown task, for two files of one kind, and for two cards of one name. A file in the
    folder that cannot be imported raises here; an entry point's is left out, and so is one whose card has a name that
    is taken: a package that somebody installs neither replaces a model nor stops all others.
    """
    if task not in _FOLDERS:
        raise ModelError(f"there is no task {task!r}", f"tasks: {', '.join(_FOLDERS)}")
    modules: dict[str, ModuleType] = {}
    owners: dict[str, ModuleType] = {}
    """Card name -> its module."""
    folders = [importlib.import_module(f"asr_serve.models.{_FOLDERS[task]}")]
    while folders:
        folder = folders.pop()
        for info in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{folder.__name__}.{info.name}")
            if info.ispkg:
                folders.append(module)
            elif any(card.task == task for card in vars(module).get("CARDS", ())):
                if info.name in modules:
                    raise ModelError(
                        f"{module.__name__} and {modules[info.name].__name__} are model files of one name",
                        "a name that no other file of the task has",
                    )
                modules[info.name] = module
                for card in module.CARDS:
                    if owners.setdefault(card.name, module) is not module:
                        raise ModelError(
                            f"{module.__name__} has a card named {card.name!r}",
                            f"a name that no other has, unlike {owners[card.name].__name__}",
                        )
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            module = entry.load()
        except Exception:
            package = entry.dist.name if entry.dist else "a package"
            log.exception("the entry point %s of %s cannot be loaded: its models are left out", entry.name, package)
            continue
        cards = [card for card in vars(module).get("CARDS", ()) if card.task == task]
        if taken := [card.name for card in cards if owners.setdefault(card.name, module) is not module]:
            log.warning(
                "the entry point %s (%s) has a card named %s, as %s has: its models are left out",
                entry.name,
                module.__name__,
                taken[0],
                owners[taken[0]].__name__,
            )
            continue
        for kind in {card.kind for card in cards}:
            if kind in modules:
                raise ModelError(
                    f"the entry point {entry.name} of {ENTRY_POINTS} has a model file of kind {kind!r}",
                    f"a kind that no other has, unlike {modules[kind].__name__}",
                )
            modules[kind] = module
    return modules


def names_folder(model: str) -> bool:
    """Returns whether a model's name is the path of a folder. Names of cards have no slash; a path without one is that
    of a folder where it is there, and no card has the name.

    >>> names_folder("./models/fun-asr"), names_folder("moonshine-tiny-en")
    (True, False)
    """
    return "/" in model or model.startswith("~") or (model not in engine_cards() and Path(model).is_dir())


REPOSITORY_PREFIX = "hf:"
"""Prefix of the name of a hub repository in place of a model's."""
NEAR_REPOSITORY = 0.75
"""Similarity, 0 to 1, from which a repository is suggested: owner and name of those of other models have much in common
too."""
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def hub_repository(model: str) -> str | None:
    """Name of the hub repository that a model's name stands for: `hf:ORG/NAME`, or `ORG/NAME` where there is no such
    folder. None: it stands for none. Raises OptionError for what follows `hf:` and is no such name.

    >>> hub_repository("hf:Qwen/Qwen3-ASR-0.6B-hf"), hub_repository("./Qwen/asr"), hub_repository("whisper-tiny")
    ('Qwen/Qwen3-ASR-0.6B-hf', None, None)
    """
    name = model.removeprefix(REPOSITORY_PREFIX)
    named = _REPOSITORY.fullmatch(name) is not None
    if name != model and not named:
        raise OptionError(f"model={model[:100]}", f"{REPOSITORY_PREFIX}ORG/NAME", "name a repository", param="model")
    return name if named and (name != model or not Path(model).exists()) else None


def suggest_repository(repository: str) -> str:
    """Suggestion like `did you mean 'ORG/NAME'?`, for a name that is close to a card's hub repository, or has the name
    of one under another owner; empty where there is none, and for a card's own."""
    known = {card.hub.casefold(): card.hub for card in engine_cards().values() if card.hub}
    wanted = repository.casefold()
    if wanted in known:
        return ""
    near = [name for name in known if name.rpartition("/")[2] == wanted.rpartition("/")[2]]
    near = near or difflib.get_close_matches(wanted, known, n=1, cutoff=NEAR_REPOSITORY)
    return f"did you mean {known[near[0]]!r}?" if near else ""


def asr_model_file(kind: str) -> AsrModelFile:
    """The model file of a recogniser's card."""
    return model_modules("asr")[kind]


def tts_model_file(kind: str) -> TtsModelFile:
    """The model file of a voice model's card."""
    return model_modules("tts")[kind]


def vocoder_file(kind: str) -> VocoderFile:
    """The model file of a vocoder's card."""
    return model_modules("vocoder")[kind]


def turn_model_file(kind: str) -> TurnModelFile:
    """The model file of a turn model's card."""
    return model_modules("turn")[kind]


def gathered_model_file(card: ModelCard) -> GatheredModelFile:
    """The model file of a card without `packaged` and `shipped`, which collects its weights itself."""
    return model_modules(card.task)[card.kind]


def asr_cards() -> dict[str, AsrCard]:
    """Cards of all recognizers by name."""
    return {card.name: card for module in model_modules("asr").values() for card in module.CARDS}


def turn_cards() -> dict[str, TurnCard]:
    """Cards of all end-of-turn models by name."""
    return {card.name: card for module in model_modules("turn").values() for card in module.CARDS}


def tts_cards() -> dict[str, TtsCard]:
    """Cards of all text-to-speech models by name."""
    return {card.name: card for module in model_modules("tts").values() for card in module.CARDS}


def vocoder_cards() -> dict[str, VocoderCard]:
    """Cards of all vocoders by name."""
    return {card.name: card for module in model_modules("vocoder").values() for card in module.CARDS}


def diarization_cards() -> dict[str, ModelCard]:
    """Cards of all models for diarization (segmentation and speaker embedding) by name."""
    tasks = ("segmentation", "speaker")
    return {card.name: card for task in tasks for module in model_modules(task).values() for card in module.CARDS}


def engine_cards() -> dict[str, AnyCard]:
    """Cards of all models that an engine can run: recognizers, then text-to-speech models."""
    return {**asr_cards(), **tts_cards()}


def all_cards() -> dict[str, ModelCard]:
    """Cards of all models: recognizers, text-to-speech, vocoders, end of turn, diarization."""
    return {**engine_cards(), **vocoder_cards(), **turn_cards(), **diarization_cards()}


def asr_card(name: str) -> AsrCard:
    """Returns a recognizer's card. Raises UnknownModel with the nearest name."""
    return _find_card(name, asr_cards())


def tts_card(name: str) -> TtsCard:
    """Returns a text-to-speech model's card. Raises UnknownModel with the nearest name."""
    return _find_card(name, tts_cards())


def vocoder_card(name: str) -> VocoderCard:
    """Returns a vocoder's card. Raises UnknownModel with the nearest name."""
    return _find_card(name, vocoder_cards())


def engine_card(name: str) -> AnyCard:
    """Returns the card of a model that an engine can run. Raises UnknownModel with the nearest name."""
    return _find_card(name, engine_cards(), "; or a folder, or ORG/NAME of a hub repository")


def any_card(name: str) -> ModelCard:
    """Returns the card of any model. Raises UnknownModel with the nearest name."""
    return _find_card(name, all_cards())


def wrong_model(name: str, kind: type[ModelCard], names: Iterable[str] = ()) -> WrongModel:
    """The error for a model of the other kind. `kind`: class of the cards of models that would do. `names`: such
    models, for the message."""
    does, needed = (
        ("synthesizes speech, and does not recognize it", "a recognition model")
        if kind is AsrCard
        else ("recognizes speech, and does not synthesize it", "a speech synthesis model")
    )
    listed = ", ".join(names)
    return WrongModel(f"the model {name} {does}", f"{needed}: {listed}" if listed else f"{needed} is needed")


def _find_card(name: str, known: Mapping[str, P], other_places: str = "") -> P:
    """`other_places`: what the name may stand for too, for the message."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise UnknownModel(
        f"there is no model {name!r}",
        f"models: {', '.join(known)}{other_places}",
        f"did you mean {near[0]!r}?" if near else "list them with: asr-serve models list",
    )


def turn_card(name: str) -> TurnCard:
    """Returns an end-of-turn model's card. Raises UnknownModel."""
    known = turn_cards()
    if name in known:
        return known[name]
    raise UnknownModel(f"there is no turn model {name!r}", f"turn models: auto, none, {', '.join(known)}")
