"""FunASR's vLLM interface over this engine: its classes, their options and its programs.

    from asr_serve.funasr import AutoModelVLLM

    model = AutoModelVLLM(model="FunAudioLLM/Fun-ASR-Nano-2512")
    for result in model.generate(["audio1.wav", "audio2.wav"], language="中文"):
        print(result["key"], result["text"])

Source: FunASR's vLLM guide; names and defaults of arguments: funasr 1.4.16.
"""

from __future__ import annotations

from asr_serve.funasr.offline import AutoModelVLLM, FunASRNanoVLLM, GLMASRVLLMEngine
from asr_serve.funasr.streaming import FunASRNanoStreamingVLLM

__all__ = ["AutoModelVLLM", "FunASRNanoStreamingVLLM", "FunASRNanoVLLM", "GLMASRVLLMEngine"]
