"""Executor of speech LLMs whose language model vLLM computes: encodes here, and decodes in a vLLM worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Finish, Hypothesis, Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.executor import LoopContext, StepGuard
from asr_serve.engine.request import RecognitionRequest, reject
from asr_serve.engine.seq2seq.ctc_token_aligner import CtcTokenAligner
from asr_serve.engine.seq2seq.decode_batch import DecoderPrompts
from asr_serve.engine.seq2seq.encoder import EncoderResult, EncodeRunner
from asr_serve.engine.seq2seq.request_table import RequestTable
from asr_serve.engine.seq2seq.scheduler import LIVE_RESERVE_FRACTION, Seq2SeqScheduler
from asr_serve.engine.vllm.worker_main import Frame
from asr_serve.engine.vllm.worker_process import (
    HANG_TIMEOUT_S,
    MAX_FAILED_STARTS,
    WorkerProcess,
    WorkerSettings,
    WorkerSupervisor,
)
from asr_serve.errors import (
    Cancelled,
    EngineClosed,
    EngineCrashed,
    OptionError,
    ProgramFailed,
    ProgramMissing,
    StepFailed,
    UnsupportedOption,
)
from asr_serve.models.interfaces import SpeechLanguageModel

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Workers that may die while they work on a request; then it is rejected."""


class VllmCapacity:
    """DecoderCapacity of vLLM, which allocates and shares pages itself: a request needs none of this engine's."""

    def __init__(self, prompts: DecoderPrompts) -> None:
        self._prompts = prompts

    def pages_needed(self, frames: int, max_tokens: int, options: SearchOptions) -> int:
        self._prompts.positions_needed(options, max_tokens, frames)
        return 0

    def validate_capacity(self, rows: int, pages: int) -> None:
        pass


class VllmRow:
    """Request that vLLM decodes: its prompt and its hypothesis."""

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        embeddings: bytes,
        hypothesis: Hypothesis,
        ctc_frames: Tensor | None = None,
    ) -> None:
        """`embeddings`: those of the audio in `prompt`, in the device's dtype. `ctc_frames`: see EncoderResult."""
        self.request_id, self.prompt, self.embeddings, self.hypothesis = request_id, prompt, embeddings, hypothesis
        self.ctc_frames = ctc_frames
        self.deaths = 0
        """Workers that died while they worked on it."""
        self.number = 0
        """Number under which the worker knows this try; 0: it does not."""


class VllmExecutor:
    """Executor of speech LLMs over a vLLM worker. See engine/executor.ModelExecutor.

    A prompt goes to vLLM as tokens and embeddings, answers come back token by token, with their natural-log
    probabilities before temperature and repetition penalty. Temperature fall-back and the end of repetitions are
    decided here, as with the native decoder. Drafts are not verified: an answer is the same without. Tokens that a
    request gives, a prefix or the accepted part of a draft, have the natural-log probability 0: vLLM has none for
    tokens of a prompt with embeddings.
    """

    def __init__(
        self,
        model: SpeechLanguageModel,
        encode: EncodeRunner,
        settings: WorkerSettings,
        config: EngineConfig,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
    ) -> None:
        """Starts the worker; blocks until its model is loaded. Raises ProgramMissing, ProgramFailed."""
        self.model, self.device, self.encode_runner, self.max_rows = (
            model,
            encode.device,
            encode,
            config.max_decode_rows,
        )
        self.prompts = DecoderPrompts(model, self.device)
        self.scheduler = Seq2SeqScheduler(
            config, config.encode_frames or self.device.encode_frames, packed=self.device.packs_clips
        )
        self.requests = RequestTable(
            model, VllmCapacity(self.prompts), config.window, text, tokens_per_s, on_done, on_start, {}
        )
        self.open_requests = self.requests.open
        self._aligner = None if model.ctc_head is None else CtcTokenAligner(model.ctc_head, text)
        self.rows: dict[int, VllmRow] = {}
        """Rows by request."""
        self._rows_by_number: dict[int, VllmRow] = {}
        self._last_number, self._sent_s = 0, 0.0
        self._ready = True
        """Whether the worker takes requests."""
        self._refusal: EngineClosed | None = None
        """Why none are taken, after several failed starts in a row."""
        self._restarts, self._kv_usage = 0, 0.0
        self.worker = WorkerSupervisor(
            settings,
            lambda frame: self.loop.call(lambda: self._on_frame(frame)),
            lambda code: self.loop.call(lambda: self._on_death(code)),
            lambda process, facts: self.loop.call(lambda: self._on_restart(process, facts)),
            lambda failed, failure: self.loop.call(lambda: self._on_start_failed(failed, failure)),
        )
        self._process, self._facts = self.worker.process, self.worker.facts
        """The worker's latest process, and the contents of its `ready`."""

    def attach(self, context: LoopContext) -> None:
        self.loop, self.requests.stats = context, context.stats
        self.worker.begin()

    @property
    def due_s(self) -> float | None:
        """Time at which a worker that does not answer is killed."""
        if not self._ready or not self.rows:
            return None
        return max(self._sent_s, self.worker.last_message_s) + HANG_TIMEOUT_S

    @property
    def idle(self) -> bool:
        return True

    def check(self) -> None:
        assert len(self.open_requests) == len(self.rows) + len(self.scheduler), "a request was lost"
        known = {row.number for row in self.rows.values() if row.number}
        assert known == set(self._rows_by_number), "a row is known by another number"

    def close(self) -> None:
        """Stops the worker."""
        self.worker.close()

    def shutdown(self, error: Exception) -> None:
        try:
            self.close()
        finally:
            for utterance in self.open_requests.values():
                reject(utterance.future, error)

    def cached_audio(self) -> list[bytes]:
        return []

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Does nothing: no audio is cached."""

    def report(self) -> dict[str, int]:
        pages = int(self._facts["pages"])
        return {
            "waiting": len(self.scheduler),
            "decoding": len(self.rows),
            "pages": pages,
            "pages_used": round(self._kv_usage * pages) if self.rows else 0,
        }

    def describe(self) -> dict[str, Any]:
        counters = self.report()
        return {
            "pages": counters["pages"],
            "pages_used": counters["pages_used"],
            "backend": "vllm",
            "backend_version": self._facts["version"],
            "backend_device": self._facts["device"],
            "backend_restarts": self._restarts,
        }

    # --- messages -------------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        self.requests.add(utterance)
        try:
            self._validate(utterance)
        except (OptionError, EngineClosed) as error:
            self._fail([utterance.id], error)
        else:
            self.scheduler.enqueue(self.requests.to_scheduled(utterance, utterance))

    def _validate(self, utterance: RecognitionRequest) -> None:
        """Raises OptionError for a request that can never be served, EngineClosed."""
        options = utterance.options
        if self._refusal is not None:
            raise self._refusal
        if options.beam > 1:
            raise UnsupportedOption(f"beam={options.beam}", "the back end vllm is greedy, or samples", param="beam")
        if options.bias:
            raise UnsupportedOption(
                "boosted words", "the back end vllm has no biasing of its search", "leave them out", param="bias"
            )
        self.prompts.validate(options)
        self.requests.validate_capacity(utterance)
        self.requests.language_model(utterance)

    def cancel(self, request_id: int) -> None:
        self._fail([request_id], Cancelled("the request was cancelled"))

    def expedite(self, request_id: int, within_ms: int) -> None:
        if (utterance := self.requests.open.get(request_id)) is not None:
            utterance.within_ms = within_ms
            if self.scheduler.remove(request_id):
                self.scheduler.enqueue(self.requests.to_scheduled(utterance, utterance))

    # --- step -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Encodes a batch and hands it to the worker; returns whether there was anything to do."""
        if (due_s := self.due_s) is not None and time.monotonic() >= due_s:
            log.error("the vLLM worker has sent nothing for %g s: it is killed", HANG_TIMEOUT_S)
            self._ready = False
            self._process.kill()
            return True
        ids = self._schedule()
        if not ids:
            return False
        started = time.perf_counter()
        batch, results = self.requests.mark_started(ids), list[EncoderResult]()
        with self._guard("encode", "encoding", ids):
            clips = [each.pcm for each in batch if each.pcm is not None]
            results = self.encode_runner.encode(clips, timed=[each.options.words for each in batch])
        for utterance, encoded in zip(batch, results, strict=bool(results)):
            with self._guard("encode", "joining", [utterance.id]):
                self._add_row(utterance, encoded)
        frames = sum(encoded.frames for encoded in results)
        if results:
            fill = min(1.0, frames / self.scheduler.encode_frames)
            self.loop.stats.record_step("encode", time.perf_counter() - started, len(results), fill)
        return True

    def _schedule(self) -> list[int]:
        if not self._ready:
            return []
        live = self.loop.live_sessions > 0 and bool(self.rows)
        reserved = (self.max_rows // LIVE_RESERVE_FRACTION if live else 0, 0)
        return self.scheduler.schedule(self.max_rows - len(self.rows), 0, reserved=reserved)

    def _add_row(self, utterance: RecognitionRequest, encoded: EncoderResult) -> None:
        utterance.encoded = True
        hypothesis = self.requests.hypothesis(utterance)
        prompt = self.prompts.prompt_tokens(utterance.options, encoded.frames)
        hypothesis.limit_tokens(self.model.max_tokens - len(prompt))
        for token in hypothesis.draft.tokens[: hypothesis.fixed]:
            hypothesis.append_token(token, 0.0)
        embeddings = encoded.decoder_input.to(self.device.dtype).cpu().contiguous().view(torch.uint8)
        row = self.rows[utterance.id] = VllmRow(
            utterance.id, prompt, embeddings.numpy().tobytes(), hypothesis, encoded.ctc_frames
        )
        self.requests.mark_encoded(utterance)
        self._send(row)

    def _send(self, row: VllmRow) -> None:
        """Hands the next try of a row to the worker."""
        hypothesis, options = row.hypothesis, row.hypothesis.options
        self._last_number, self._sent_s = self._last_number + 1, time.monotonic()
        row.number = self._last_number
        self._rows_by_number[row.number] = row
        self._process.send(
            {
                "op": "generate",
                "id": row.number,
                "tokens": [*row.prompt, *hypothesis.tokens],
                "width": self.model.width,
                "temperature": hypothesis.temperature,
                "top_k": options.top_k,
                "top_p": options.top_p,
                "seed": options.seed,
                "max_tokens": hypothesis.max_tokens - len(hypothesis.tokens),
                "stop_tokens": [self.model.eos, *self.model.stop_tokens],
                "repetition_penalty": options.repetition_penalty,
                "given_tokens": len(hypothesis.tokens),
            },
            row.embeddings,
        )

    # --- the worker's messages ------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        if frame["op"] == "failed":
            if (row := self._rows_by_number.get(frame["id"])) is not None:
                self._fail(
                    [row.request_id], StepFailed(f"vLLM refused the request: {frame['error']}", todo="report it")
                )
            return
        outputs, self._kv_usage = frame["outputs"], frame["kv_usage"]
        for output in outputs:
            if (row := self._rows_by_number.get(output["id"])) is not None:
                with self._guard("decode", "decoding", [row.request_id]):
                    self._append(row, output)
        if outputs:
            self.loop.stats.record_step("decode", frame["seconds"], len(outputs), len(outputs) / self.max_rows)

    def _append(self, row: VllmRow, output: Frame) -> None:
        finish: Finish | None = None
        for token, logprob in zip(output["tokens"], output["logprobs"], strict=True):
            if finish is None:
                finish = row.hypothesis.append_token(token, logprob)
        if finish is None:
            if output["finish"] is not None:
                raise ProgramFailed(f"vLLM ended an answer: {output['finish']}", "a token that ends it, or its length")
            return
        self._forget(row, abort=output["finish"] is None)
        answer: Recognition | None = row.hypothesis.finalize(finish)
        if answer is None:
            self.loop.stats.record_fallback()
            self._send(row)
            return
        utterance = self.open_requests[row.request_id]
        if self._aligner is not None and row.ctc_frames is not None:
            answer = self._aligner.with_times(answer, row.ctc_frames, utterance.samples)
        del self.rows[row.request_id]
        self.requests.finish(utterance, answer, "")

    def _forget(self, row: VllmRow, *, abort: bool) -> None:
        """Ends the try of a row; `abort`: the worker is still at it."""
        self._rows_by_number.pop(row.number, None)
        if abort and row.number and self._ready:
            self._process.send({"op": "abort", "ids": [row.number]})
        row.number = 0

    def _on_death(self, code: str) -> None:
        """Keeps the rows for the next worker, which starts each again after its given tokens."""
        self._ready = False
        for row in self.rows.values():
            row.deaths += bool(row.number)
            self._forget(row, abort=False)
            del row.hypothesis.tokens[row.hypothesis.fixed :], row.hypothesis.logprobs[row.hypothesis.fixed :]
        lost = [row.request_id for row in self.rows.values() if row.deaths >= MAX_DEATHS]
        came = f"the vLLM worker died {MAX_DEATHS} times while it worked on this request ({code})"
        self._fail(lost, EngineCrashed(came, todo="do not send it again"))

    def _on_restart(self, process: WorkerProcess, facts: Frame) -> None:
        self._process, self._facts = process, facts
        self._ready, self._refusal = True, None
        self._restarts += 1
        for row in self.rows.values():
            self._send(row)

    def _on_start_failed(self, failed: int, failure: ProgramFailed | ProgramMissing) -> None:
        if failed < MAX_FAILED_STARTS:
            return
        self._refusal = EngineClosed(f"vLLM cannot be started at the moment: {failure}", todo="try again later")
        self._fail(list(self.open_requests), self._refusal)

    # --- endings --------------------------------------------------------------------------------------------

    def _guard(self, stage: str, what: str, ids: list[int]) -> StepGuard:
        """Guard of a step, whose failure fails these requests."""
        return StepGuard(self.loop.stats, stage, what, lambda error: self._fail(ids, error))

    def _fail(self, ids: list[int], error: Exception) -> None:
        """Rejects those of the requests that are still open."""
        for request_id in [i for i in ids if i in self.open_requests]:
            self.scheduler.remove(request_id)
            if (row := self.rows.pop(request_id, None)) is not None:
                self._forget(row, abort=True)
            reject(self.requests.remove(request_id).future, error)
