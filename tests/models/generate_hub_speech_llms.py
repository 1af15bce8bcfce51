"""Embeddings, logits and greedy answers of transformers' GlmAsr, Voxtral and Qwen3ASR with random weights, for
test_hub_speech_llms.py.

    pip install transformers==5.23.0 torch==2.13.0 && python tests/models/generate_hub_speech_llms.py

writes fixtures/hub_speech_llms.safetensors: for each family its weights in half precision, under the names with which
transformers saves them, embeddings of clips, and logits; and in its metadata config.json, prompts, answers, versions.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from hub_speech_llm_folders import FIXTURE, LENGTHS, WINDOW_S, clips, tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    GlmAsrConfig,
    GlmAsrForConditionalGeneration,
    GlmAsrProcessor,
    PreTrainedTokenizerFast,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
    Qwen3ASRProcessor,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)

BINS, ANSWER_TOKENS, LOGITS = 16, 20, 3
VOCABULARY = 288
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": BINS,
}
QWEN_AUDIO: dict[str, Any] = {
    "d_model": 16,
    "encoder_ffn_dim": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "num_mel_bins": BINS,
    "n_window": 50,
    "n_window_infer": 200,
    "output_dim": 24,
    "downsample_hidden_size": 6,
}
POSITIONS = WINDOW_S * 50
GLM_PROMPT = (
    "<|user|>\n<|begin_of_audio|>{audio}<|end_of_audio|><|user|>\nPlease transcribe this audio into text<|assistant|>\n"
)
QWEN_PROMPT = (
    "<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\n<|audio_start|>{audio}<|audio_end|><|im_end|>\n"
    "<|im_start|>assistant\nlanguage {language}<asr_text>"
)
VOXTRAL_PROMPT = "<s>[INST][BEGIN_AUDIO]{audio}[/INST]{language}[TRANSCRIBE]"
"""Source: mistral_common, InstructTokenizer.encode_transcription."""


def randomize(model: Any) -> Any:
    """With large weights: with the usual small ones every token looks the same and nothing would be tested."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                deviation = 0.3 if "embed" in name else 1.5 * value[0].numel() ** -0.5
                value.copy_(torch.randn_like(value) * deviation)
            elif ("norm" in name and name.endswith("weight")) or "ln_post.weight" in name:
                value.add_(0.3 * torch.randn_like(value))
            else:
                value.copy_(0.3 * torch.randn_like(value))
            value.copy_(value.half().float())
    return model.eval().float()


def hub_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        pad_token="<|pad|>",
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )


def token(name: str) -> int:
    return int(tokenizer().token_to_id(name))


class Glm:
    ids: ClassVar[dict[str, Any]] = {"audio_token_id": token("<|pad|>")}
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def __init__(self) -> None:
        text = {**TEXT, "model_type": "llama", "eos_token_id": [token("<|endoftext|>"), token("<|user|>")]}
        audio = {**AUDIO, "model_type": "glmasr_encoder", "max_position_embeddings": POSITIONS}
        config = GlmAsrConfig(audio_config=audio, text_config=text, **self.ids)
        self.model = randomize(GlmAsrForConditionalGeneration(config))
        extractor = WhisperFeatureExtractor(feature_size=BINS, chunk_length=WINDOW_S)
        self.processor = GlmAsrProcessor(extractor, hub_tokenizer())

    def inputs(self, clip: Any, request: dict[str, Any]) -> dict[str, Any]:
        return dict(self.processor(text=GLM_PROMPT.format(audio="<|pad|>"), audio=clip))

    def embeddings(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"]).pooler_output


class Voxtral:
    ids: ClassVar[dict[str, Any]] = {"audio_token_id": token("[AUDIO]")}
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"language": "de"})

    def __init__(self) -> None:
        text = {**TEXT, "model_type": "llama", "eos_token_id": token("</s>"), "rope_theta": 1e8}
        audio = {**AUDIO, "model_type": "voxtral_encoder", "max_source_positions": POSITIONS}
        config = VoxtralConfig(audio_config=audio, text_config=text, tie_word_embeddings=False, **self.ids)
        self.model = randomize(VoxtralForConditionalGeneration(config))
        self.extractor = WhisperFeatureExtractor(feature_size=BINS, chunk_length=WINDOW_S)

    def inputs(self, clip: Any, request: dict[str, Any]) -> dict[str, Any]:
        window = WINDOW_S * 16_000
        options = {"padding": True, "truncation": False, "pad_to_multiple_of": window, "return_tensors": "pt"}
        features = self.extractor(clip, sampling_rate=16_000, **options)["input_features"]
        features = features.reshape(BINS, -1, 2 * POSITIONS).transpose(0, 1)
        language = f"lang:{request['language']}" if request else ""
        audio = "[AUDIO]" * (len(features) * POSITIONS // 4)
        text = VOXTRAL_PROMPT.format(audio=audio, language=language)
        tokens = hub_tokenizer()(text, add_special_tokens=False, return_tensors="pt")
        return {"input_ids": tokens["input_ids"], "input_features": features}

    def embeddings(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.model.get_audio_features(inputs["input_features"]).pooler_output


class Qwen3:
    ids: ClassVar[dict[str, Any]] = {
        "audio_token_id": token("<|audio_pad|>"),
        "eos_token_id": [token("<|endoftext|>"), token("<|im_end|>")],
    }
    requests: ClassVar[tuple[dict[str, Any], ...]] = (
        {"language": "en"},
        {"language": "yue", "hotwords": ["tally-ho", "Zoë"]},
    )
    names: ClassVar[dict[str, str]] = {"en": "English", "yue": "Cantonese"}

    def __init__(self) -> None:
        text = {**TEXT, "model_type": "qwen3", "tie_word_embeddings": True}
        audio = {**QWEN_AUDIO, "model_type": "qwen3_asr_encoder"}
        config = Qwen3ASRConfig(audio_config=audio, text_config=text, **self.ids)
        self.model = randomize(Qwen3ASRForConditionalGeneration(config))
        self.processor = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=BINS), hub_tokenizer())

    def inputs(self, clip: Any, request: dict[str, Any]) -> dict[str, Any]:
        context, language = ", ".join(request.get("hotwords", ())), self.names[request["language"]]
        text = QWEN_PROMPT.format(context=context, language=language, audio="<|audio_pad|>")
        return dict(self.processor(text=text, audio=clip))

    def embeddings(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"]).pooler_output


FAMILIES: dict[str, Any] = {"glm": Glm, "voxtral": Voxtral, "qwen3": Qwen3}
CLIPS = range(len(LENGTHS) - 1)
"""The last clip is too short for transformers."""


def saved(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors as transformers saves them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text()), load_file(Path(folder) / "model.safetensors")


@torch.no_grad()
def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
    for name, family in FAMILIES.items():
        made = family()
        config, weights = saved(made.model)
        tensors |= {f"{name}.weights.{key}": value.half().contiguous() for key, value in weights.items()}
        facts[name] = {"config": config, "clips": []}
        for i in CLIPS:
            known = []
            for j, request in enumerate(made.requests):
                inputs = made.inputs(clips()[i].copy(), request)
                inputs.pop("attention_mask", None)
                embeddings = made.embeddings(inputs)
                prompt = inputs["input_ids"][0]
                assert int((prompt == made.ids["audio_token_id"]).sum()) == len(embeddings)
                answer: list[int] = []
                fed = inputs
                rows = []
                while len(answer) < ANSWER_TOKENS:
                    fed = {**fed, "input_ids": torch.cat([prompt, torch.tensor(answer, dtype=torch.int64)])[None]}
                    rows.append(made.model(**fed, use_cache=False).logits[0, -1])
                    answer.append(int(rows[-1].argmax()))
                tensors[f"{name}.embeddings.{i}"] = embeddings
                tensors[f"{name}.logits.{i}.{j}"] = torch.stack(rows[:LOGITS])
                tokens = [-1 if each == made.ids["audio_token_id"] else each for each in prompt.tolist()]
                known.append({"request": request, "prompt": tokens, "answer": answer})
            facts[name]["clips"].append(known)
        answers = [tuple(each["answer"]) for known in facts[name]["clips"] for each in known]
        assert len(set(answers)) == len(answers), f"{name} says the same of other clips: {answers}"
        print(name, sorted(weights)[:3], sorted(weights)[-3:], answers[0], json.dumps(config)[:3000])
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, FIXTURE, metadata={"facts": json.dumps(facts)}
    )
    print(FIXTURE.stat().st_size, facts["versions"])


if __name__ == "__main__":
    main()
