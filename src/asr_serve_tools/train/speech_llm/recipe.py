"""Training of a speech LLM: Whisper's encoder, an adaptor, and a causal language model with low-rank changes.

In its first steps the adaptor learns alone, by CTC: its embeddings take the directions of the pieces of words that
were said, as the language model embeds them. That costs little, for the language model is not computed. Then the
language model reads the embeddings inside its prompt, and both learn to write the text. Encoder and language model are
frozen, but for the low-rank changes, which are added into the weights at the end.

Source  speech LLMs of a frozen encoder, an adaptor and a causal language model: arXiv:2402.08846; CTC: Graves et al.,
        ICML 2006; low-rank adaptation: arXiv:2106.09685.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from asr_serve import devices, units
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.errors import OptionError
from asr_serve.models.asr.speech_llm.adaptors import AdaptorConfig
from asr_serve.models.asr.speech_llm.chat_prompt import ChatPrompt
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve_tools.train.run_folder import lock_run_folder
from asr_serve_tools.train.speech_llm.checkpoint import LanguageModelParts, write_speech_llm
from asr_serve_tools.train.speech_llm.encoded_speech import (
    EncodedClip,
    EncodedSpeech,
    FrozenEncoder,
    SpeechSources,
    encode_speech,
    label_rows,
)
from asr_serve_tools.train.speech_llm.spoken_text import CtcPieces
from asr_serve_tools.train.speech_llm.trainable_adaptor import CtcOutput, TrainableAdaptor, ctc_loss
from asr_serve_tools.train.speech_llm.trainable_causal_lm import TrainableCausalLm
from asr_serve_tools.train.voice.sentences import sentences

LABELED_SHARE = 0.5
"""Share of recordings among the clips of a step, where there is synthesized speech too."""
CTC_WEIGHT = 0.3
"""Weight of the CTC loss while the language model is trained."""
ADAPTOR_SHARE = 0.3
"""Share of the learning rate that the adaptor has while the language model is trained."""
WARM_UP_STEPS = 50
LEAST = 0.05
"""Share of the learning rate at the end of each of the two parts."""
MASKS, MASK_SHARE = 2, 0.08
"""Spans of frames of each clip that are hidden in training, each up to this share of it."""
HELD_OUT_CLIPS = 16
LANGUAGES = ("", "en")
"""Languages that the prompts of training name; empty: none."""


class SpeechLlmTrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run. `run`: a folder for speech/ (frames of the encoder), log.jsonl, state.pt (the state to
    continue from) and model/ (the speech LLM)."""

    run: Path
    sources: SpeechSources
    encoder: str = "whisper-base"
    language_model: str = "gemma3-270m"
    steps: int = 2_000
    ctc_steps: int = 1_500
    """First steps, in which the adaptor is trained without the language model."""
    minutes: float = 180.0
    """Minutes after which the run stops; the same options continue it."""
    batch_s: float = 120.0
    """Seconds of audio in a step."""
    lr: float = 1e-3
    rank: int = 16
    """Rank of the changes to the language model; 0: it is frozen."""
    downsample_rate: int = 4
    """Frames of the encoder, of 20 ms, in an embedding."""
    ffn_dim: int = 2_048
    blocks: int = 2
    heads: int = 8
    pieces: int = 1_000
    """Pieces of words that CTC tells apart, beside the letters."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    log_every: int = 20
    save_every: int = 200


FIXED = (
    *("encoder", "language_model", "ctc_steps", "steps", "batch_s", "lr", "rank", "downsample_rate", "ffn_dim"),
    *("blocks", "heads", "pieces", "seed"),
)
"""Options that must not change when a run continues."""


class TrainingBatch(NamedTuple):
    """Clips of a step."""

    frames: Tensor
    """(clips, n, width) float32, zeros past each clip; n is a multiple of the embedding's frames."""
    counts: Tensor
    """(clips,) embeddings of each clip."""
    texts: list[str]
    audio_s: float


def check_sources(sources: SpeechSources) -> None:
    """Check what a run is trained on before hours of work. Raises OptionError."""
    if not sources.labels and not sources.sentences:
        raise OptionError("neither labels nor sentences", "speech to train on", "--labels, --sentences, or both")
    if sources.sentences and not sources.speech_minutes:
        raise OptionError("sentences, and 0 minutes of speech", "more than 0", "--speech-minutes 60")
    for manifest in sources.labels:
        label_rows(manifest)
    if sources.sentences:
        sentences(sources.sentences)


class SpeechLlmTraining:
    """Resumable training in a run folder."""

    def __init__(
        self, options: SpeechLlmTrainingOptions, speech: EncodedSpeech, language_model: LanguageModelParts
    ) -> None:
        """Raises OptionError for sizes that do not fit, or other options than the run began with; WeightsCorrupt."""
        self.options, self.speech, self.parts = options, speech, language_model
        device = devices.make_device(options.device, options.dtype)
        self.at, self.dtype = device.torch_device, device.dtype
        torch.manual_seed(options.seed)
        config = language_model.config
        if config.hidden_size % options.heads:
            raise OptionError(
                f"heads {options.heads}", f"a divisor of {config.hidden_size}, the language model's width"
            )
        self.language_model = TrainableCausalLm(config, language_model.tensors, options.rank, self.dtype).to(self.at)
        self.prompt = ChatPrompt(language_model.tokenizer, system=False, think=True)
        self.pieces = CtcPieces(language_model.folder / "tokenizer.json", options.pieces)
        embeddings = self.language_model.embed(torch.tensor(self.pieces.tokens, device=self.at)).float()
        scale = float(embeddings.norm(dim=1).mean())
        self.config = AdaptorConfig(
            downsample_rate=options.downsample_rate,
            encoder_dim=speech.width,
            llm_dim=config.hidden_size,
            ffn_dim=options.ffn_dim,
            n_layer=options.blocks,
            attention_heads=options.heads,
        )
        self.adaptor = TrainableAdaptor(self.config, scale).to(self.at)
        self.ctc = CtcOutput(embeddings, scale).to(self.at)
        self.first = [*self.adaptor.parameters(), *self.ctc.parameters()]
        self.second = list(self.language_model.parameters())
        groups = [{"params": group} for group in (self.first, self.second) if group]
        self.optimizer = torch.optim.AdamW(groups, options.lr, (0.9, 0.98), weight_decay=0.01)
        self.step, self.audio_s = 0, 0.0
        self.clips, self.held = speech.split()
        if (options.run / "state.pt").is_file():
            self._resume()

    # --- state -----------------------------------------------------------------------------------------------

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {"adaptor": self.adaptor, "ctc": self.ctc, "language_model": self.language_model}

    def save(self) -> None:
        state = {name: module.state_dict() for name, module in self._modules().items()}
        settings = {name: getattr(self.options, name) for name in FIXED}
        part = self.options.run / "state.part"
        torch.save(
            {
                **state,
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "audio_s": self.audio_s,
                "fixed": settings,
            },
            part,
        )
        os.replace(part, self.options.run / "state.pt")

    def _resume(self) -> None:
        state = torch.load(self.options.run / "state.pt", map_location=self.at, weights_only=True)
        for name, was in state["fixed"].items():
            if (current := getattr(self.options, name)) != was:
                raise OptionError(
                    f"{name}: {current}", f"{self.options.run} began with {was}", "take another --run", param=name
                )
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.audio_s = state["step"], state["audio_s"]

    # --- batches ---------------------------------------------------------------------------------------------

    def batch(self, step: int) -> TrainingBatch:
        """Clips of a step, of similar lengths, which depend on its number alone."""
        chance = random.Random(self.options.seed * 1_000_003 + step)
        groups = [[clip for clip in self.clips if clip.labeled == labeled] for labeled in (True, False)]
        shares = [LABELED_SHARE, 1 - LABELED_SHARE] if all(groups) else [float(bool(group)) for group in groups]
        wanted = units.s_to_samples(self.options.batch_s)
        drawn, total = list[EncodedClip](), 0
        while total < 4 * wanted:
            (group,) = chance.choices(groups, shares)
            drawn.append(chance.choice(group))
            total += drawn[-1].samples
        drawn.sort(key=lambda clip: clip.samples)
        pivot, chosen, samples = chance.randrange(len(drawn)), list[EncodedClip](), 0
        while samples < wanted:
            clip = drawn[(pivot + len(chosen)) % len(drawn)]
            if chosen and samples + clip.samples > wanted:
                break
            chosen.append(clip)
            samples += clip.samples
        return self.clips_batch(chosen, torch.Generator().manual_seed(chance.getrandbits(31)))

    def clips_batch(self, clips: Sequence[EncodedClip], masks: torch.Generator | None = None) -> TrainingBatch:
        """`masks`: where spans of frames are hidden; None: nowhere."""
        frames = [self.speech.frames(clip) for clip in clips]
        if masks is not None:
            for each in frames:
                for _ in range(MASKS):
                    span = int(torch.rand((), generator=masks) * MASK_SHARE * len(each))
                    first = int(torch.rand((), generator=masks) * (len(each) - span))
                    each[first : first + span] = 0
        padded, rate = pad_sequence(frames, batch_first=True), self.config.downsample_rate
        padded = F.pad(padded, (0, 0, 0, -padded.shape[1] % rate))
        counts = torch.tensor([self.adaptor.count(len(each)) for each in frames])
        audio_s = units.samples_to_s(sum(clip.samples for clip in clips))
        return TrainingBatch(padded.to(self.at), counts.to(self.at), [clip.text for clip in clips], audio_s)

    # --- losses ----------------------------------------------------------------------------------------------

    def embeddings(self, batch: TrainingBatch) -> Tensor:
        with torch.autocast(self.at.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            x: Tensor = self.adaptor(batch.frames, batch.counts)
        return x.float()

    def losses(self, batch: TrainingBatch, step: int) -> dict[str, Tensor]:
        """Losses by name, each a mean over pieces or tokens: `ctc`, and `text` once the language model is trained."""
        x = self.embeddings(batch)
        pieces = [self.pieces.encode(text) for text in batch.texts]
        found = {"ctc": ctc_loss(self.ctc(x).cpu(), batch.counts.cpu(), pieces)}
        if step >= self.options.ctc_steps:
            found["text"] = self._text_loss(x, batch, step)
        return found

    def _text_loss(self, x: Tensor, batch: TrainingBatch, step: int) -> Tensor:
        """Mean negative log probability of the tokens of each text, and of the end after it."""
        chance = random.Random(self.options.seed * 1_000_003 + step)
        asked = SearchOptions(language=chance.choice(LANGUAGES), itn=chance.random() < 0.5)
        prompt = self.prompt.tokens(asked)
        audio_at = prompt.index(PROMPT_EMBEDDING)
        before, after = (self._embed(part) for part in (prompt[:audio_at], prompt[audio_at + 1 :]))
        rows, wanted, targets = list[Tensor](), list[Tensor](), list[int]()
        longest = 0
        for i, text in enumerate(batch.texts):
            answer = [*self.parts.tokenizer.encode(f" {text}"), self.prompt.end]
            row = torch.cat([before, x[i, : batch.counts[i]].to(before.dtype), after, self._embed(answer[:-1])])
            rows.append(row)
            wanted.append(torch.arange(len(row) - len(answer), len(row)))
            targets += answer
            longest = max(longest, len(row))
        hidden = self.language_model(pad_sequence(rows, batch_first=True))
        chosen = torch.cat([each[at] for each, at in zip(hidden, wanted, strict=True)])
        return F.cross_entropy(self.language_model.logits(chosen), torch.tensor(targets, device=self.at))

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        return self.language_model.embed(torch.tensor(tokens, dtype=torch.long, device=self.at))

    # --- steps -----------------------------------------------------------------------------------------------

    def rate(self, step: int) -> float:
        """Learning rate at a step, as a share of the highest; it rises and falls in each part."""
        options = self.options
        first, last = (0, options.ctc_steps) if step < options.ctc_steps else (options.ctc_steps, options.steps)
        progress = (step - first) / max(1, last - first)
        warm = min(1.0, (step - first + 1) / min(WARM_UP_STEPS, max(1, (last - first) // 4)))
        return warm * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * progress)) / 2)

    def train_step(self) -> tuple[dict[str, float], float]:
        """Train one step. Returns the losses, and the seconds of audio."""
        alone = self.step < self.options.ctc_steps
        shares = (1.0, 0.0) if alone else (ADAPTOR_SHARE, 1.0)
        for group, share in zip(self.optimizer.param_groups, shares, strict=False):
            group["lr"] = self.options.lr * self.rate(self.step) * share
        batch = self.batch(self.step)
        found = self.losses(batch, self.step)
        loss = found["ctc"] if alone else found["text"] + CTC_WEIGHT * found["ctc"]
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*self.first, *self.second], 1.0)
        self.optimizer.step()
        self.step += 1
        self.audio_s += batch.audio_s
        return {name: value.item() for name, value in found.items()}, batch.audio_s

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Losses of clips that are never trained on, as the last step had them."""
        clips = sorted(self.held[:: -(-len(self.held) // HELD_OUT_CLIPS)], key=lambda clip: clip.samples)
        halves = [half for half in (clips[: len(clips) // 2], clips[len(clips) // 2 :]) if half]
        found = [self.losses(self.clips_batch(half), self.step - 1) for half in halves]
        return {name: round(float(sum(each[name] for each in found)) / len(found), 4) for name in found[0]}

    def train(self) -> Iterator[dict[str, Any]]:
        """Train up to the last step, or until the minutes are over. Yields lines of the log."""
        options = self.options
        began_s = since_s = time.monotonic()
        sums, count, audio_s = dict[str, float](), 0, 0.0
        while self.step < options.steps:
            losses, seconds = self.train_step()
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + loss
            count, audio_s = count + 1, audio_s + seconds
            now_s = time.monotonic()
            last = self.step == options.steps or now_s - began_s >= 60 * options.minutes
            last_of_part = last or self.step == options.ctc_steps
            saves = last_of_part or self.step % options.save_every == 0
            if saves or self.step % options.log_every == 0:
                line: dict[str, Any] = {"step": self.step, "steps": options.steps}
                line |= {f"{name}_loss": round(value / count, 4) for name, value in sums.items()}
                line |= {"lr": round(options.lr * self.rate(self.step - 1), 7)}
                line |= {"audio_h": round(self.audio_s / 3_600, 3)}
                line |= {"audio_s_per_s": round(audio_s / max(1e-9, now_s - since_s), 1)}
                if saves:
                    line["held_out"] = self.held_out()
                    self.save()
                yield line
                sums, count, audio_s, since_s = {}, 0, 0.0, time.monotonic()
            if last:
                return


def train_speech_llm(options: SpeechLlmTrainingOptions, say: Callable[[str], None] = lambda _: None) -> Path:
    """Train to the last step, or for the given minutes, from the last save if there is one, and write the speech LLM.
    Returns its folder. Raises OptionError, WeightsMissing, WeightsCorrupt, EmptyAudio."""
    check_sources(options.sources)
    options.run.mkdir(parents=True, exist_ok=True)
    with lock_run_folder(options.run):
        device = devices.make_device(options.device, options.dtype)
        encoder = FrozenEncoder(options.encoder, device, say)
        parts = LanguageModelParts.load(options.language_model, options.run / "language_model")
        speech = encode_speech(options.sources, encoder, options.encoder, options.run / "speech", say)
        run = SpeechLlmTraining(options, speech, parts)
        say(f"step {run.step} of {options.steps} on {device.name} {device.dtype_name}")
        with (options.run / "log.jsonl").open("a") as log:
            for line in run.train():
                text = json.dumps(line)
                log.write(text + "\n")
                log.flush()
                say(text)
        adaptor = {f"audio_adaptor.{name}": tensor for name, tensor in run.adaptor.state_dict().items()}
        tensors = encoder.tensors | adaptor
        return write_speech_llm(
            options.run / "model", run.config, encoder.sizes, tensors, parts, run.language_model.merge(parts.tensors)
        )
