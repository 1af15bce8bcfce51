"""Other decoders over the same posteriors, and vosk over the same clips, in a Python of their own.

    python decoding_peers.py JOB.json RESULT.json

A peer decodes one stream after another, as its documentation shows, and vosk a packet of each stream in turn. No more
than numpy and the peer is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

Decode = Callable[[np.ndarray], str]
"""Text of the log-probabilities (frames, symbols) of one stream."""
RATE_HZ = 16_000
KEPT: list[Any] = []
"""Objects that a peer's decoder uses and does not keep."""
PACKET_SAMPLES = 3_840
"""Samples that a stream of vosk gets at once: as many as a chunk of ours."""


def kaldi_decoder(job: dict[str, Any]) -> Decode:
    """The 1-best token passing, which keeps no lattice: kaldi-decoder's lattice decoder has no max_active."""
    import kaldi_decoder
    import kaldifst

    graph = kaldifst.compile(Path(job["graph"]).read_text(), fst_type="const")
    options = kaldi_decoder.FasterDecoderOptions(
        beam=job["graph_beam"], max_active=job["max_active"], min_active=job["min_active"]
    )
    decoder = kaldi_decoder.FasterDecoder(graph, options)
    KEPT.append(graph)

    def decode(logprobs: np.ndarray) -> str:
        decoder.decode(kaldi_decoder.DecodableCtc(logprobs))
        found, best = decoder.get_best_path()
        if not found:
            return ""
        _, _, words, _ = kaldifst.get_linear_symbol_sequence(best)
        return " ".join(job["words"][word - 1] for word in words)

    return decode


def pyctcdecode(job: dict[str, Any]) -> Decode:
    from pyctcdecode import build_ctcdecoder

    decoder = build_ctcdecoder(["", *job["symbols"][1:]])

    def decode(logprobs: np.ndarray) -> str:
        text: str = decoder.decode(
            logprobs, beam_width=job["beam"], beam_prune_logp=-job["max_gap"], token_min_logp=job["min_logprob"]
        )
        return text

    return decode


def flashlight_text(job: dict[str, Any]) -> Decode:
    from flashlight.lib.text.decoder import CriterionType, LexiconFreeDecoder, LexiconFreeDecoderOptions, ZeroLM

    options = LexiconFreeDecoderOptions(
        beam_size=job["beam"],
        beam_size_token=job["tokens"],
        beam_threshold=job["max_gap"],
        lm_weight=0.0,
        sil_score=0.0,
        log_add=True,
        criterion_type=CriterionType.CTC,
    )
    decoder, symbols = LexiconFreeDecoder(options, ZeroLM(), 1, 0, []), job["symbols"]

    def decode(logprobs: np.ndarray) -> str:
        best = decoder.decode(logprobs.ctypes.data, *logprobs.shape)[0].tokens
        changes = [token for token, before in zip(best, [-1, *best[:-1]], strict=True) if token != before]
        return "".join(symbols[token] for token in changes if token > 0)

    return decode


DECODERS: dict[str, tuple[str, Callable[[dict[str, Any]], Decode]]] = {
    "kaldi-decoder": ("kaldi-decoder", kaldi_decoder),
    "pyctcdecode": ("pyctcdecode", pyctcdecode),
    "flashlight-text": ("flashlight-text", flashlight_text),
}
"""Name of a row -> the package, for its version, and what makes its decoder."""


def decode_streams(decode: Decode, streams: Iterable[np.ndarray], limit_s: float) -> dict[str, Any]:
    """Texts of the streams that were decoded before `limit_s` of processor time had passed, and the time."""
    texts: list[str] = []
    began_s = time.process_time()
    for logprobs in streams:
        texts.append(decode(logprobs))
        if time.process_time() - began_s > limit_s:
            break
    return {"cpu_s": time.process_time() - began_s, "texts": texts}


class Vosk:
    """One Model, a KaldiRecognizer for each stream, times of words on as in live use."""

    def __init__(self, folder: str) -> None:
        import vosk

        vosk.SetLogLevel(-1)
        self.make, self.model = vosk.KaldiRecognizer, vosk.Model(folder)

    def transcribe(self, clips: Sequence[np.ndarray]) -> dict[str, Any]:
        """Texts of the clips, which are spoken at once."""
        pcm = [np.clip(np.rint(clip * 32_768), -32_768, 32_767).astype(np.int16) for clip in clips]
        texts = [""] * len(pcm)
        began_s = time.process_time()
        recognizers = [self.make(self.model, RATE_HZ) for _ in pcm]
        for start in range(0, max(map(len, pcm)), PACKET_SAMPLES):
            for number, (recognizer, samples) in enumerate(zip(recognizers, pcm, strict=True)):
                packet = samples[start : start + PACKET_SAMPLES]
                if len(packet) and recognizer.AcceptWaveform(packet.tobytes()):
                    texts[number] += " " + json.loads(recognizer.Result())["text"]
        for number, recognizer in enumerate(recognizers):
            texts[number] += " " + json.loads(recognizer.FinalResult())["text"]
        return {"cpu_s": time.process_time() - began_s, "texts": texts}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """A result for each number of streams, or {"skipped": why} where the peer is not installed."""
    arrays = np.load(job["arrays"])
    streams = [arrays[name] for name in sorted(arrays.files)]
    try:
        if job["peer"] == "vosk":
            recognizer = Vosk(job["vosk_model"])
            recognizer.transcribe(streams[:1])
            levels = []
            for count in job["streams"]:
                at_once = min(count, job["most_vosk_streams"])
                groups = [streams[start : start + at_once] for start in range(0, len(streams), at_once)]
                made = [recognizer.transcribe(group) for group in groups]
                texts = [text for each in made for text in each["texts"]]
                levels.append({"cpu_s": sum(each["cpu_s"] for each in made), "texts": texts})
            return {"levels": levels, "version": version("vosk")}
        package, make = DECODERS[job["peer"]]
        decode = make(job)
    except ImportError as missing:
        return {"skipped": f"not installed: {missing}"}
    decode(streams[0])
    levels = [
        decode_streams(decode, (streams[n % len(streams)] for n in range(max(count, len(streams)))), job["limit_s"])
        for count in job["streams"]
    ]
    return {"levels": levels, "version": version(package)}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
