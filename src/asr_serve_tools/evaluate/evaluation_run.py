"""Runs of an evaluation: each system over each dataset, every clip committed as its answer comes.

A run that was killed goes on: clips with an answer are not asked again, those that failed are. RTFx is the speed of one
uninterrupted pass over all clips, after one that warms up; a run that took several has none, because the pieces were
batched in another way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec
import numpy as np

from asr_serve.audio.reader import read_audio
from asr_serve.decoding.biasing_graph import parse_phrase
from asr_serve.errors import AsrServeError, UnsupportedOption
from asr_serve.evaluation.store import EvaluationResult, EvaluationRun, EvaluationStore, RunSettings
from asr_serve.units import RATE_HZ, s_to_samples, samples_to_s
from asr_serve_tools.evaluate.clip_lists import ClipList, EvaluationClip
from asr_serve_tools.evaluate.clip_scores import score_text
from asr_serve_tools.evaluate.diarization_error import diarization_error
from asr_serve_tools.evaluate.evaluated_systems import AsrSystem, ClipAnswer, ClipInput, OpenAiServer, TranscribeRequest
from asr_serve_tools.evaluate.live_clips import stream_clip

BLOCK_SAMPLES = s_to_samples(1_200)
"""Audio that is decoded and handed over at once."""
WARM_UP_S = 60.0
"""Longest pass over the first block that warms a system of this process up: kernels are compiled, and memory is mapped,
for each new shape of a batch, so that a first pass takes up to 1.6 times as long (bench/results/offline-cpu.json)."""
ALONE_CLIPS = 20
"""Clips whose time is measured alone, for a system that works on all of them together."""

Show = Callable[[int, int], None]
"""Called with the samples of audio done, and of all clips of the run that are known so far."""


class RunOptions(msgspec.Struct, frozen=True):
    live: bool = False
    jobs: int = 1
    hotwords: tuple[str, ...] = ()
    language: str | None = None
    cost_per_hour: float | None = None
    resume: bool = True


class RunOutcome(msgspec.Struct, frozen=True):
    run: EvaluationRun
    clips: int
    """Clips that were asked now."""
    before: int
    """Clips that were done before."""
    failed: int


class _Decoded(msgspec.Struct, frozen=True):
    clip: EvaluationClip
    pcm: np.ndarray


def evaluate(
    store: EvaluationStore, system: AsrSystem, clips: ClipList, options: RunOptions, show: Show = lambda *_: None
) -> RunOutcome:
    """Measures a system over a dataset and stores every clip. Raises UnsupportedOption where the system cannot do what
    the options ask; a clip's own failure is a row."""
    if options.live and not isinstance(system, OpenAiServer):
        raise UnsupportedOption(
            f"--live with {system.info.name}",
            "a server that has /v1/stream: http://host:port/v1#MODEL",
            f"start one: asr-serve serve --model {system.info.model}",
            param="live",
        )
    if options.hotwords and not system.takes_hotwords:
        raise UnsupportedOption(f"hotwords with {system.info.name}", "systems that take hotwords", "leave one out")
    diarize = clips.has_turns and system.diarizes and not options.live
    settings = RunSettings(options.live, options.jobs if system.reads_files else 1, options.hotwords, diarize)
    run = store.begin_run(system.info, clips.dataset, settings, options.cost_per_hour, resume=options.resume)
    done = store.done_paths(run.run_id)
    todo = [clip for clip in clips.clips if clip.path not in done]
    work = _Pass(store, system, run, options, diarize, show)
    if todo:
        work.answer(todo)
    if system.batches:
        work.time_alone(clips.clips)
    if run.finished is None:
        store.finish_run(run.run_id)
    failed = sum(row.error is not None for row in store.results(run.run_id))
    return RunOutcome(store.run(run.run_id), len(todo), len(done), failed)


class _Pass:
    """One stretch of work over the clips that are not done."""

    def __init__(
        self,
        store: EvaluationStore,
        system: AsrSystem,
        run: EvaluationRun,
        options: RunOptions,
        diarize: bool,
        show: Show,
    ) -> None:
        self.store, self.system, self.run, self.options, self.show = store, system, run, options, show
        self.request = TranscribeRequest(options.language, options.hotwords, diarize)
        self.phrases = [parse_phrase(word).text for word in options.hotwords]  # without weights: Ada, of Ada:2
        self.seconds = self.audio_s = 0.0
        self.samples = self.known = self.answered = 0

    def answer(self, todo: Sequence[EvaluationClip]) -> None:
        """Transcribes the clips, and stores every answer and the speed."""
        score_text("a", "a", self.run.dataset.language)  # loads the normalizer, off the clock
        if self.options.live:
            self._live(todo)
            return
        warm = False
        for block in self._blocks(todo):
            if not warm:
                self._warm_up(block)
                warm = True
            self._block(block)
        if self.answered:
            self.store.add_pass(self.run.run_id, len(todo), self.audio_s, self.seconds)

    def _warm_up(self, block: Sequence[_Decoded]) -> None:
        """Transcribes a block off the clock; with a server, which others keep warm, one clip of it."""
        if self.system.reads_files:
            block = [sorted(block, key=lambda each: len(each.pcm))[len(block) // 2]]
        end_s = time.perf_counter() + WARM_UP_S
        with contextlib.closing(self.system.transcribe([self._input(each) for each in block], self.request)) as answers:
            for _ in answers:
                if time.perf_counter() > end_s:
                    break

    def _blocks(self, todo: Sequence[EvaluationClip]) -> Iterator[list[_Decoded]]:
        """Decoded clips, off the clock. A clip that cannot be read is a failure already here."""
        block: list[_Decoded] = []
        samples = 0
        for clip in todo:
            try:
                pcm = read_audio(clip.file)
            except AsrServeError as failure:
                self.store.add_result(
                    self.run.run_id, EvaluationResult(clip.path, 0.0, clip.reference, error=str(failure))
                )
                continue
            block.append(_Decoded(clip, pcm))
            samples += len(pcm)
            if samples >= BLOCK_SAMPLES:
                yield block
                block, samples = [], 0
        if block:
            yield block

    def _block(self, block: Sequence[_Decoded]) -> None:
        inputs = [self._input(each) for each in block]
        self.known += sum(len(each.pcm) for each in block)
        alone = not (self.system.batches or self.system.reads_files)
        began, storing_s = time.perf_counter(), 0.0
        for answer in self.system.transcribe(inputs, self.request):
            stored = time.perf_counter()
            self._store(block[answer.place], answer)
            storing_s += time.perf_counter() - stored
        self.seconds += time.perf_counter() - began
        if alone:  # it waits while a clip is stored; others work on
            self.seconds -= storing_s

    def time_alone(self, clips: Sequence[EvaluationClip]) -> None:
        """Times ALONE_CLIPS of all clips, each alone, except those that an earlier run has timed."""
        missing = {row.path for row in self.store.results(self.run.run_id) if row.error is None and row.seconds is None}
        count = min(ALONE_CLIPS, len(clips))
        chosen = [clips[place * len(clips) // count] for place in range(count)]
        untimed = [clip for clip in chosen if clip.path in missing]
        for place, clip in enumerate(untimed):
            found = self._input(_Decoded(clip, read_audio(clip.file)))
            if place == 0:  # its batches were larger so far, or there were none
                list(self.system.transcribe([found], self.request))
            began = time.perf_counter()
            list(self.system.transcribe([found], self.request))
            self.store.set_seconds(self.run.run_id, clip.path, time.perf_counter() - began)

    def _live(self, todo: Sequence[EvaluationClip]) -> None:
        """`jobs` callers at once. Each reads its own clip."""
        assert isinstance(self.system, OpenAiServer)
        server = self.system

        def call(clip: EvaluationClip) -> EvaluationResult:
            try:
                pcm = read_audio(clip.file)
            except AsrServeError as failure:
                return EvaluationResult(clip.path, 0.0, clip.reference, error=str(failure))
            self.known += len(pcm)
            try:
                found = stream_clip(
                    server.address.removesuffix("/v1"),
                    server.model,
                    pcm,
                    server.api_key,
                    self.options.language,
                    self.options.hotwords,
                )
            except (AsrServeError, TimeoutError) as failure:
                error = str(failure) or "no end of the text came in time"
                return EvaluationResult(clip.path, samples_to_s(len(pcm)), clip.reference, error=error)
            row = self._row(_Decoded(clip, pcm), ClipAnswer(0, found.text))
            return msgspec.structs.replace(row, first_word_ms=found.first_word_ms, final_ms=found.final_ms)

        with ThreadPoolExecutor(self.options.jobs) as pool:
            waiting = [pool.submit(call, clip) for clip in todo]
            try:
                for each in as_completed(waiting):
                    row = each.result()
                    self.store.add_result(self.run.run_id, row)
                    self.samples += round(row.audio_s * RATE_HZ)
                    self.show(self.samples, self.known)
            finally:
                for each in waiting:
                    each.cancel()

    def _store(self, decoded: _Decoded, answer: ClipAnswer) -> None:
        self.store.add_result(self.run.run_id, self._row(decoded, answer))
        self.samples += len(decoded.pcm)
        if answer.error is None:
            self.answered += 1
            self.audio_s += samples_to_s(len(decoded.pcm))
        self.show(self.samples, self.known)

    def _row(self, decoded: _Decoded, answer: ClipAnswer) -> EvaluationResult:
        clip, audio_s = decoded.clip, samples_to_s(len(decoded.pcm))
        if answer.error is not None:
            return EvaluationResult(clip.path, audio_s, clip.reference, error=answer.error)
        row = EvaluationResult(clip.path, audio_s, clip.reference, answer.text, seconds=answer.seconds)
        if clip.reference is not None:
            score = score_text(clip.reference, answer.text, self.run.dataset.language, self.phrases)
            row = msgspec.structs.replace(row, **msgspec.structs.asdict(score))
        if clip.turns is not None and answer.turns is not None:
            found = diarization_error(clip.turns, answer.turns, len(decoded.pcm))
            row = msgspec.structs.replace(
                row, speaker_s=samples_to_s(found.speaker_samples), speaker_error_s=samples_to_s(found.error_samples)
            )
        return row

    def _input(self, decoded: _Decoded) -> ClipInput:
        return ClipInput(decoded.clip.file, decoded.pcm)
