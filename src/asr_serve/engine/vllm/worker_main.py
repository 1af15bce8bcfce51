"""Main function of the vLLM worker, and the frames of its protocol.

It runs under the interpreter of another environment, which has vLLM and torch and not this package: the file is run by
its path, and imports the standard library alone until it loads vLLM.

A frame is a JSON object, its length before it, and raw bytes, whose length it names. To the worker: `start`, then
`generate`, `abort` and `stop`. From the worker: `ready` or `start_failed`, then `tokens` after every step and `failed`
for a request that vLLM refuses. The worker ends when the connection ends.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

Frame = dict[str, Any]
LENGTHS = struct.Struct("<II")
"""Bytes of the JSON, and of what follows it."""
MAX_JSON_BYTES, MAX_PAYLOAD_BYTES = 16 << 20, 1 << 30
EMBEDDING = -1
"""Token of a prompt at whose position an embedding is given."""
METRICS_INTERVAL_S = 1.0
"""Least time between two readings of vLLM's metrics."""
WARM_UP: Frame = {
    "id": 0,
    "tokens": [0, 0],
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "max_tokens": 2,
    "stop_tokens": [],
    "repetition_penalty": 1.0,
    "given_tokens": 0,
}
"""Request that no client made."""
KV_USAGE_METRIC = "vllm:kv_cache_usage_perc"


def send_frame(connection: socket.socket, frame: Frame, payload: bytes | memoryview = b"") -> None:
    """Sends a frame. Raises OSError."""
    text = json.dumps(frame).encode()
    connection.sendall(LENGTHS.pack(len(text), len(payload)) + text)
    if payload:
        connection.sendall(payload)


def receive_frame(connection: socket.socket) -> tuple[Frame, bytearray] | None:
    """Receives a frame and its bytes; None at the end of the connection, in the middle of a frame too. Raises OSError,
    ValueError for what is no frame."""
    head = _receive(connection, LENGTHS.size)
    if head is None:
        return None
    text_bytes, payload_bytes = LENGTHS.unpack(head)
    if text_bytes > MAX_JSON_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {text_bytes} and {payload_bytes} bytes")
    text, payload = _receive(connection, text_bytes), _receive(connection, payload_bytes)
    if text is None or payload is None:
        return None
    return json.loads(text), payload


def _receive(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return data


def answer_penalty() -> Any:
    """Returns vLLM's logits processor of requests with a repetition penalty: for tokens of the answer alone, while
    vLLM's own counts those of the prompt too. Source: CTRL, arXiv:1909.05858."""
    import torch
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class AnswerPenalty(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Any], Any] | None:
            given, penalty = params.extra_args["given"], params.extra_args["penalty"]

            def penalize(decoded: list[int], logits: Any) -> Any:
                if seen := list({*given, *decoded}):
                    index = torch.tensor(seen)
                    values = logits[index]
                    logits[index] = torch.where(values > 0, values / penalty, values * penalty)
                return logits

            return penalize if penalty != 1.0 else None

    return AnswerPenalty


class VllmEngine:
    """vLLM's engine in this process, stepped by hand."""

    def __init__(self, settings: Frame) -> None:
        import torch
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._torch, self._sampling, self._deltas = torch, SamplingParams, RequestOutputKind.DELTA
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings["dtype"]]
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                dtype=settings["dtype"],
                max_model_len=settings["max_positions"],
                max_num_seqs=settings["max_rows"],
                kv_cache_memory_bytes=settings["kv_bytes"],
                skip_tokenizer_init=True,
                enable_prompt_embeds=True,
                enforce_eager=True,
                enable_prefix_caching=True,
                generation_config="vllm",
                disable_log_stats=False,
                logits_processors=[answer_penalty()],
            )
        )
        self._kv_usage, self._metrics_read_s = 0.0, 0.0
        self._warm_up()

    def _warm_up(self) -> None:
        """Decodes a token: the first step of a process takes seconds."""
        self.add({**WARM_UP, "width": self.engine.model_config.get_hidden_size()}, bytearray())
        while self.busy:
            self.engine.step()

    def describe(self) -> Frame:
        """Contents of `ready`."""
        import vllm

        cache = self.engine.vllm_config.cache_config
        return {
            "version": vllm.__version__,
            "torch": self._torch.__version__,
            "device": self.engine.vllm_config.device_config.device_type,
            "pages": cache.num_gpu_blocks or 0,
            "page_positions": cache.block_size,
        }

    def add(self, frame: Frame, payload: bytearray) -> None:
        """Adds a request; raises what vLLM raises for one that it refuses."""
        torch, tokens = self._torch, frame["tokens"]
        given = torch.tensor(tokens) == EMBEDDING
        embeddings = torch.zeros(len(tokens), frame["width"], dtype=self._dtype)
        if payload:
            embeddings[given] = torch.frombuffer(payload, dtype=self._dtype).view(-1, frame["width"])
        sampling = self._sampling(
            temperature=frame["temperature"],
            top_k=frame["top_k"],
            top_p=frame["top_p"],
            seed=frame["seed"],
            max_tokens=frame["max_tokens"],
            stop_token_ids=frame["stop_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=self._deltas,
            extra_args={"penalty": frame["repetition_penalty"], "given": tokens[len(tokens) - frame["given_tokens"] :]},
        )
        prompt = {
            "prompt_embeds": embeddings,
            "prompt_token_ids": [max(token, 0) for token in tokens],
            "prompt_is_token_ids": (~given).tolist(),
        }
        self.engine.add_request(str(frame["id"]), prompt, sampling)

    @property
    def busy(self) -> bool:
        """Returns whether requests run or wait."""
        return bool(self.engine.has_unfinished_requests())

    def abort(self, numbers: list[int]) -> None:
        self.engine.abort_request([str(number) for number in numbers])

    def step(self) -> Frame:
        """Contents of `tokens`: what one step decoded."""
        started = time.perf_counter()
        outputs = []
        for output in self.engine.step():
            made = output.outputs[0]
            tokens = list(made.token_ids)
            scores = [found[token].logprob for token, found in zip(tokens, made.logprobs or (), strict=True)]
            ended = made.finish_reason if output.finished else None
            outputs.append({"id": int(output.request_id), "tokens": tokens, "logprobs": scores, "finish": ended})
        return {
            "op": "tokens",
            "outputs": outputs,
            "seconds": time.perf_counter() - started,
            "kv_usage": self._read_kv_usage(),
        }

    def _read_kv_usage(self) -> float:
        if time.monotonic() - self._metrics_read_s > METRICS_INTERVAL_S:
            values = [metric.value for metric in self.engine.get_metrics() if metric.name == KV_USAGE_METRIC]
            self._kv_usage, self._metrics_read_s = max(values, default=0.0), time.monotonic()
        return self._kv_usage


class Worker:
    """Serves one connection: a thread reads it, and this one steps the engine."""

    def __init__(self, connection: socket.socket, make_engine: Callable[[Frame], VllmEngine] = VllmEngine) -> None:
        """`make_engine`: is given the contents of `start`."""
        self._connection, self._make_engine = connection, make_engine
        self._inbox: queue.SimpleQueue[tuple[Frame, bytearray]] = queue.SimpleQueue()
        """Frames from the connection. Bounded by the other side, which has at most `max_rows` requests here."""

    def run(self) -> int:
        """Returns the exit code."""
        first = receive_frame(self._connection)
        if first is None:
            return 0
        threading.Thread(target=self._read, name="frames", daemon=True).start()
        try:
            engine = self._make_engine(first[0])
        except Exception as failure:
            self._send({"op": "start_failed", "error": _describe(failure)})
            return 1
        self._send({"op": "ready", **engine.describe()})
        while True:
            while not engine.busy or not self._inbox.empty():
                frame, payload = self._inbox.get()
                if frame["op"] == "stop":
                    return 0
                self._handle(engine, frame, payload)
            self._send(engine.step())

    def _handle(self, engine: VllmEngine, frame: Frame, payload: bytearray) -> None:
        if frame["op"] == "abort":
            engine.abort(frame["ids"])
            return
        try:
            engine.add(frame, payload)
        except Exception as failure:
            self._send({"op": "failed", "id": frame["id"], "error": _describe(failure)})

    def _read(self) -> None:
        """Reads frames until the other side is gone: then this process ends at once, whatever it does."""
        try:
            while (frame := receive_frame(self._connection)) is not None:
                self._inbox.put(frame)
        finally:
            os._exit(0)

    def _send(self, frame: Frame) -> None:
        send_frame(self._connection, frame)


def _describe(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def main(make_engine: Callable[[Frame], VllmEngine] = VllmEngine) -> None:
    """Serves the connection whose file descriptor is the last argument, and ends the process."""
    try:
        status = Worker(socket.socket(fileno=int(sys.argv[-1])), make_engine).run()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # vLLM's own threads must not delay the end


if __name__ == "__main__":
    main()
