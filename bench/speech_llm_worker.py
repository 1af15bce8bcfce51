"""One system of speech_llm.py in one process: loads the model, then answers one job after the other.

    python speech_llm_worker.py SETUP.json

Jobs come as lines of JSON on stdin, results go to stdout. A process each, so that thread pools and memory of two
systems never mix, and an interpreter each, since the pins of peers differ from ours: this file needs torch and
safetensors alone until a system is chosen.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

Setup = dict[str, Any]
"""folder, frames and prompts of the model; system, dtype, quantize, threads, new_tokens, most_rows, options."""
Result = dict[str, Any]
JOIN_AFTER = 8
"""Tokens that each of the callers has when one more joins."""


class System(Protocol):
    facts: dict[str, Any]

    def batch(self, clips: Sequence[int]) -> Result:
        """Answers of some clips that are sent at once: wall_s, first_tokens_s (until each has its first token), tokens
        of each."""

    def join(self, clips: Sequence[int], late: int) -> Result:
        """One more clip is sent when each of `clips` has JOIN_AFTER tokens: ttft_s of the late one, and longest_gap_s
        between two tokens of the others from then on."""

    def close(self) -> None: ...


def longest_gap_s(times: Sequence[float], since: float) -> float:
    """Longest time between two of `times` that ends after `since`."""
    return max((b - a for a, b in itertools.pairwise(times) if b > since), default=0.0)


class AsrServe:
    """This engine: a speech LLM whose encoder looks its frames up, and the language model of the folder."""

    def __init__(self, setup: Setup) -> None:
        from asr_serve import devices
        from asr_serve.config import EngineConfig
        from asr_serve.decoding import hypothesis
        from asr_serve.decoding.search_options import SearchOptions
        from asr_serve.engine.builder import EngineComponents
        from asr_serve.engine.client import EngineClient
        from asr_serve.engine.thread_backend import thread_backend
        from asr_serve.models.asr.speech_llm.speech_llm import SpeechLlm
        from asr_serve.models.auxiliary import silero
        from asr_serve.models.causal_lm import CausalConfig, CausalLanguageModel
        from asr_serve.models.interfaces import PROMPT_EMBEDDING, PromptOptions
        from asr_serve.models.packing import PackedBatch, PagedKeyValues, pack_clips
        from asr_serve.models.registry import AsrCard

        # Answers to frames at random repeat themselves, which the engine ends and the peers do not look for.
        hypothesis.repeated_tokens = lambda tokens: 0

        folder, passes = Path(setup["folder"]), self
        self.passes: list[tuple[float, int]] = []
        """End of each pass and the rows of it that yielded a token."""
        self.wait_for: tuple[int, threading.Event] | None = None
        before, after = (tuple(setup[name]) for name in ("before", "after"))

        class LookedUpFrames(SpeechLlm):
            """The first sample of a clip is its number."""

            frame_samples = 1_280  # 80 ms

            def __init__(self) -> None:
                config = CausalConfig.of(json.loads((folder / "config.json").read_text()))
                tensors = load_file(folder / "model.safetensors")
                model = CausalLanguageModel(config, tensors, device, 1_024)
                super().__init__(model, eos=-1)
                with safe_open(setup["prompts"], "pt") as file:
                    self.frames = file.get_tensor("frames").to(device.dtype)

            def prompt_tokens(self, options: PromptOptions) -> tuple[int, ...]:
                return (*before, PROMPT_EMBEDDING, *after)

            def count_frames(self, samples: int, whole: bool = False) -> int:
                return self.frames.shape[1]

            def encode(self, batch: Sequence[Tensor], whole: Sequence[bool] = ()) -> tuple[Tensor, PackedBatch]:
                packing = pack_clips([self.frames.shape[1]] * len(batch), device.frame_block)
                hidden = self.frames.new_zeros(packing.total, self.width)
                for pcm, offset in zip(batch, packing.offsets, strict=False):
                    hidden[offset : offset + self.frames.shape[1]] = self.frames[int(pcm[0])]
                return hidden, packing

            def decode(
                self,
                tokens: Tensor,
                own: PagedKeyValues,
                audio: PagedKeyValues,
                wanted: Tensor | None = None,
                embeddings: Tensor | None = None,
            ) -> tuple[Tensor, ...]:
                made = super().decode(tokens, own, audio, wanted, embeddings)
                passes.record()
                return made

        device: Any = None

        def build() -> EngineComponents:
            nonlocal device
            device = devices.make_device("cpu", setup["dtype"], setup["quantize"])
            return EngineComponents(LookedUpFrames(), silero.load(), device, lambda tokens: "")

        self.new_tokens = setup["new_tokens"]
        card = AsrCard(
            name="bench-speech-llm",
            task="asr",
            kind="bench",
            languages=("en",),
            parameters=0,
            licence="",
            source="",
            hub="",
            max_segment_ms=60_000,
            min_segment_ms=0,
            tokens_per_s=1_000.0,
        )
        config = EngineConfig(
            max_decode_rows=setup["most_rows"], kv_bytes=setup["kv_bytes"], prefix_bytes=0, max_sessions=1
        )
        self.options = SearchOptions(temperatures=(0.0,), min_avg_logprob=-1e9, max_compression_ratio=1e9)
        self.client = EngineClient(config, thread_backend(card, build))
        self.runner: Any = self.client.backend.loop.executor.decode_runner  # type: ignore[attr-defined]
        self.facts = {"describe": device.describe()}

    def record(self) -> None:
        """Notes the end of a pass; called by the model, on the engine's thread."""
        self.passes.append((time.perf_counter(), len(self.runner.rows)))
        if self.wait_for is not None and len(self.passes) == self.wait_for[0]:
            self.wait_for[1].set()

    def submit(self, clip: int) -> Any:
        import numpy as np

        pcm = np.zeros(16 * (self.new_tokens - 4), np.float32)  # as long as allows so many tokens
        pcm[0] = clip
        return self.client.submit(pcm, self.options).future

    def submit_all(self, clips: Sequence[int]) -> list[Any]:
        """Submits clips that the engine sees together."""
        leave = threading.Event()
        self.client.backend.call(lambda _: leave.wait() and None)  # type: ignore[attr-defined]
        futures = [self.submit(clip) for clip in clips]
        leave.set()
        return futures

    def batch(self, clips: Sequence[int]) -> Result:
        self.passes.clear()
        started = time.perf_counter()
        answers = [future.result(600) for future in self.submit_all(clips)]
        wall_s = time.perf_counter() - started
        whole = next(end for end, rows in self.passes if rows == len(clips))
        return {"wall_s": wall_s, "first_tokens_s": whole - started, "tokens": [[*answer.tokens] for answer in answers]}

    def join(self, clips: Sequence[int], late: int) -> Result:
        self.passes.clear()
        self.wait_for = None
        ready = threading.Event()
        futures = self.submit_all(clips)
        while not self.passes or self.passes[-1][1] < len(clips):
            time.sleep(0.001)
        self.wait_for = len(self.passes) + JOIN_AFTER - 1, ready
        ready.wait(600)
        sent = time.perf_counter()
        futures.append(self.submit(late))
        for future in futures:
            future.result(600)
        first = next(end for end, rows in self.passes if end > sent and rows == len(clips) + 1)
        return {
            "ttft_s": first - sent,
            "longest_gap_s": longest_gap_s([end for end, rows in self.passes if rows >= len(clips)], sent),
        }

    def close(self) -> None:
        self.client.close()


class Vllm:
    """vLLM's engine in this process, stepped by hand: no other process takes its cores."""

    def __init__(self, setup: Setup) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=setup["cpus"],
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        import vllm

        with safe_open(setup["prompts"], "pt") as file:
            self.prompts = file.get_tensor("prompts")
        eager = "compiled" not in setup["options"]
        self.engine = vllm.LLM(
            setup["folder"],
            skip_tokenizer_init=True,
            enable_prompt_embeds=True,
            dtype={"bf16": "bfloat16", "fp32": "float32"}[setup["dtype"]],
            enforce_eager=eager,
            max_model_len=1_024,
            max_num_seqs=setup["most_rows"],
            enable_prefix_caching=False,
        ).llm_engine
        self.sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=setup["new_tokens"], ignore_eos=True, detokenize=False
        )
        self.facts = {"version": vllm.__version__, "eager": eager}
        self.ids = 0

    def send(self, clip: int) -> str:
        self.ids += 1
        self.engine.add_request(str(self.ids), {"prompt_embeds": self.prompts[clip]}, self.sampling)
        return str(self.ids)

    def step(self, found: dict[str, list[int]]) -> None:
        for output in self.engine.step():
            found[output.request_id] = [*output.outputs[0].token_ids]

    def batch(self, clips: Sequence[int]) -> Result:
        started, first = time.perf_counter(), None
        ids = [self.send(clip) for clip in clips]
        found: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            self.step(found)
            if first is None and all(found.get(each) for each in ids):
                first = time.perf_counter()
        assert first is not None
        wall_s = time.perf_counter() - started
        return {"wall_s": wall_s, "first_tokens_s": first - started, "tokens": [found[each] for each in ids]}

    def join(self, clips: Sequence[int], late: int) -> Result:
        ids = [self.send(clip) for clip in clips]
        found: dict[str, list[int]] = {}
        while not all(len(found.get(each, ())) >= JOIN_AFTER for each in ids):
            self.step(found)
        sent, first, times = time.perf_counter(), None, [time.perf_counter()]
        joined, count = self.send(late), sum(map(len, found.values()))
        while self.engine.has_unfinished_requests():
            self.step(found)
            if sum(len(found[each]) for each in ids) > count:
                count = sum(len(found[each]) for each in ids)
                times.append(time.perf_counter())
            if first is None and found.get(joined):
                first = time.perf_counter()
        assert first is not None
        return {"ttft_s": first - sent, "longest_gap_s": longest_gap_s(times, sent)}

    def close(self) -> None:
        pass


class Transformers:
    """transformers' `generate` over a batch of equal lengths: nobody joins it, so one more waits for its end."""

    def __init__(self, setup: Setup) -> None:
        import transformers

        with safe_open(setup["prompts"], "pt") as file:
            self.prompts = file.get_tensor("prompts")
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[setup["dtype"]]
        torch.set_num_threads(setup["threads"])
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(setup["folder"], dtype=self.dtype)
        self.criteria = transformers.StoppingCriteriaList
        self.new_tokens = setup["new_tokens"]
        self.facts = {"version": transformers.__version__, "attention": self.model.config._attn_implementation}

    @torch.inference_mode()
    def generate(self, clips: Sequence[int], new_tokens: int) -> tuple[Tensor, list[float]]:
        """Tokens (clips, new_tokens), and when each of them was there."""
        times: list[float] = []

        def note(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool)

        prompts = self.prompts[list(clips)].to(self.dtype)
        tokens = self.model.generate(
            inputs_embeds=prompts,
            attention_mask=torch.ones(prompts.shape[:2], dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            stopping_criteria=self.criteria([note]),
        )
        return tokens, times

    def batch(self, clips: Sequence[int]) -> Result:
        started = time.perf_counter()
        tokens, times = self.generate(clips, self.new_tokens)
        wall_s = time.perf_counter() - started
        return {"wall_s": wall_s, "first_tokens_s": times[0] - started, "tokens": tokens.tolist()}

    def join(self, clips: Sequence[int], late: int) -> Result:
        _, times = self.generate(clips, self.new_tokens)
        sent = times[JOIN_AFTER - 1]
        gap_s = longest_gap_s(times, sent)
        _, late_times = self.generate([late], 1)
        return {"ttft_s": late_times[0] - sent, "longest_gap_s": gap_s}

    def close(self) -> None:
        pass


SYSTEMS: dict[str, type[AsrServe] | type[Vllm] | type[Transformers]] = {
    "asr-serve": AsrServe,
    "vllm": Vllm,
    "transformers": Transformers,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    setup = json.loads(Path(sys.argv[1]).read_text())

    def answer(result: Result) -> None:
        print(json.dumps(result), file=answers, flush=True)

    started = time.perf_counter()
    try:
        system: System = SYSTEMS[setup["system"]](setup)
    except ImportError as missing:
        return answer({"skipped": f"not installed: {missing}"})
    answer({"facts": system.facts, "load_s": time.perf_counter() - started})
    for line in sys.stdin:
        job, cpu_s = json.loads(line), time.process_time()
        result = system.batch(job["clips"]) if "late" not in job else system.join(job["clips"], job["late"])
        answer({**result, "cpu_s": time.process_time() - cpu_s})
    system.close()
    return None


if __name__ == "__main__":
    main()
