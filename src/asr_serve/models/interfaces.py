"""Contracts of models: what the engine may rely on, with shapes, dtypes, units and errors.

A model's class names its contract as a base class, so one that lacks a method cannot be built. What only some
models can do is a declared field with a default (`special_tokens`, `pads_to_window`, `transducer`, `rescorer`):
the engine reads the field and never probes. What the engine itself supplies or swaps, such as searches, is a
protocol.

Audio is mono, float32 in -1..1, at 16 kHz unless a contract says otherwise. Tensors lie on the model's device;
floating-point tensors have the device's dtype unless a contract says otherwise. A model's constructor raises
WeightsCorrupt for tensors that do not fit its config. All calls come from the engine's thread, but for `encode`
and `cross_keys_values`, which encoder threads call too, and those that say so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from asr_serve.errors import OptionError, UnknownVoice
from asr_serve.models.alignment_heads import AlignmentHeads
from asr_serve.models.decoding_graph import GraphSearchOptions
from asr_serve.models.packing import PackedBatch, PagedKeyValues
from asr_serve.types import NBestHypothesis as NBestHypothesis
from asr_serve.types import SearchResult as SearchResult
from asr_serve.types import SearchToken as SearchToken
from asr_serve.types import Sentence, suggest_name

UNBOUNDED_SAMPLES = 1 << 62
"""Length in samples of a session that has not ended."""

# --- encoder-decoder models -------------------------------------------------------------------------------


class PromptOptions(Protocol):
    """Options of a request that decide its prompt; `decoding.search_options.SearchOptions` has them."""

    @property
    def task(self) -> str:
        """transcribe or translate."""

    @property
    def language(self) -> str:
        """Code of the spoken language; empty while the model is still to detect it."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of earlier text, which the answer continues."""

    @property
    def timestamps(self) -> bool:
        """Returns whether the answer holds timestamp tokens."""

    @property
    def hotwords(self) -> tuple[str, ...]:
        """Words that the prompt names, of a model whose card has them among its `prompt_options`."""

    @property
    def itn(self) -> bool:
        """Returns whether the prompt asks for numbers and dates in written form, of such a model."""


class SpecialTokenIds(Protocol):
    """Ids of tokens that are not text, in a vocabulary with languages, tasks and timestamps.

    Ids below `eot` are text. Ids from `timestamp_begin` to the end of the vocabulary are timestamps, each 20 ms
    later than the one before.

    Source: Whisper, arXiv:2212.04356, section 2.3.
    """

    @property
    def eot(self) -> int:
        """End of the answer."""

    @property
    def sot(self) -> int:
        """Start of the answer; the logits after it tell the language and whether there is speech."""

    @property
    def languages(self) -> Mapping[str, int]:
        """Language tokens by language code."""

    @property
    def no_speech(self) -> int:
        """Token whose probability after `sot` is that of silence."""

    @property
    def no_timestamps(self) -> int:
        """Last token of a prompt whose answer has no timestamps."""

    @property
    def timestamp_begin(self) -> int:
        """Timestamp of the start of the audio."""

    @property
    def multilingual(self) -> bool:
        """Returns whether prompts name a language and a task."""

    @property
    def suppress(self) -> Sequence[int]:
        """Tokens that never occur in an answer."""

    @property
    def suppress_first(self) -> Sequence[int]:
        """Tokens that cannot be the first of an answer."""


class EncoderDecoderModel(ABC):
    """Encoder and autoregressive decoder that recognise whole utterances (Whisper, Moonshine).

    The engine encodes several clips in one packed batch, stores the cross-attention keys and values of their
    encoder frames in pages, and decodes one token of every row in a step. The model keeps nothing between calls:
    pages belong to the engine, which lends them to each call.

    Source: Whisper, arXiv:2212.04356; paged keys and values, arXiv:2309.06180.
    """

    frame_samples: int
    """Samples from one encoder frame to the next."""
    vocab_size: int
    """Width of the logits, special tokens included."""
    bos: int
    """Token that fills rows of a batch that no request uses."""
    eos: int
    """Token that ends an answer."""
    stop_tokens: tuple[int, ...] = ()
    """Other tokens that end an answer too."""
    max_tokens: int
    """Decoder positions of a row, those of its prompt included."""
    layers: int
    """Decoder layers."""
    heads: int
    """Attention heads of a decoder layer on this rank: its keys, values and cross-attention queries have as many."""
    head_dim: int
    """Numbers of one head's key in a page."""
    attention_scale: float
    """Factor by which cross-attention multiplies products of queries and keys."""
    head_weight: Tensor | None
    """Output projection (vocab_size, width) with which near ties between logits are decided in higher precision;
    None where logits come in float32 and need no second look."""
    alignment: AlignmentHeads
    """Cross-attention heads that follow the audio, from which times of words come."""
    special_tokens: SpecialTokenIds | None = None
    """Ids of the tokens that are not text. None: a prompt is one token, and all tokens but `eos` are text;
    requests with a task, a prompt or timestamps are refused."""
    tensor_parallel: bool = False
    """Whether the decoder is split over the device's group (devices/tensor_parallel). `decode` and `align` then
    return all logits and scores on rank 0 alone, `heads` and what `cross_keys_values` returns are this rank's, and
    ranks other than 0 are never asked to `encode`."""
    pads_to_window: bool = False
    """Whether the encoder fills a window of fixed length with silence (Whisper: 30 s), part of which it leaves out
    unless a clip is `whole`. False: `whole` changes nothing."""

    @abstractmethod
    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        """Tokens that precede an answer, one at least; a prefix that the answer must begin with comes after them.
        Raises OptionError for a language that the model lacks, UnsupportedOption for a task."""

    @abstractmethod
    def count_frames(self, samples: int, whole: bool = False) -> int:
        """Number of encoder frames that `encode` makes of a clip."""

    @abstractmethod
    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        """Encode clips end to end, each as if it were alone.

        Args:
            batch: clips (samples,) float32, on the host.
            whole: for each clip whether its window is encoded with all of its silence; () for none.

        Returns: encoder frames (packing.total, width), and the packing: those of clip i are
            hidden[packing.offsets[i] :][: packing.frames[i]]. Rows past the last clip hold arbitrary numbers.
        """

    @abstractmethod
    def cross_keys_values(self, hidden: Tensor) -> Tensor:
        """Cross-attention keys and values (frames, layers, 2, heads * head_dim) of encoder frames (frames, width)."""

    @abstractmethod
    def decode(
        self, tokens: Tensor, own: PagedKeyValues, audio: PagedKeyValues, wanted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Decode one position of each row, and write its keys and values into `own`.

        Rows may share pages: several positions of one sequence are as many rows, each of which sees those before
        it.

        Args:
            tokens: (rows,) int64.
            own: pages of each row's tokens; lengths count this one.
            audio: pages of each row's cross-attention keys and values.
            wanted: (n,) int64, rows to return logits of, in this order; None for all.

        Returns: logits (n, vocab_size); hidden (n, width) that the output projection was given; then, for each
            layer in `alignment.heads`, cross-attention queries (rows, heads * head_dim) of all rows.
        """

    @abstractmethod
    def align(self, tokens: Tensor, packing: PackedBatch, audio: PagedKeyValues, frames: Sequence[int]) -> list[Tensor]:
        """Cross-attention scores of the alignment heads for answers that are known; writes no pages.

        Args:
            tokens: (packing.total,) int64, prompt and answer of each row end to end.
            audio: pages of each row's cross-attention keys and values.
            frames: for each row how many of its encoder frames are scored.

        Returns: for each row (alignment heads, packing.frames[row], frames[row]) float32, before the softmax.
        """


class CtcHead(Protocol):
    """CTC head over the audio encoder of a speech LLM, with a vocabulary of its own: it says when text was spoken.

    Source: Graves et al. 2006.
    """

    blank_id: int
    frame_samples: int
    """Samples from one of its frames to the next."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in the head's vocabulary; none where the head has no output for one of them."""

    def decode(self, tokens: list[int]) -> str:
        """Text of such tokens."""

    def scores(self, frames: Tensor, tokens: list[int]) -> Tensor:
        """Logits (n, tokens) float32 of some tokens, the blank among them where it is asked for, in frames (n, width)
        that `SpeechLanguageModel.encode_timed` returned. They are not normalized over the vocabulary: that adds the
        same number to all tokens of a frame, and so does not change which alignment is the likeliest."""


class AnswerHeader(NamedTuple):
    """Header of an answer, before its text: the language that the model says it heard."""

    language: str
    """Code of the language; empty where the model names none that it has."""
    tokens: int
    """Tokens of the answer that are no text."""


NO_HEADER = AnswerHeader("", 0)
PROMPT_EMBEDDING = -1
"""Stands in place of a token at a position whose input is a given embedding."""


class SpeechLanguageModel(EncoderDecoderModel):
    """Audio encoder and causal language model, which reads encoder frames as embeddings inside its prompt (speech
    LLMs: Fun-ASR-Nano, GLM-ASR, Voxtral).

    There is no cross-attention: `encode` returns frames in the width of the language model, `heads` are its heads of
    keys and values, and `alignment` has no heads. Times of tokens come from `ctc_head`; requests for them are refused
    where there is none. `max_tokens` bounds all positions of a row, those of audio included. The engine feeds a prompt
    in parts, beside a position of each row that decodes, and caches what precedes the audio.

    Source: embeddings in the prompt, arXiv:2310.13289.
    """

    width: int
    """Numbers of an embedding."""
    alignment = AlignmentHeads({})
    ctc_head: CtcHead | None = None
    """Head that aligns answers with their audio; None: the model has no times of tokens."""

    max_header_tokens: int = 0
    """Most tokens with which an answer names its language, where the request names none; 0: it never does."""

    def read_header(self, tokens: Sequence[int]) -> AnswerHeader:
        """Read the header of an answer to a request without a language."""
        return NO_HEADER

    def encode_timed(
        self, batch: Sequence[Tensor], timed: Sequence[bool]
    ) -> tuple[Tensor, PackedBatch, list[Tensor | None]]:
        """Encode clips as `encode` does, for a model with `ctc_head`.

        Args:
            timed: for each clip whether its answer is to be aligned.

        Returns: what `encode` does; and for each clip frames (n, width) for `ctc_head.scores`, None where it is not
            `timed`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no CTC head")

    @abstractmethod
    def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
        """Tokens that precede an answer, with PROMPT_EMBEDDING once, where the audio stands: the engine puts as many
        there as there are encoder frames. The last is a token. Raises OptionError, UnsupportedOption."""

    @abstractmethod
    def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
        """Encode clips as EncoderDecoderModel says; `width` of the frames is the language model's."""

    @abstractmethod
    def decode(
        self,
        tokens: Tensor,
        own: PagedKeyValues,
        audio: PagedKeyValues,
        wanted: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Decode as EncoderDecoderModel says, without `audio` and without queries.

        Args:
            tokens: (rows,) int64; PROMPT_EMBEDDING where `embeddings` (rows, width) has the input.
        """

    def cross_keys_values(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no cross-attention")

    def align(self, tokens: Tensor, packing: PackedBatch, audio: PagedKeyValues, frames: Sequence[int]) -> list[Tensor]:
        raise NotImplementedError(f"{type(self).__name__} has no cross-attention")


# --- streaming models -------------------------------------------------------------------------------------


class StateSpec(NamedTuple):
    """One tensor of streaming state, for one session."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    initial_value: float | None = 0.0
    """Value that fills a new session's row; None: no step reads what the session has not written."""
    on_host: bool = False
    """Whether the tensor lies in the host's memory whatever the device."""


State = Mapping[str, Tensor]
"""State of all sessions: tensors (slots + 1, *shape) by name. The last row belongs to no session; rows that only
fill a batch point there."""


class StreamingChunk(NamedTuple):
    """Input of one step: one chunk of each of n sessions."""

    pcm: Tensor
    """(n, window samples) float32; zeros before a session's start and after its end."""
    rows: Tensor
    """(n,) int64: the session's row of the state."""
    start_frames: Tensor
    """(n,) int64: encoder frames of the session before this chunk."""
    frames: Tensor
    """(n,) int64: encoder frames of the chunk that the session has; fewer than the chunk only at its end."""
    total_samples: Tensor
    """(n,) int64: length of the session's audio in samples, UNBOUNDED_SAMPLES until it ends."""


class AudioWindow(NamedTuple):
    """Audio that a chunk needs: `samples`, the first of them `left_samples` before the chunk's first encoder frame."""

    left_samples: int
    samples: int


class StreamingEncoder(ABC):
    """Encoder that takes many sessions chunk by chunk, with state of fixed size.

    Audio is cut into encoder frames of `frame_samples`. A step takes one chunk, the same number of frames, of
    every session in it, wherever each stands. State between steps lies in the session's row of tensors that the
    engine owns: a step reads and writes rows in place, and the model keeps nothing. A session's encoder frames do
    not depend on the size of its chunks nor on the sessions beside it.
    """

    frame_samples: int
    """Samples from one encoder frame to the next."""
    frame_block: int
    """Encoder frames that attend to each other; chunks are multiples of it."""
    heads: tuple[str, ...] = ()
    """Ways to decode the frames, of ctc, rnnt, tdt and wfst, the default first; () where an attention decoder reads
    them."""

    @abstractmethod
    def count_frames(self, samples: int) -> int:
        """Number of encoder frames of a session that ended after so many samples."""

    @abstractmethod
    def audio_window(self, chunk: int) -> AudioWindow:
        """Audio that a chunk of `chunk` encoder frames needs."""

    @abstractmethod
    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        """Tensors of state by name, for steps of at most `chunk` encoder frames."""

    @abstractmethod
    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        """Encode one chunk of each session, and update its row of `state`.

        Rows of a step differ, but for those that point at the last row of the state.

        Returns: encoder frames (n, chunk, width); past a session's `frames` they hold arbitrary numbers.
        """

    @property
    def session_layout(self) -> tuple[object, ...]:
        """Facts beside the state's shapes that a saved session depends on; their `repr` is compared when it is
        restored."""
        return self.frame_samples, self.heads


class Transducer(Protocol):
    """Predictor and joint network of the heads rnnt and tdt.

    Source: Graves, arXiv:1211.3711; durations, arXiv:2304.06795.
    """

    vocab_size: int
    """Tokens, the blank included."""
    blank_id: int
    durations: tuple[int, ...]
    """Encoder frames that a token may last, for tdt; () for rnnt."""

    def predictor_state_specs(self) -> dict[str, StateSpec]:
        """Tensors of the predictor's state by name."""

    def predict(self, tokens: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Advance the predictor of each row by one token.

        Args:
            tokens: (n,) int64; the blank starts a hypothesis.
            memory: state by name (n, *shape), which is left as it was.

        Returns: the predictor's output (n, width), and the state after the token.
        """

    def project_encoder(self, hidden: Tensor) -> Tensor:
        """Encoder half of the joint network: (n, frames, width) -> (n, frames, joint width)."""

    def joint(self, projected: Tensor, predicted: Tensor) -> Tensor:
        """Join row i of `projected` (n, joint width) with row i of `predicted` (n, width).

        Returns: logits (n, vocab_size + durations) float32, tokens first.
        """


class RescoringModel(Protocol):
    """Attention decoder that scores hypotheses of a whole session.

    Source: U2, arXiv:2012.05481.
    """

    ctc_weight: float
    """Weight of the search's own log-probability beside the decoder's."""

    def rescore(self, hidden: Tensor, guesses: list[list[int]]) -> list[float]:
        """Natural-log probability of each hypothesis: `hidden` (frames, width) are the session's encoder frames,
        one at least; `guesses` are token ids without start and end."""


class StreamingModel(StreamingEncoder):
    """Streaming encoder whose frames a CTC or transducer search decodes."""

    vocab_size: int
    """Tokens, the blank included."""
    blank_id: int
    transducer: Transducer | None = None
    """Predictor and joint network; None unless `heads` has rnnt or tdt."""
    graph_options: GraphSearchOptions = GraphSearchOptions()
    """Pruning limits with which the model's decoding graph is searched, where `heads` has wfst."""

    @property
    def rescorer(self) -> RescoringModel | None:
        """Decoder that reorders the n-best list when a session ends; None where the model has none."""
        return None

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        """Natural-log probabilities (n, frames, vocab_size) float32, contiguous, of encoder frames (n, frames,
        width). Called only where `heads` has ctc."""
        raise NotImplementedError(f"{type(self).__name__} has no head ctc")

    def graph_scores(self, hidden: Tensor) -> Tensor:
        """Log-likelihoods (n, frames, columns) float32, contiguous, that a search of a decoding graph
        (models/decoding_graph.py) adds along its arcs; of a CTC model its log-probabilities. Called only where
        `heads` has wfst, or ctc and a graph is configured."""
        return self.ctc_logprobs(hidden)

    @property
    def session_layout(self) -> tuple[object, ...]:
        durations = self.transducer.durations if self.transducer is not None else ()
        return *super().session_layout, self.vocab_size, self.blank_id, durations


class IncrementalEncoderDecoderModel(EncoderDecoderModel):
    """Encoder-decoder model whose encoder also takes an utterance chunk by chunk while it is spoken (Moonshine
    Streaming, arXiv:2602.12241)."""

    encoder: StreamingEncoder
    """Encoder of sessions. Of the same audio, `add_positions` of its frames equals what `encode` returns."""
    longest_frames: int
    """Encoder frames of the longest utterance that the decoder can read."""

    @abstractmethod
    def add_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Encoder frames (frames, width) of `encoder` as `cross_keys_values` takes them; `positions` (frames,)
        int64: place of each in its utterance, below `longest_frames`."""


class StreamingSearch(Protocol):
    """Search that turns encoder frames into tokens chunk by chunk, with state in the session's row."""

    def state_specs(self) -> dict[str, StateSpec]:
        """Tensors of the search's state by name; their size does not grow with the session."""

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        """Search one chunk: `hidden` (n, frames, width) are its encoder frames. Returns a result for each row."""

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        """Hypotheses for what follows the fixed tokens of a session that has ended, best first, one at least."""


@runtime_checkable
class StatefulSearch(StreamingSearch, Protocol):
    """Search that keeps state which grows with a session, beside the session's row."""

    def export_state(self, row: int) -> tuple[bytes, Tensor]:
        """Returns that state of the session at `row`: numbers in a form of the search's own, and one tensor."""

    def import_state(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        """Restore what `export_state` returned, for a session with `seen` encoder frames behind it. Raises
        ValueError for data that does not fit."""

    def free(self, row: int) -> None:
        """Drop that state when the session at `row` is closed."""


@runtime_checkable
class RowValidatingSearch(StreamingSearch, Protocol):
    """Search whose steps trust the rows of all their sessions: a row from outside is validated before the first."""

    def validate_row(self, row: int, state: State) -> None:
        """Raises ValueError for a row of the state that no search can have left. Call before a step or `finish` of a
        session that was restored."""


# --- speech synthesis -------------------------------------------------------------------------------------

MELS = 80
"""Mel bands of an acoustic frame: natural logs of HiFi-GAN's bands (22.05 kHz, n_fft 1024, hop 256, Slaney, 0 to
8 kHz, clamped at 1e-5)."""
FRAME_WIDTH = MELS + 1
"""Numbers of an acoustic frame: the bands, then F0 in Hz, 0 where unvoiced."""


class SynthesizedSentence(NamedTuple):
    """Audio of a whole sentence."""

    pcm: np.ndarray
    """(n,) float32 in -1..1, at the model's rate."""
    phoneme_ends_samples: tuple[int, ...]
    """Sample at which each phoneme ends."""


class TtsModel(ABC):
    """Speech synthesis: sentences of phonemes to audio."""

    rate_hz: int
    """Sample rate of the audio."""

    @property
    @abstractmethod
    def voices(self) -> tuple[str, ...]:
        """Names of the voices that a sentence may ask for."""

    @abstractmethod
    def validate(self, sentence: Sentence) -> None:
        """Raises OptionError for phonemes that the model does not know, UnsupportedOption for a manner of speaking
        that it lacks, UnknownVoice."""

    def register_voice(self, name: str, path: Path) -> None:
        """Add a cloned voice from its file, or read the file again when it has changed. Called only where the card
        has `clones`. Raises WeightsCorrupt; UnknownVoice for a file that belongs to other weights."""
        raise UnknownVoice(f"voice {name!r}: this model cannot learn voices", f"voices: {', '.join(self.voices)}")


class WholeSentenceTtsModel(TtsModel):
    """Speech synthesis of a whole sentence in one call."""

    @abstractmethod
    def synthesize(self, sentence: Sentence) -> SynthesizedSentence:
        """Audio of a sentence; the same sentence gives the same samples."""


class EncodedSentence(Protocol):
    """Sentence that is ready for synthesis; its tensors are the model's own."""

    @property
    def frames(self) -> int:
        """Acoustic frames of the sentence, `lead_frames` included."""

    @property
    def lead_frames(self) -> int:
        """Frames at the start that are computed for the sake of those after them and are not played."""

    @property
    def phoneme_ends_samples(self) -> Sequence[int]:
        """Sample at which each phoneme ends, counted from the first that is played."""


E = TypeVar("E", bound=EncodedSentence)


class StreamingTtsModel(TtsModel, Generic[E]):
    """Acoustic model that makes frames chunk by chunk, of many sentences in a step, with state of fixed size."""

    chunk_frames: int
    """Acoustic frames of a step."""
    hop_samples: int
    """Samples of an acoustic frame."""
    frame_width: int
    """Numbers of an acoustic frame: FRAME_WIDTH."""

    @abstractmethod
    def state_specs(self) -> dict[str, StateSpec]:
        """Tensors of a sentence's state by name."""

    @abstractmethod
    def encode(self, sentences: Sequence[Sentence]) -> Sequence[E]:
        """Encode sentences in one batch, each as if it were alone."""

    @abstractmethod
    def step(self, encoded: Sequence[E], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        """Make the next chunk of each sentence, and update its row of `state`.

        Args:
            encoded: n sentences as `encode` returned them.
            rows: (n,) int64, each sentence's row of the state.
            seen: (n,) int64, its frames before this chunk.

        Returns: acoustic frames (n, chunk_frames, frame_width) float32; past a sentence's end, arbitrary numbers.
        """


class Vocoder(ABC):
    """Vocoder (the `vocoder` of a card): acoustic frames to audio, chunk by chunk or at once, with the same samples."""

    rate_hz: int
    """Sample rate of the audio."""
    hop_samples: int
    """Samples of an acoustic frame."""
    delay_frames: int
    """Frames that it must see ahead of those that it makes audio of."""

    @abstractmethod
    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        """Tensors of a sentence's state by name, for steps of `chunk` frames."""

    @abstractmethod
    def step(self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State) -> Tensor:
        """Make audio of one chunk of each sentence, and update its row of `state`.

        Args:
            frames: (n, chunk, FRAME_WIDTH) float32.
            rows: (n,) int64, each sentence's row of the state.
            seen: (n,) int64, its frames before this chunk.
            ends: (n,) int64, frames of the whole sentence; those past them are ignored.
            seeds: (n,) int64, seed of what is random in a sentence.

        Returns: (n, chunk * hop_samples) in -1..1; sample 0 belongs to frame `seen - delay_frames`.
        """

    @abstractmethod
    def vocode(self, frames: Tensor) -> Tensor:
        """Audio (n, frames * hop_samples) of whole sentences (n, frames, FRAME_WIDTH) of one length."""


def validate_phonemes(sentence: Sentence, known: Container[str], model: str, alphabet: str) -> None:
    """Raises OptionError with the phonemes that are not in `known`."""
    strange = dict.fromkeys(each for each in sentence.phonemes if each not in known)
    if strange:
        shown = " ".join(f"{each!r} (U+{ord(each):04X})" for each in list(strange)[:8])
        raise OptionError(
            f"phonemes that {model} does not know: {shown}",
            f"those of the alphabet {alphabet}, as far as {model} was taught them",
            param="input",
        )


def validate_voice(sentence: Sentence, voices: Iterable[str], model: str) -> None:
    """Raises UnknownVoice with the nearest name where the sentence's voice is not in `voices`."""
    names = list(voices)
    if sentence.voice not in names:
        raise UnknownVoice(
            f"{model} has no voice {sentence.voice[:100]!r}",
            f"voices: {', '.join(names)}",
            suggest_name(sentence.voice, names),
            param="voice",
        )


# --- auxiliary models -------------------------------------------------------------------------------------


class TurnModel(Protocol):
    """Prediction of whether a speaker has finished. Any number of threads may call it."""

    def finished(self, pcm: np.ndarray) -> float:
        """Probability that the turn whose last samples are `pcm` (samples,) float32 is over; one sample at least,
        and of more than the card's `hears_ms` the last ones are read."""


class SpeakerSegmentationModel(Protocol):
    """Detection of the local speakers of a window, who may overlap. Any number of threads may call it."""

    def speaker_probabilities(self, pcm: np.ndarray) -> np.ndarray:
        """Probability that each speaker speaks in each frame: windows (n, samples) float32 -> (n, frames,
        speakers) uint8, 255 standing for 1."""


class SpeakerEmbedder(Protocol):
    """Speaker embedding. Any number of threads may call it."""

    def embed(self, clips: np.ndarray) -> np.ndarray:
        """Voices in clips (rows, samples) float32: (rows, width) float32, each of length 1."""
