"""Builds an engine: from a model's name to its checkpoint, components, executor and loop."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from asr_serve import devices, units
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention_rescoring import AttentionRescoringSearch
from asr_serve.decoding.biasing_list import BiasingSearch, StreamingBiasingList
from asr_serve.decoding.ctc import CtcBeamOptions, CtcGreedy, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import BatchedCtcPrefixBeam
from asr_serve.decoding.language_model.token_models import TokenLanguageModel, load_token_models
from asr_serve.decoding.rnnt import TransducerGreedy
from asr_serve.decoding.rnnt_beam import TransducerBeam
from asr_serve.decoding.wfst.batched_search import BatchedWfstSearch
from asr_serve.decoding.wfst.search import WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.devices.interface import Device
from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.engine.cache import TieredStore
from asr_serve.engine.executor import EngineComponents as EngineComponents
from asr_serve.engine.executor import ModelExecutor
from asr_serve.engine.loop import Loop
from asr_serve.engine.partial_rate import UNMEASURED_NEW_CALLERS, callers_for_speed
from asr_serve.engine.remote import roles
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.remote.peer_pool import PeerPool
from asr_serve.engine.seq2seq.decode_batch import pages_for
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.engine.seq2seq.encoder_cache import EncoderCache
from asr_serve.engine.seq2seq.executor import Seq2SeqExecutor
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.streaming.executor import StreamingExecutor
from asr_serve.engine.streaming.incremental_encoder import EncoderFrameStore, IncrementalEncoderExecutor
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.engine.streaming.search_router import BiasingSearchRouter
from asr_serve.engine.tensor_parallel.commands import RankSpec
from asr_serve.engine.tensor_parallel.rank_processes import RankProcesses, not_split
from asr_serve.engine.tts.builder import VoiceCheckpoint, build_tts_executor
from asr_serve.engine.vad_runner import VadCache, VadRunner
from asr_serve.engine.vllm.builder import build_vllm_executor, require_language_model
from asr_serve.errors import ModelError, OptionError, WeightsCorrupt, WeightsMissing
from asr_serve.models.auxiliary import silero
from asr_serve.models.checkpoints import store as model_weights
from asr_serve.models.checkpoints.config_file import read_config
from asr_serve.models.checkpoints.quantized_weights import refuse_quantized_tensors
from asr_serve.models.decoding_graph import GRAPH_FILE, DecodingGraph, GraphInfo, checksum_tokens
from asr_serve.models.interfaces import (
    EncoderDecoderModel,
    IncrementalEncoderDecoderModel,
    SpeechLanguageModel,
    StreamingEncoder,
    StreamingModel,
    StreamingSearch,
    TtsModel,
)
from asr_serve.models.model_files import AsrModel, AsrModelConfig, AsrModelFile, SpeechModel
from asr_serve.models.registry import (
    AUTO_VOICE,
    MULTILINGUAL,
    AnyCard,
    AsrCard,
    TimestampTokens,
    TtsCard,
    asr_card,
    asr_model_file,
    engine_card,
    hub_repository,
    names_folder,
)
from asr_serve.text import tokenizers
from asr_serve.text.languages import MULTILINGUAL_COMMAND
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.transfer.checksum import checksum, file_checksum
from asr_serve.types import LanguageModelBackend, Quantize

LONGEST_CHUNK_MS = 4_000
"""Maximum length of a chunk. The time until a word appears, and the time that a step takes, grow with it."""
SMALL_CACHE_DIVISOR = 8
"""Divisor of `prefix_bytes`: one such part is for cached answers and one for cached voice activity; the rest is
for pages, which are large."""
CHUNK_WAIT_DIVISOR = 8
"""A session whose chunk is complete waits for others up to an eighth of the chunk's duration."""

HOT_CTC_BEAM, HOT_RNNT_BEAM, HOT_TOKENS = 16, 4, 16
"""Search settings of sessions with hotwords: the least beam widths of CTC and RN-T, and the most likely tokens
considered for each transducer hypothesis."""
CTC_BOOST, RNNT_BOOST = 1.5, 1.0
"""Natural-log probability added to a token of a hotword of weight 1.

CTC: chosen for armspeech on espeak's Armenian voice. Of twelve names 1 is recognized without a boost, 6 with 1.5,
5 beside a thousand other hotwords, and errors in other words do not change; 2.0 recognizes more of them, and
inserts them where they were not spoken. RN-T: lower, because there are no weights here to choose it on.
"""

log = logging.getLogger(__name__)


class AsrCheckpoint(NamedTuple):
    """A model's files, located and parsed; no tensor is loaded yet."""

    card: AsrCard
    folder: Path
    file: AsrModelFile
    config: AsrModelConfig
    tokenizer: Tokenizer
    """Vocabulary of the tokens that the search returns."""
    graph_folder: Path | None = None
    """Folder of the decoding graph that is searched; None: none is."""
    language_models: Mapping[str, str] = {}  # of a tuple, never changed
    """Files of language models by name."""
    backend: LanguageModelBackend = "native"
    """See EngineConfig."""

    @classmethod
    def find(cls, model: str, weights: str | os.PathLike[str] | None) -> AsrCheckpoint:
        """Finds a model's folder, configuration and tokenizer. Raises UnknownModel, WeightsMissing,
        WeightsCorrupt."""
        card = asr_card(model)
        folder = model_weights.resolve(card, weights)
        file = asr_model_file(card.kind)
        config = read_config(folder, card.kind, file.Config.of)
        graph_folder = folder if "wfst" in card.heads else None
        tokenizer = tokenizers.load_tokenizer(folder)
        return cls(card, folder, file, config.with_folder(folder, tokenizer), tokenizer, graph_folder)

    def with_graph(self, folder: str | None) -> AsrCheckpoint:
        """Returns a copy of a CTC model that searches the decoding graph in a folder, and returns its words; itself for
        None. Raises OptionError for a model without the head ctc and for a graph of other tokens, WeightsMissing,
        WeightsCorrupt."""
        if folder is None:
            return self
        blank = self.config.ctc_blank_id
        if not self.card.streaming or blank is None:
            raise OptionError(
                f"decoding_graph={folder}",
                f"{self.card.name} has no head ctc; streaming models with it have one: see asr-serve models list",
                "leave it out, or take such a model",
                param="decoding_graph",
            )
        path = Path(folder).expanduser()
        if not (path / GRAPH_FILE).is_file():
            raise WeightsMissing(f"no {GRAPH_FILE} in {path}", "a folder that `asr-serve graph build` wrote")
        info, names = GraphInfo.load(path), self.tokenizer.token_names()
        if info.tokens_checksum != checksum_tokens(names, blank):
            raise OptionError(
                f"decoding_graph={folder}, a graph of the {info.tokens} tokens of {info.model}",
                f"one of the {len(names)} tokens of {self.card.name}",
                f"asr-serve graph build --tokens {self.card.name} makes one",
                param="decoding_graph",
            )
        return self._replace(tokenizer=tokenizers.load_tokenizer(path), graph_folder=path)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of `tokenizer`: that of the decoding graph, whose words are the tokens that the search returns."""
        return self.folder if self.graph_folder is None else self.graph_folder

    def with_lookahead(self, frames: int | None) -> AsrCheckpoint:
        """Returns a copy with another look-ahead, in encoder frames, out of those that a streaming model was
        trained for; itself for None or a model that is not streaming. Raises OptionError."""
        if frames is None or not self.card.streaming:
            return self
        return self._replace(config=self.config.with_right_context(frames))

    def with_language_models(self, config: EngineConfig) -> AsrCheckpoint:
        """Returns a copy with the configured language models; itself where nothing asks them: an engine that encodes
        for others."""
        if config.role == "encode":
            return self
        return self._replace(language_models=config.language_model_files)

    def with_backend(self, config: EngineConfig) -> AsrCheckpoint:
        """Returns a copy whose language model the configured back end computes. Raises OptionError for a model that has
        none."""
        if config.backend != "native":
            model = self.file.Model
            require_language_model(self.card, isinstance(model, type) and issubclass(model, SpeechLanguageModel))
        return self._replace(backend=config.backend)

    def load_model(self, target: Device) -> AsrModel:
        """Loads and packs the weights. Raises WeightsMissing, WeightsCorrupt; OptionError where the device's group does
        not divide the decoder."""
        tensors: dict[str, Tensor] = {}
        for name in self.config.weight_files:
            tensors |= _read_tensors(self.folder / name)
        return self.file.Model(self.config, tensors, target)

    def build(
        self, device: str, dtype: str, quantize: Quantize = "none", tensor_parallel_size: int = 1
    ) -> EngineComponents:
        """Loads and packs the weights; call it on the thread that will compute (decision 0005).
        `tensor_parallel_size`: processes over which the decoder is split, this one included.

        A streaming model computes in fp32 unless another dtype is requested: in bf16 its text can depend on the
        other sessions in the batch, by a letter where two tokens are equally likely. Raises WeightsCorrupt,
        WeightsMissing; OptionError for a decoder that cannot be split so; EngineClosed, RankLost where the other
        processes do not start.
        """
        dtype = "fp32" if dtype == "auto" and self.card.streaming else dtype
        if tensor_parallel_size > 1:
            return self._build_split(device, dtype, quantize, tensor_parallel_size)
        target = devices.make_device(device, dtype, quantize, calibration=self.card.int8)
        target.language_models = self.backend == "native"
        return self._components(self.load_model(target), target)

    def _build_split(self, device: str, dtype: str, quantize: Quantize, size: int) -> EngineComponents:
        """Builds rank 0 of an engine whose decoder is split over processes, while the others load their parts."""
        target = devices.make_device(device, dtype, quantize, TensorParallelGroup(0, size))
        spec = RankSpec(
            model=self.card.name, weights=str(self.folder), device=device, dtype=dtype, quantize=quantize, size=size
        )
        with contextlib.ExitStack() as on_failure:
            ranks = RankProcesses.start(spec)
            on_failure.callback(ranks.close)
            model = self.load_model(target)
            if not (isinstance(model, EncoderDecoderModel) and model.tensor_parallel):
                raise not_split(self.card.name, size)
            ranks.connect(target)
            parts = self._components(model, target)._replace(ranks=ranks)
            on_failure.pop_all()
        return parts

    def _components(self, model: AsrModel, target: Device) -> EngineComponents:
        tokenizer = self.tokenizer
        graph = None if self.graph_folder is None else DecodingGraph.load(self.graph_folder / GRAPH_FILE)
        language_models: dict[str, TokenLanguageModel] = {}
        if graph is not None and self.language_models and target.torch_device.type != "cpu":
            log.warning(
                "the language models %s are left out: the search of a decoding graph on %s keeps no lattice to "
                "rescore; device=cpu has one",
                ", ".join(self.language_models),
                target.torch_device,
            )
        elif self.language_models:
            names, of_words = tokenizer.token_names(), graph is not None
            language_models = load_token_models(self.language_models, names, target.torch_device, of_words=of_words)
        return EngineComponents(
            model,
            silero.load(),
            target,
            tokenizer.decode,
            encode_text=tokenizer.encode,
            language_models=language_models,
            graph=graph,
        )

    def fingerprint(self) -> int:
        """Checksum of the files that another engine of the same model must share to take over sessions. Detects
        replaced files, not forged ones."""
        names = ("config.json", *self.config.weight_files, *self.config.other_files, *tokenizers.TOKENIZER_FILES)
        files = [(name, self.folder / name) for name in names if (self.folder / name).is_file()]
        if self.graph_folder is not None:
            words = [path for name in tokenizers.TOKENIZER_FILES if (path := self.graph_folder / name).is_file()]
            files += ((f"graph/{path.name}", path) for path in (self.graph_folder / GRAPH_FILE, *words))
        return checksum(repr([(name, file_checksum(path)) for name, path in files]).encode())

    def peer_identity(
        self, config: EngineConfig, listen: tuple[str, int], keys: tuple[str, ...]
    ) -> HandshakeSettings | None:
        """Settings for handshakes with other engines; None where this engine uses no peers."""
        return (
            HandshakeSettings(roles.checkpoint_digest(self.folder), listen, keys) if roles.uses_peers(config) else None
        )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise WeightsMissing(f"{path} is not there", "config.json names it", "convert or fetch the checkpoint again")
    try:
        tensors = load_file(path)
    except SafetensorError as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}") from failure
    refuse_quantized_tensors(path, tensors)
    return tensors


def find_checkpoint(
    model: str, weights: str | os.PathLike[str] | None, config: EngineConfig
) -> AsrCheckpoint | VoiceCheckpoint:
    """Finds the checkpoint of any model that an engine can run; `auto` is a voice
    (models/checkpoints/store.auto_voice), `multilingual` a Whisper, and a path is a folder, or the name of a hub
    repository, whose model is recognized. Raises UnknownModel, WeightsMissing, WeightsCorrupt, OptionError."""
    if weights is not None and (hub_repository(model) is not None or names_folder(model)):
        raise OptionError(f"model={model} and weights={weights}", "a folder as one of them", param="weights")
    if model == MULTILINGUAL:
        whisper = model_weights.multilingual_model()
        if whisper is None:
            raise WeightsMissing("no multilingual Whisper is on this machine", todo=MULTILINGUAL_COMMAND)
        model = whisper.name
    model, folder = model_weights.find_model(model)
    weights = weights if folder is None else folder
    card = model_weights.auto_voice() if model == AUTO_VOICE else engine_card(model)
    if isinstance(card, TtsCard):
        if config.backend != "native":
            require_language_model(card, False)
        return VoiceCheckpoint.find(card, weights, config.codec)
    found = AsrCheckpoint.find(model, weights).with_lookahead(config.lookahead_frames)
    return found.with_graph(config.decoding_graph).with_language_models(config).with_backend(config)


def build_loop(
    parts: EngineComponents,
    chosen: AnyCard,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_stop: Callable[[], None],
    *,
    on_start: Callable[[list[int]], None] = lambda _: None,
    stats: EngineStats | None = None,
    keep_states: bool = False,
    meeting: HandshakeSettings | None = None,
) -> Loop:
    """Builds the loop over these components. `keep_states`: return each caller's state with its voice-activity
    probabilities. `meeting`: settings for handshakes with other engines. Raises OptionError, DiskFailed."""
    model, vad, device, *_ = parts
    stats = stats or EngineStats()
    validate_card(chosen, model)
    if isinstance(model, TtsModel):
        assert isinstance(chosen, TtsCard)
        tts_executor = build_tts_executor(model, parts.vocoder, device, chosen, config, on_done, on_start)
        return Loop(tts_executor, None, config.vad_step_windows, on_stop, stats=stats)
    assert isinstance(chosen, AsrCard)
    assert vad is not None
    peers: PeerPool | None = None
    if roles.uses_peers(config):
        roles.validate_roles(chosen, config)
        if meeting is None:
            raise OptionError(f"role={config.role} and {len(config.peers)} peers", "asr-serve serve has them")
        assert isinstance(model, EncoderDecoderModel), "roles are for these alone"
        if isinstance(model, SpeechLanguageModel):
            raise OptionError(
                f"role={config.role} and {len(config.peers)} peers: {chosen.name} reads audio in its prompt",
                "models with cross-attention",
                "serve this one with role=both and without peers",
                param="role",
            )
        peers = roles.build_peer_pool(model, device, chosen, config, meeting, stats.metrics)
    with contextlib.ExitStack() as on_failure:
        if parts.ranks is not None:
            on_failure.callback(parts.ranks.close)
        tiers = (
            None
            if config.role == "encode"
            else TieredStore.from_config(config, metrics=stats.metrics, pin=device.pin_memory)
        )
        if tiers is not None:
            on_failure.callback(tiers.close)
        if isinstance(model, StreamingModel):
            runner = build_chunked(model, chosen, parts, config)
            biased = isinstance(runner.search, BiasingSearch)
            executor: ModelExecutor = StreamingExecutor(
                runner,
                config.shares,
                on_done,
                on_start,
                **offload_options(config, tiers),
                compile_hotwords=stream_biasing(parts, model.vocab_size) if biased else None,
                language_models=parts.language_models,
            )
        elif config.role == "encode" and meeting is not None:
            executor = roles.build_encode_worker(model, device, chosen, config, meeting)
        elif config.backend == "vllm":
            executor = vllm_executor = build_vllm_executor(model, parts, chosen, config, on_done, on_start)
            on_failure.callback(vllm_executor.close)
        elif isinstance(model, IncrementalEncoderDecoderModel) and chosen.incremental_encoder:
            executor = build_incremental(model, parts, chosen, config, on_done, on_start, tiers)
        else:
            executor = build_seq2seq(model, parts, chosen, config, on_done, on_start, peers, tiers)
        loop = Loop(
            executor,
            VadRunner(vad, config.max_sessions),
            config.vad_step_windows,
            on_stop,
            stats=stats,
            keep_states=keep_states,
            vad_cache=VadCache(config.prefix_bytes // SMALL_CACHE_DIVISOR) if config.prefix_bytes else None,
            offload=tiers,
        )
        on_failure.pop_all()
    return loop


def measure_new_live_callers(parts: EngineComponents, chosen: AnyCard, config: EngineConfig) -> int:
    """Returns how many live callers may be new at the same time: as configured, or as the encoder's speed allows where
    each hypothesis encodes its audio anew on this machine. A SpeechLanguageModel, which spends its time in the decoder,
    is not measured. Call it on the thread that will compute, before other memory is taken."""
    if config.new_live_callers is not None:
        return config.new_live_callers
    model = parts.model
    encodes_anew = isinstance(chosen, AsrCard) and not chosen.streaming and not chosen.incremental_encoder
    measurable = isinstance(model, EncoderDecoderModel) and not isinstance(model, SpeechLanguageModel)
    if not encodes_anew or not measurable or roles.uses_peers(config):
        return UNMEASURED_NEW_CALLERS
    assert isinstance(model, EncoderDecoderModel)
    speed = EncodeRunner(model, parts.device).measure_speed()
    callers = callers_for_speed(speed)
    log.info("%.0f s of audio are encoded in a second: %d live callers may be new at once", speed, callers)
    return callers


def offload_options(config: EngineConfig, tiers: TieredStore | None) -> dict[str, Any]:
    """Options of StreamingExecutor: where and when callers' streams are offloaded."""
    return {"tiers": tiers, "offload_after_s": config.offload_after_s, "replay": config.disk_bytes > 0}


def stream_biasing(parts: EngineComponents, vocab: int) -> Callable[[str], StreamingBiasingList] | None:
    """Returns the function that compiles hotwords for a streaming search; None for a vocabulary that cannot
    encode text."""
    text, encode = parts.decode_text, parts.encode_text
    return None if encode is None else lambda bias: StreamingBiasingList(bias, encode, text, vocab)


def validate_card(chosen: AnyCard, model: AsrModel | SpeechModel) -> None:
    """Raises ModelError where the model is none of what its card declares."""
    declared = (
        TtsModel
        if isinstance(chosen, TtsCard)
        else StreamingModel
        if chosen.streaming
        else IncrementalEncoderDecoderModel
        if chosen.incremental_encoder
        else EncoderDecoderModel
    )
    if not isinstance(model, declared):
        raise ModelError(
            f"{type(model).__module__}.{type(model).__name__} is no {declared.__name__}",
            f"the card of {chosen.name} declares one",
        )


def card_of_loaded(chosen: AnyCard, parts: EngineComponents) -> AnyCard:
    """Card of the loaded model: a user's checkpoint may have other frames, heads, voices or another rate than the
    published one, and language models may be loaded beside it."""
    model = parts.model
    validate_card(chosen, model)
    if isinstance(model, TtsModel):
        assert isinstance(chosen, TtsCard)
        return msgspec.structs.replace(chosen, voices=model.voices, rate_hz=model.rate_hz)
    assert isinstance(chosen, AsrCard)
    chosen = msgspec.structs.replace(chosen, language_models=tuple(parts.language_models))
    if isinstance(model, IncrementalEncoderDecoderModel) and chosen.incremental_encoder:
        frame_samples = model.encoder.frame_samples
        longest_ms = int(units.samples_to_ms(model.longest_frames * frame_samples))
        return msgspec.structs.replace(
            chosen,
            frame_samples=frame_samples,
            lookahead_samples=_lookahead_samples(model.encoder),
            max_segment_ms=min(chosen.max_segment_ms, longest_ms),
        )
    if isinstance(model, EncoderDecoderModel):
        special = model.special_tokens
        times = TimestampTokens(special.timestamp_begin, special.eot) if special else None
        if isinstance(model, SpeechLanguageModel):
            chosen = msgspec.structs.replace(chosen, word_times=model.ctc_head is not None)
        return msgspec.structs.replace(chosen, times=times)
    return msgspec.structs.replace(
        chosen,
        chunk=_whole_blocks(chosen.chunk, model),
        frame_samples=model.frame_samples,
        heads=model.heads if parts.graph is None else ("wfst",),
        lookahead_samples=_lookahead_samples(model),
    )


def _lookahead_samples(encoder: StreamingEncoder) -> int:
    window = encoder.audio_window(encoder.frame_block)
    return window.samples - window.left_samples - encoder.frame_block * encoder.frame_samples


def _whole_blocks(chunk: int, encoder: StreamingEncoder) -> int:
    return -(-chunk // encoder.frame_block) * encoder.frame_block


def build_incremental(
    model: IncrementalEncoderDecoderModel,
    parts: EngineComponents,
    chosen: AsrCard,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_start: Callable[[list[int]], None],
    tiers: TieredStore | None = None,
) -> IncrementalEncoderExecutor:
    """Builds the executor for whole utterances and for utterances that are encoded while they are spoken, over one
    page pool."""
    seq2seq = build_seq2seq(model, parts, chosen, config, on_done, on_start, None, tiers)
    max_frames = min(model.longest_frames, model.count_frames(units.ms_to_samples(chosen.max_segment_ms)))
    frame_store = EncoderFrameStore(model, seq2seq.decode_runner, config.max_sessions, max_frames)
    wrapper = _wrapper(model.encoder, frame_store, chosen, parts.device, config)
    return IncrementalEncoderExecutor(
        wrapper, frame_store, seq2seq, config.shares, on_done, on_start, **offload_options(config, tiers)
    )


def build_seq2seq(
    model: EncoderDecoderModel,
    parts: EngineComponents,
    chosen: AsrCard,
    config: EngineConfig,
    on_done: Callable[[int], None],
    on_start: Callable[[list[int]], None],
    peers: PeerPool | None = None,
    tiers: TieredStore | None = None,
) -> Seq2SeqExecutor:
    device, text = parts.device, parts.decode_text
    max_frames = model.count_frames(units.ms_to_samples(chosen.max_segment_ms))
    if isinstance(model, SpeechLanguageModel):
        max_frames = 0  # its frames are positions of the prompt: they have no pages of their own
    runner = DecodeRunner(model, device, config.max_decode_rows, config.kv_bytes, max_frames, parts.ranks)
    encoder_cache: EncoderCache | None = None
    if config.prefix_bytes:
        answer_bytes = config.prefix_bytes // SMALL_CACHE_DIVISOR
        encoder_cache = EncoderCache(runner, answer_bytes, config.prefix_bytes - 2 * answer_bytes, tiers)
        if encoder_cache.prefix_cache.max_pages < pages_for(max_frames):
            needed_bytes = -(
                -pages_for(max_frames) * runner.decoder.page_bytes * SMALL_CACHE_DIVISOR // (SMALL_CACHE_DIVISOR - 2)
            )
            log.warning(
                "prefix_bytes=%d keeps no recording of %d ms, the longest that %s hears at once: its audio is "
                "encoded again whenever it comes again; give it %d bytes for one",
                config.prefix_bytes,
                chosen.max_segment_ms,
                chosen.name,
                needed_bytes,
            )
    return Seq2SeqExecutor(
        model,
        EncodeRunner(model, device),
        runner,
        config,
        text,
        chosen.tokens_per_s,
        on_done,
        on_start,
        incremental=chosen.incremental_encoder,
        encoder_cache=encoder_cache,
        peers=peers,
        encode_text=parts.encode_text,
        language_models=parts.language_models,
    )


def build_chunked(
    model: StreamingModel,
    chosen: AsrCard,
    parts: EngineComponents,
    config: EngineConfig,
    *,
    batched_search: bool | None = None,
    **options: Any,
) -> ChunkedModelRunner:
    """Builds a runner for as many sessions as fit in memory, up to `config.max_sessions`. `batched_search`: search as
    tensor operations on the model's device, where the head has such a search with the same results; None: on every
    device but the CPU, whose native searches are faster. Raises OptionError for a chunk or a head that the model does
    not have."""
    if batched_search is None:
        batched_search = parts.device.torch_device.type != "cpu"
    heads = model.heads if config.decoding_graph is None else ("wfst",)
    head = config.head or heads[0]
    if head not in heads:
        where = "" if config.decoding_graph is None else f" with the decoding graph {config.decoding_graph}"
        raise OptionError(f"head={head}", f"{chosen.name}{where} has {', '.join(heads)}", param="head")
    if head == "wfst":
        search: StreamingSearch = _graph_search(model, chosen, parts, config, batched=batched_search)
    else:
        fuses = bool(parts.language_models)
        search = _search(model, head, config.beam, parts.device, fuses=fuses, batched=batched_search)
    return _wrapper(model, search, chosen, parts.device, config, aligns=head == "ctc", **options)


def _graph_search(
    model: StreamingModel, chosen: AsrCard, parts: EngineComponents, config: EngineConfig, *, batched: bool
) -> StreamingSearch:
    """Search of the checkpoint's decoding graph. Raises WeightsCorrupt, OptionError."""
    if parts.graph is None:
        raise WeightsCorrupt(f"{chosen.name} has no decoding graph", f"a file {GRAPH_FILE} beside its weights")
    options = model.graph_options
    options = options._replace(min_active=min(options.min_active, config.graph_min_active))
    if config.graph_beam is not None:
        options = options._replace(beam=config.graph_beam)
    if config.graph_max_active is not None:
        fewest = min(options.min_active, config.graph_max_active)
        options = options._replace(max_active=config.graph_max_active, min_active=fewest)
    if config.graph_lattice_beam is not None:
        options = options._replace(lattice_beam=config.graph_lattice_beam)
    graph = parts.graph
    if config.graph_epsilon_backoffs and graph.language_model is not None:
        graph = graph._replace(language_model=graph.language_model.with_epsilon_backoffs())
    if batched and config.beam == 1 and not options.minimum_risk:  # those need a lattice, which the native search has
        return BatchedWfstSearch(model, graph, parts.device, options)
    return WfstSearch(model, prepare_graph(graph), options, config.beam)


def _wrapper(
    encoder: StreamingEncoder,
    search: StreamingSearch,
    chosen: AsrCard,
    device: Device,
    config: EngineConfig,
    **options: Any,
) -> ChunkedModelRunner:
    chunk = config.chunk_frames or _whole_blocks(chosen.chunk, encoder)
    chunk_ms = units.samples_to_ms(chunk * encoder.frame_samples)
    if chunk % encoder.frame_block or chunk_ms > LONGEST_CHUNK_MS:
        raise OptionError(
            f"chunk_frames={chunk}, {chunk_ms:g} ms",
            f"{chosen.name} encodes {encoder.frame_block} frames at once: a multiple of that, "
            f"up to {LONGEST_CHUNK_MS} ms",
            param="chunk_frames",
        )
    return ChunkedModelRunner(
        encoder,
        search,
        device,
        kv_bytes=config.kv_bytes,
        slots=config.max_sessions,
        chunk=chunk,
        use_chunked_inference=config.use_chunked_inference,
        max_rows=config.max_decode_rows,
        wait_ms=chunk_ms / CHUNK_WAIT_DIVISOR if config.chunk_wait_ms is None else config.chunk_wait_ms,
        bulk_frames=config.encode_frames,
        **options,
    )


def _search(
    model: StreamingModel, head: str, beam: int, device: Device, *, fuses: bool, batched: bool
) -> StreamingSearch:
    """`fuses`: sessions may have a language model. `batched`: see build_chunked."""
    if head == "ctc":

        def prefix_beam(width: int, boost: float | None, fuses: bool) -> CtcPrefixBeam | BatchedCtcPrefixBeam:
            if batched:
                return BatchedCtcPrefixBeam(model, device, CtcBeamOptions(width), boost=boost, fuses=fuses)
            return CtcPrefixBeam(model, width, boost=boost, fuses=fuses)

        plain = CtcGreedy(model) if beam == 1 else prefix_beam(beam, None, False)
        routed = BiasingSearchRouter(plain, prefix_beam(max(beam, HOT_CTC_BEAM), CTC_BOOST, fuses))
        return AttentionRescoringSearch(routed, model.rescorer) if beam > 1 and model.rescorer is not None else routed
    target, transducer = device.torch_device, model.transducer
    assert transducer is not None, f"a model with the head {head}, and no transducer"
    greedy = (
        TransducerGreedy(transducer, device=target) if beam == 1 else TransducerBeam(transducer, beam, device=target)
    )
    wide = max(beam, HOT_RNNT_BEAM)
    return BiasingSearchRouter(
        greedy, TransducerBeam(transducer, wide, device=target, boost=RNNT_BOOST, tokens=HOT_TOKENS, fuses=fuses)
    )
