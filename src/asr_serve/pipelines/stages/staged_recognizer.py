"""Recognition of segments by the stages of a pipeline.

Engines batch as they always do: a segment is submitted to the next one as soon as the answer before is there, whatever
others do. What stages compute themselves runs on one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, StepFailed, UnsupportedOption
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.segment_recognizer import AnsweringModel
from asr_serve.pipelines.segments import is_speech, resolve_language
from asr_serve.pipelines.stages.condition import SegmentMeasures
from asr_serve.pipelines.stages.pipeline_file import DropStage, ItnStage, PipelineSpec, RecognizeStage, RescoreStage
from asr_serve.pipelines.stages.rescoring import rescore
from asr_serve.types import Priority

MAX_SEGMENTS = 512
"""Segments in all stages together; more of them wait in `submit`. As many may be in the engine of a later recognizer
beyond its own limit."""
MAX_RESCORED_SEGMENTS = 16
"""Segments whose hypotheses a language model scores in one call, where as many wait."""
STAGE_OPTIONS = (
    "beam",
    "repetition_penalty",
    "max_new_tokens",
    "temperatures",
    "top_k",
    "top_p",
    "task",
    "prompt",
    "hotwords",
    "language_model",
    "long_form",
    "condition_on_previous_text",
)
"""Options of transcription that depend on the one model of a request; a pipeline refuses them."""


class StageEngine(msgspec.Struct, frozen=True):
    """Engine of a recognizer stage, and the text of its model's tokens."""

    client: EngineClient
    text: Callable[[list[int]], str]


class StageCounts(msgspec.Struct):
    """Segments of which a stage was made use."""

    segments: int = 0
    samples: int = 0


class _Job:
    """A segment on its way. The lock of the recognizer guards `ticket` and `cancelled`; the rest belongs to the
    thread of the stages once the segment was submitted."""

    def __init__(self, number: int, pcm: np.ndarray, search: SearchOptions, priority: Priority) -> None:
        self.number, self.pcm, self.search, self.priority = number, pcm, search, priority
        self.future: Future[Recognition] = Future()
        self.future.set_running_or_notify_cancel()  # so that it cannot be cancelled behind the engine's back
        self.stage = 0
        self.answer: Recognition | None = None
        self.client: EngineClient | None = None
        """Engine that recognizes it now."""
        self.ticket: Ticket | None = None
        self.cancelled = False


class StagedRecognizer:
    """SegmentRecognizer over the stages of a pipeline."""

    def __init__(
        self, spec: PipelineSpec, engines: Mapping[int, StageEngine], scorers: Mapping[int, SentenceScorer]
    ) -> None:
        """`engines`, `scorers`: by the index of their stage."""
        self._spec, self._engines, self._scorers = spec, engines, scorers
        self.name, self.clients = spec.name, tuple(engine.client for engine in engines.values())
        self._models = {
            engine.client.card.name: AnsweringModel(engine.client.card, engine.text) for engine in engines.values()
        }
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self._room = threading.Condition()
        self._closed = False
        self._answered: queue.SimpleQueue[tuple[_Job, Future[Recognition]] | None] = queue.SimpleQueue()
        """Answers of engines, at most one of each segment; None: the end."""
        self.counts = [StageCounts() for _ in spec.stages]
        self._thread = threading.Thread(target=self._run, name="asr-serve-stages", daemon=True)
        self._thread.start()

    def transcribe_options(self, options: TranscribeOptions) -> TranscribeOptions:
        """Returns the options of a request, with those that the file sets. Raises UnsupportedOption for an option of
        one model alone, OptionError for a language that a model lacks."""
        defaults = TranscribeOptions()
        for name in STAGE_OPTIONS:
            if (value := getattr(options, name)) != getattr(defaults, name):
                raise UnsupportedOption(
                    f"{name}={value!r}", f"the pipeline {self.name} decides that for each stage", param=name
                )
        longest = min(map(self._spec.hypotheses, self._engines))
        if options.n_best > longest:
            raise UnsupportedOption(
                f"n_best={options.n_best}",
                f"up to {longest}: as many hypotheses as a stage that rescores follows each recognizer of {self.name}",
                param="n_best",
            )
        for client in self.clients:
            resolve_language(client, options.language)
        itn = options.itn or any(isinstance(stage, ItnStage) for stage in self._spec.stages)
        return msgspec.structs.replace(options, itn=itn)

    def submit(self, pcm: np.ndarray, search: SearchOptions, priority: Priority, check: Callable[[], None]) -> Ticket:
        with self._room:
            while not self._closed and len(self._jobs) >= MAX_SEGMENTS:
                check()  # under the lock, so that no notification is missed
                self._room.wait()
            if self._closed:
                raise EngineClosed("the pipeline was closed")
            job = _Job(next(self._numbers), pcm, search, priority)
            self._jobs[job.number] = job
        try:
            self._submit_stage(job, check)
        except BaseException:
            self._remove(job)
            raise
        return Ticket(job.number, job.future)

    def cancel(self, ticket: Ticket) -> None:
        with self._room:
            if (job := self._jobs.get(ticket.id)) is None:
                return
            job.cancelled = True
            client, running = job.client, job.ticket
        if client is not None and running is not None:
            client.cancel(running)

    def model_of(self, answer: Recognition) -> AnsweringModel:
        return self._models[answer.model]

    def wake_waiters(self) -> None:
        with self._room:
            self._room.notify_all()
        for client in self.clients:
            client.wake_waiters()

    def describe(self) -> list[dict[str, Any]]:
        """Stages, with the numbers of segments and seconds of audio that each has processed."""
        return [
            {
                "kind": stage.__struct_config__.tag,
                **({"model": stage.model} if isinstance(stage, RecognizeStage) else {}),
                "segments": counts.segments,
                "audio_s": round(units.samples_to_s(counts.samples), 3),
            }
            for stage, counts in zip(self._spec.stages, self.counts, strict=True)
        ]

    def close(self) -> None:
        """Ends the thread; call it after the engines were closed. Segments that are left raise EngineClosed."""
        with self._room:
            self._closed = True
            self._room.notify_all()
        self._answered.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for job in list(self._jobs.values()):
            self._resolve(job, EngineClosed("the pipeline was closed"))

    # --- the thread of the stages ------------------------------------------------------------------------

    def _run(self) -> None:
        more = True
        while more:
            items = [self._answered.get()]
            with contextlib.suppress(queue.Empty):
                while items[-1] is not None and len(items) < MAX_RESCORED_SEGMENTS:
                    items.append(self._answered.get_nowait())
            rescored: dict[int, list[_Job]] = {}
            for item in items:
                if item is None:
                    more = False
                    break
                job, future = item
                with self._failures_of([job]):
                    self._accept(job, future.result())
                    self._advance(job, rescored)
            while rescored:
                stage = min(rescored)
                jobs = rescored.pop(stage)
                with self._failures_of(jobs):
                    self._rescore(stage, jobs)
                for job in jobs:
                    with self._failures_of([job]):
                        if not job.future.done():
                            self._advance(job, rescored)

    @contextlib.contextmanager
    def _failures_of(self, jobs: Sequence[_Job]) -> Iterator[None]:
        """Ends the jobs with the error that is raised inside; the others go on."""
        try:
            yield
        except Exception as failure:
            stage = self._spec.stages[jobs[0].stage].__struct_config__.tag
            reason = f"stage {jobs[0].stage + 1}, {stage}, of {self.name} failed: {failure!r}"
            for job in jobs:
                self._resolve(job, failure if isinstance(failure, AsrServeError) else StepFailed(reason))

    def _accept(self, job: _Job, answer: Recognition) -> None:
        """Takes over the answer of a recognizer, unless a later one found no speech."""
        card = self._engines[job.stage].client.card
        if job.answer is None or is_speech(answer, card):
            job.answer = msgspec.structs.replace(answer, model=card.name)

    def _advance(self, job: _Job, rescored: dict[int, list[_Job]]) -> None:
        """Runs the stages up to the next recognizer, or up to the next rescoring stage, under whose index the segment
        is added to `rescored`. Resolves it after the last stage."""
        while job.stage + 1 < len(self._spec.stages):
            if job.cancelled:
                raise Cancelled("the segment was cancelled")
            job.stage += 1
            assert job.answer is not None
            stage, condition = self._spec.stages[job.stage], self._spec.conditions[job.stage]
            if condition is not None and not condition.holds(SegmentMeasures.of(job.answer, len(job.pcm))):
                continue
            match stage:
                case RecognizeStage():
                    self._submit_stage(job, lambda: None)
                    return
                case RescoreStage(lattice=False):
                    rescored.setdefault(job.stage, []).append(job)
                    return
                case DropStage():
                    job.answer = msgspec.structs.replace(job.answer, tokens=(), logprobs=(), times=(), hypotheses=())
            self._count(job)
        assert job.answer is not None
        self._resolve(job, job.answer)

    def _rescore(self, index: int, jobs: Sequence[_Job]) -> None:
        """Rescores segments at a stage together."""
        stage, answers = self._spec.stages[index], [job.answer for job in jobs if job.answer is not None]
        assert isinstance(stage, RescoreStage)
        texts = [self._models[answer.model].text for answer in answers]
        for job, answer in zip(jobs, rescore(answers, texts, self._scorers[index], stage), strict=True):
            job.answer = answer
            self._count(job)

    def _submit_stage(self, job: _Job, check: Callable[[], None]) -> None:
        """Submits a segment to the engine of its stage. The first stage waits for room, on the caller's thread; later
        ones skip the engine's limit: if their thread waited, segments that do not need this engine would stop too."""
        client, stage = self._engines[job.stage].client, self._spec.stages[job.stage]
        assert isinstance(stage, RecognizeStage)
        search = msgspec.structs.replace(
            job.search,
            words=job.search.words and client.card.word_times,
            timestamps=client.card.times is not None,
            beam=stage.beam,
            hypotheses=self._spec.hypotheses(job.stage),
            language_model=self._spec.lattice_model(job.stage),
        )
        ticket = client.submit(job.pcm, search, job.priority, admitted=job.stage > 0, wait=True, check=check)
        with self._room:
            job.client, job.ticket = client, ticket
            cancelled = job.cancelled
        self._count(job)
        ticket.future.add_done_callback(lambda future: self._answered.put((job, future)))
        if cancelled:
            client.cancel(ticket)

    def _count(self, job: _Job) -> None:
        with self._room:
            counts = self.counts[job.stage]
            counts.segments += 1
            counts.samples += len(job.pcm)

    def _remove(self, job: _Job) -> None:
        with self._room:
            self._jobs.pop(job.number, None)
            job.ticket = None  # whose future's callback has the job, and its audio
            self._room.notify_all()

    def _resolve(self, job: _Job, outcome: Recognition | AsrServeError) -> None:
        self._remove(job)
        if isinstance(outcome, AsrServeError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
