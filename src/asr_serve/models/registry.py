"""Model cards, and how model files are found.

A model file holds CARDS, one for each published size, and what models/model_files.py says of its task. There is no
list to edit: a file with CARDS in the folder of its task is a model, and so is a module that an installed package
names in the entry point group `asr_serve.models`. An entry point reaches the engine's process too, which a call in
the caller's process would not.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from asr_serve import units
from asr_serve.errors import ModelError, UnknownModel

if TYPE_CHECKING:
    from asr_serve.models.model_files import (
        AsrModelFile,
        GatheredModelFile,
        TtsModelFile,
        TurnModelFile,
        VocoderFile,
    )


class PackagedWeights(msgspec.Struct, frozen=True):
    """Weights that an installable package carries."""

    requirement: str
    """What to install, with its version."""
    module: str
    folder: str
    """Folder inside the module that holds the files."""
    sha256: dict[str, str]
    """File name -> sha256 of the files we read."""
    also: dict[str, str] = {}
    """Module -> folder, as above, of further packages that hold the rest of the files."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One published set of weights: what it is, where it comes from."""

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
    """What is taken from the hub's repository; patterns."""
    shipped: str = ""
    """Folder with the weights inside this package; empty where they come from elsewhere."""
    rate_hz: int = units.RATE_HZ

    @property
    def package(self) -> str | None:
        return self.packaged.requirement if self.packaged else None


class TimestampTokens(msgspec.Struct, frozen=True):
    """The tokens in which a model says when something was said."""

    first: int
    """The start of what it hears; each token after this one is `step_samples` later."""
    words_below: int
    """Tokens below this are text."""
    step_samples: int = units.ms_to_samples(20)


class AsrCard(ModelCard, frozen=True, kw_only=True, tag="hears", tag_field="does"):
    """A recogniser, and what it can take."""

    max_segment_ms: int
    """Longest utterance the model was made for; longer speech is cut."""
    min_segment_ms: int
    """Shorter ones are padded with silence."""
    tokens_per_s: float
    """More tokens than this per second of audio are a hallucination; decoding stops there."""
    heads: tuple[str, ...] = ()
    """Of a streaming model, how its output may be read: ctc, rnnt, tdt; the first unless told. Others hear an
    utterance as a whole."""
    chunk: int = 0
    """Of a streaming model, the encoder frames of a step."""
    frame_samples: int = 0
    """Of a streaming model, from one encoder frame to the next. An engine fills this and the next in again, of
    what it has loaded."""
    past_samples: int = 0
    """Of a streaming model, the audio after a chunk that it hears before it says what is in it. Less than nothing
    where a frame hears what was before it."""

    tasks: tuple[str, ...] = ("transcribe",)
    """What may be asked of it: `translate` is into English."""
    detects: bool = False
    """It tells which of its languages is spoken, where nobody says."""
    prompt_tokens: int = 0
    """So much text it reads before it hears: what was said before, words that may come. 0: none."""
    times: TimestampTokens | None = None
    """None: it does not say when. An engine fills this in, of what it has loaded."""

    def language(self, wanted: str | None = None) -> str:
        """What is spoken, as far as it is known before anything was heard: empty where the model is to tell."""
        return wanted or ("" if self.detects else self.languages[0])

    @property
    def prompts(self) -> bool:
        """It reads text beside the audio."""
        return self.prompt_tokens > 0

    @property
    def streaming(self) -> bool:
        return bool(self.heads)

    def lag_samples(self, chunk: int = 0) -> int:
        """How much later than the audio its words can be known, at most, in steps of so many frames (0: as the
        card says): the last of a word may be in the first frame of a chunk, and between two frames. 0 of a model
        that hears utterances as a whole."""
        return ((chunk or self.chunk) + 1) * self.frame_samples + self.past_samples if self.chunk else 0

    @property
    def incremental_encoder(self) -> bool:
        """Its encoder hears an utterance while that is spoken; its decoder hears all of it each time."""
        return self.chunk > 0 and not self.heads


class TurnCard(ModelCard, frozen=True, kw_only=True):
    """A model that tells whether a speaker has finished."""

    hears_ms: int
    """So much of the end of a turn; what was said before is not listened to."""


class TtsCard(ModelCard, frozen=True, kw_only=True, tag="speaks", tag_field="does"):
    """A model that speaks."""

    alphabet: Literal["misaki", "espeak"]
    """What its phonemes are written in."""
    voices: tuple[str, ...]
    """The first unless told. Those that were cloned are known to the engine alone."""
    british: tuple[str, ...] = ()
    """Those of its voices that read British English unless told; all others read American."""
    max_phonemes: int
    """Of a sentence."""
    chunk_frames: int = 0
    """Frames that it makes in a step; 0: it says a sentence as a whole."""
    clones: bool = False
    """It can be taught voices."""
    codec: str = ""
    """Of a model that makes frames: what makes sound of them, a name among the cards of models/codec."""

    def language(self, voice: str | None = None) -> str:
        """What that voice reads unless told, the first where none is: en, or en-gb."""
        return "en-gb" if (voice or self.voices[0]) in self.british else "en"


class VocoderCard(ModelCard, frozen=True, kw_only=True):
    """A model that makes sound of frames."""


P = TypeVar("P", bound=ModelCard)
AnyCard = AsrCard | TtsCard
"""Of a model that an engine runs."""
AUTO_VOICE = "auto"
AUTO_VOICES = ("fastpitch-en", "hibari")
"""What that stands for: the first of them whose weights are on this machine."""


_FOLDERS = {
    "asr": "asr",
    "tts": "tts",
    "codec": "tts.vocoders",
    "turn": "auxiliary",
    "segmentation": "auxiliary",
    "speaker": "auxiliary",
}
"""Where the model files of a task lie, under models/."""
ENTRY_POINTS = "asr_serve.models"
"""Entry point group in which an installed package names its model files, one module each."""


@cache
def model_modules(task: str = "asr") -> dict[str, ModuleType]:
    """Find the model files of a task: modules with CARDS of it, in its folder, in families below that, and among
    the entry points of installed packages.

    Returns: modules by the `kind` of their cards, which is the file name of one in the folder.
    Raises ModelError for two files of one kind. A file that does not import raises here.
    """
    found: dict[str, ModuleType] = {}
    folders = [importlib.import_module(f"asr_serve.models.{_FOLDERS[task]}")]
    while folders:
        folder = folders.pop()
        for info in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{folder.__name__}.{info.name}")
            if info.ispkg:
                folders.append(module)
            elif any(card.task == task for card in vars(module).get("CARDS", ())):
                found[info.name] = module
    for entry in entry_points(group=ENTRY_POINTS):
        module = entry.load()
        for kind in {card.kind for card in module.CARDS if card.task == task}:
            if kind in found:
                raise ModelError(
                    f"the entry point {entry.name} of {ENTRY_POINTS} has a model file of kind {kind!r}",
                    f"a kind that no other has, unlike {found[kind].__name__}",
                )
            found[kind] = module
    return found


def asr_model_file(kind: str) -> AsrModelFile:
    """The model file of a recogniser's card."""
    return model_modules("asr")[kind]


def tts_model_file(kind: str) -> TtsModelFile:
    """The model file of a voice model's card."""
    return model_modules("tts")[kind]


def vocoder_file(kind: str) -> VocoderFile:
    """The model file of a codec's card."""
    return model_modules("codec")[kind]


def turn_model_file(kind: str) -> TurnModelFile:
    """The model file of a turn model's card."""
    return model_modules("turn")[kind]


def gathered_model_file(card: ModelCard) -> GatheredModelFile:
    """The model file of a card without `packaged` and `shipped`, which collects its weights itself."""
    return model_modules(card.task)[card.kind]


def asr_cards() -> dict[str, AsrCard]:
    """Every recogniser's weights by name."""
    return {card.name: card for module in model_modules("asr").values() for card in module.CARDS}


def turn_cards() -> dict[str, TurnCard]:
    """Every turn model's weights by name."""
    return {card.name: card for module in model_modules("turn").values() for card in module.CARDS}


def tts_cards() -> dict[str, TtsCard]:
    """Every voice model's weights by name."""
    return {card.name: card for module in model_modules("tts").values() for card in module.CARDS}


def vocoder_cards() -> dict[str, VocoderCard]:
    """Every codec's weights by name."""
    return {card.name: card for module in model_modules("codec").values() for card in module.CARDS}


def diarization_cards() -> dict[str, ModelCard]:
    """Of the weights that tell who speaks, by name."""
    tasks = ("segmentation", "speaker")
    return {card.name: card for task in tasks for module in model_modules(task).values() for card in module.CARDS}


def engine_cards() -> dict[str, AnyCard]:
    """Of everything that an engine can run: recognisers, then voice models."""
    return {**asr_cards(), **tts_cards()}


def all_cards() -> dict[str, ModelCard]:
    """Of recognisers, then of voice models, of codecs, of turn models and of what tells speakers apart."""
    return {**engine_cards(), **vocoder_cards(), **turn_cards(), **diarization_cards()}


def asr_card(name: str) -> AsrCard:
    """The recogniser's card of that name. Raises UnknownModel with the nearest name."""
    return _find_card(name, asr_cards())


def tts_card(name: str) -> TtsCard:
    """The voice model's card of that name. Raises UnknownModel with the nearest name."""
    return _find_card(name, tts_cards())


def vocoder_card(name: str) -> VocoderCard:
    """The codec's card of that name. Raises UnknownModel with the nearest name."""
    return _find_card(name, vocoder_cards())


def engine_card(name: str) -> AnyCard:
    """Of what an engine can run. Raises UnknownModel with the nearest name."""
    return _find_card(name, engine_cards())


def any_card(name: str) -> ModelCard:
    """Of any model. Raises UnknownModel with the nearest name."""
    return _find_card(name, all_cards())


def _find_card(name: str, known: Mapping[str, P]) -> P:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise UnknownModel(
        f"there is no model {name!r}",
        f"models: {', '.join(known)}",
        f"did you mean {near[0]!r}?" if near else "list them with: asr-serve models list",
    )


def turn_card(name: str) -> TurnCard:
    """The turn model's card of that name. Raises UnknownModel."""
    known = turn_cards()
    if name in known:
        return known[name]
    raise UnknownModel(f"there is no turn model {name!r}", f"turn models: auto, none, {', '.join(known)}")
