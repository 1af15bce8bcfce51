"""Separation of two speakers who talk at once, told by diarization when each of them talks; on a thread of its own.

No weights are needed: the spectra of each voice are learnt from the frames of the same audio in which the speaker
talks alone. Where both talk, each frame is explained as a sum of spectra of both voices, and each speaker gets their
share of every frequency. A speaker who hardly talks alone gets spectra that are learnt from what the other one's do
not explain.

Source  non-negative matrix factorization with the Kullback-Leibler divergence: Lee and Seung 2001; of speakers with
        spectra learnt from each: Schmidt and Olsson 2006, "Single-channel speech separation using sparse non-negative
        matrix factorization"
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.stats import EngineStats
from asr_serve.errors import AsrServeError, Cancelled

FFT_SAMPLES, HOP_SAMPLES = 1_024, 256
"""Window and step of spectra: windows of 64 ms tell the harmonics of two voices apart. These numbers and the next were
chosen on mixes of training speech, whose references are the recognizer's words for each voice alone."""
SPECTRA = 40
"""Spectra of a voice; twice as many fit the other one's voice, too."""
ITERATIONS = 30
"""Updates of spectra and of their gains; more fit the other one's voice, too."""
ALONE_FRAMES = 60
"""Frames of a voice alone, about a second, from which its spectra are learnt from these."""
LEVEL = 0.05
"""Root mean square to which audio is scaled."""
LOW_PRIORITY = 10
"""Niceness of the thread: recognition beside it keeps nine tenths of a core that both want."""


@torch.inference_mode()
def separate_speakers(pcm: np.ndarray, speaker_ranges: SpeakerRanges) -> np.ndarray:
    """Returns what each of two speakers says, (2, samples) float32, of pcm (samples,) float32 at 16 kHz, 64 ms or
    longer. `speaker_ranges`: the (start, end) of each one's turns, in samples. Where nobody or one speaker talks, the
    audio is the mixture's, or silence for who does not talk. The same for the same audio."""
    mixture = torch.from_numpy(pcm)
    level = mixture.square().mean().sqrt().clamp(min=1e-6) / LEVEL
    window = torch.hann_window(FFT_SAMPLES).sqrt()
    padded = torch.nn.functional.pad(mixture / level, (0, max(0, FFT_SAMPLES - len(pcm))))
    spectrum = torch.stft(padded, FFT_SAMPLES, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True)
    active = activity_of(speaker_ranges, spectrum.shape[1])
    masks = (active >= active.flip(0)).float()[:, None].repeat(1, spectrum.shape[0], 1)
    both = active.all(0)
    if both.any():
        masks[:, :, both] = _shares(spectrum.abs() + 1e-5, active)
    tracks = torch.istft(masks * spectrum, FFT_SAMPLES, HOP_SAMPLES, window=window, length=len(padded))
    return np.ascontiguousarray((tracks[:, : len(pcm)] * level).numpy())


def activity_of(speaker_ranges: Sequence[Sequence[tuple[int, int]]], frames: int) -> Tensor:
    """Returns the activity (speakers, frames) bool: frames whose centre is in a turn."""
    activity = torch.zeros(len(speaker_ranges), frames, dtype=torch.bool)
    for row, turns in zip(activity, speaker_ranges, strict=True):
        for start, end in turns:
            row[-(-max(0, start) // HOP_SAMPLES) : -(-max(0, end) // HOP_SAMPLES)] = True
    return activity


def _shares(magnitudes: Tensor, active: Tensor) -> Tensor:
    """Returns the share of each speaker, (2, bins, frames in which both talk), of magnitudes (bins, frames)."""
    chance = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=chance) + 0.1

    spectra, learnt = random(2, magnitudes.shape[0], SPECTRA), []
    for speaker, other in ((0, 1), (1, 0)):
        alone = active[speaker] & ~active[other]
        learnt.append(bool(alone.sum() >= ALONE_FRAMES))
        if learnt[-1]:
            own = magnitudes[:, alone]
            gains = random(SPECTRA, own.shape[1])
            for _ in range(ITERATIONS):
                _update_gains(own, spectra[speaker], gains)
                _update_spectra(own, spectra[speaker], spectra[speaker] @ gains, gains)
    spectra /= spectra.sum(1, keepdim=True)
    mixed = magnitudes[:, active.all(0)]
    gains = random(2 * SPECTRA, mixed.shape[1])
    for _ in range(ITERATIONS):
        _update_gains(mixed, torch.cat(list(spectra), 1), gains)
        for speaker in (0, 1):
            if not learnt[speaker]:
                found = torch.cat(list(spectra), 1) @ gains
                _update_spectra(mixed, spectra[speaker], found, gains[speaker * SPECTRA : (speaker + 1) * SPECTRA])
    parts = spectra @ gains.view(2, SPECTRA, -1)
    return parts / (parts.sum(0) + 1e-9)


def _update_gains(magnitudes: Tensor, spectra: Tensor, gains: Tensor) -> None:
    gains *= spectra.T @ (magnitudes / (spectra @ gains + 1e-9)) / spectra.sum(0)[:, None]


def _update_spectra(magnitudes: Tensor, spectra: Tensor, found: Tensor, gains: Tensor) -> None:
    """`found`: the magnitudes as all spectra explain them now."""
    spectra *= (magnitudes / (found + 1e-9)) @ gains.T / (gains.sum(1) + 1e-9)


class SeparationRequest(NamedTuple):
    """Mixture of two speakers; see `separate_speakers`."""

    pcm: np.ndarray
    speaker_ranges: SpeakerRanges
    future: Future[np.ndarray]
    """Running, so that it cannot be cancelled: `SeparationRunner.cancel` withdraws the request."""


class SeparationRunner:
    """Separates mixtures one by one, on one core of the host, beside the loop.

    The loop's thread computes nothing of it, so that no live caller waits for a mixture, and a mixture waits for no
    caller; its thread has a low priority, for machines with few cores. Not on a GPU, whose only queue the steps of live
    callers use. Methods belong to the loop's thread; EngineClient limits how many mixtures wait."""

    def __init__(self, device: Device, stats: EngineStats, call: Callable[[Callable[[], None]], None]) -> None:
        """`call`: schedules a job on the loop's thread, from any thread."""
        self._stats, self._call = stats, call
        self._waiting: deque[SeparationRequest] = deque()
        self._running: SeparationRequest | None = None
        self._fill = 1.0 if device.rows_cost_time else 0.0
        """Share of the device that a step occupies: none of a GPU."""
        self._thread = ThreadPoolExecutor(1, "asr-serve separation", _yield_to_others, (device,))

    @property
    def busy(self) -> bool:
        """Returns whether a mixture is being separated."""
        return self._running is not None

    def submit(self, request: SeparationRequest) -> None:
        self._waiting.append(request)
        self._start_next()

    def cancel(self, answer: Future[np.ndarray]) -> None:
        """Withdraws the request of that answer, unless it is running or done."""
        for index, request in enumerate(self._waiting):  # `remove` would compare the audio of others
            if request.future is answer:
                del self._waiting[index]
                answer.set_exception(Cancelled("the separation was cancelled"))
                return

    def close(self, error: AsrServeError) -> None:
        """Waits for the running mixture; rejects it and all others."""
        self._thread.shutdown()
        requests = [*([self._running] if self._running else []), *self._waiting]
        self._running = None
        self._waiting.clear()
        for request in requests:
            request.future.set_exception(error)

    def _start_next(self) -> None:
        while self._running is None and self._waiting:
            request = self._waiting.popleft()
            with StepGuard(self._stats, "speakers", "separating speakers", request.future.set_exception):
                work = self._thread.submit(_separate_timed, request)
                self._running = request
                work.add_done_callback(lambda done: self._call(lambda: self._complete(done)))

    def _complete(self, work: Future[tuple[np.ndarray, float]]) -> None:
        request, self._running = self._running, None
        if request is None:
            return  # closed meanwhile
        with StepGuard(self._stats, "speakers", "separating speakers", request.future.set_exception):
            tracks, seconds = work.result()
            self._stats.record_step("speakers", seconds, 1, self._fill)
            request.future.set_result(tracks)
        self._start_next()


def _yield_to_others(device: Device) -> None:
    """Gives the calling thread one core, and that only where no other wants it."""
    device.set_threads(1)
    if sys.platform == "linux":  # elsewhere a priority is that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)


def _separate_timed(request: SeparationRequest) -> tuple[np.ndarray, float]:
    """Returns the tracks, and the seconds that they took."""
    started = time.perf_counter()
    return separate_speakers(request.pcm, request.speaker_ranges), time.perf_counter() - started
