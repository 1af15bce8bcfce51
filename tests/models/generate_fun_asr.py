"""Encoder frames, embeddings, prompts and greedy answers of FunASR's speech LLMs with random weights, for
test_fun_asr.py.

    pip install --no-deps funasr==1.4.16 && pip install torch==2.13.0 transformers==5.23.0 kaldi-native-fbank ...
    python tests/models/generate_fun_asr.py

(the packages that funasr imports, but for torchaudio) writes fixtures/fun_asr.safetensors: audio; for each model its
weights in half precision, with which the reference ran too, and what it computed; and in the metadata config.yaml,
the language model's config.json and tokenizer.json, prompts and answers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from funasr.frontends.wav_frontend import WavFrontend
from funasr.models.fun_asr_nano.model import FunASRNano
from funasr.models.llm_asr.adaptor import Linear
from funasr.models.llm_asr.model import LLMASR3
from funasr.models.sense_voice import model as sense_voice  # registers the encoder
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

assert sense_voice
FIXTURE = Path(__file__).parent / "fixtures" / "fun_asr.safetensors"
SPANS = ((0, 16_000), (3_000, 12_600), (6_000, 10_800))
"""Clips: parts of the audio."""
ANSWER_TOKENS = 24
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"language": "英文"},
    {"language": "中文", "itn": False},
    {"hotwords": ["开放时间", "Ada <b>"], "language": "日文"},
)
LANGUAGE_MODEL = {
    "vocab_size": 272,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1_024,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "tie_word_embeddings": True,
}
ENCODER = {
    "output_size": 16,
    "attention_heads": 2,
    "linear_units": 24,
    "num_blocks": 3,
    "tp_blocks": 2,
    "dropout_rate": 0.1,
    "input_layer": "pe",
    "normalize_before": True,
    "kernel_size": 5,
    "selfattention_layer_type": "sanm",
}
FRONTEND = {
    "fs": 16_000,
    "window": "hamming",
    "n_mels": 40,
    "frame_length": 25,
    "frame_shift": 10,
    "lfr_m": 7,
    "lfr_n": 6,
    "dither": 0.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "nano": {
        "model": "FunASRNano",
        "audio_encoder": "SenseVoiceEncoderSmall",
        "audio_encoder_conf": ENCODER,
        "audio_adaptor": "Transformer",
        "audio_adaptor_conf": {
            "downsample_rate": 1,
            "use_low_frame_rate": True,
            "ffn_dim": 32,
            "llm_dim": 24,
            "encoder_dim": 16,
            "n_layer": 2,
            "attention_heads": 4,
        },
        "llm": "Qwen3-0.6b",
        "llm_conf": {"hub": "hf", "freeze": True, "llm_dtype": "fp32", "init_param_path": "Qwen3-0.6B"},
        "frontend": "WavFrontend",
        "frontend_conf": FRONTEND,
        "dataset_conf": {"do_think": False, "sys_prompt": True},
    },
    "llmasr": {
        "model": "LLMASR3",
        "audio_encoder": "SenseVoiceEncoderSmall",
        "audio_encoder_conf": {**ENCODER, "sanm_shfit": 1, "tp_blocks": 1},
        "audio_adaptor": "Transformer",
        "audio_adaptor_conf": {
            "downsample_rate": 2,
            "ffn_dim": 32,
            "llm_dim": 24,
            "encoder_dim": 16,
            "n_layer": 1,
            "attention_heads": 4,
        },
        "llm": "Qwen2",
        "llm_conf": {"hub": "hf", "freeze": True, "llm_dtype": "fp32", "init_param_path": "Qwen2-tiny"},
        "frontend": "WavFrontend",
        "frontend_conf": {**FRONTEND, "n_mels": 30, "cmvn_file": "am.mvn"},
        "dataset_conf": {"audio_adaptor_downsample_rate": 2},
    },
}
FAMILIES = {"nano": "qwen3", "llmasr": "qwen2"}


def write_tokenizer(folder: Path) -> str:
    """A byte-level tokenizer of the 256 bytes, the special tokens of a chat and those of a thought."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return (folder / "tokenizer.json").read_text("utf-8")


def write_cmvn(path: Path, width: int) -> str:
    chance = np.random.default_rng(7)

    def row(numbers: Any) -> str:
        return " ".join(f"{number:.5g}" for number in numbers)

    text = (
        f"<Nnet>\n<Splice> {width} {width}\n[ 0 ]\n<AddShift> {width} {width}\n"
        f"<LearnRateCoef> 0 [ {row(-8 - chance.random(width))} ]\n<Rescale> {width} {width}\n"
        f"<LearnRateCoef> 0 [ {row(0.1 + 0.1 * chance.random(width))} ]\n</Nnet>\n"
    )
    path.write_text(text)
    return text


def randomize(model: torch.nn.Module) -> None:
    """With large weights: with the usual small ones every token looks the same and nothing would be tested."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                deviation = (
                    0.3 if "embed" in name else (2.5 if ".llm." in f".{name}" else 1.0) * value[0].numel() ** -0.5
                )
                made = torch.randn_like(value) * deviation
            else:
                made = torch.randn_like(value) * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
            value.copy_(made.half().float())


def drop_nones() -> None:
    """LLMASR3 passes options of older versions of transformers that are None: leaves them out."""
    original = AutoModelForCausalLM.from_pretrained

    def from_pretrained(path: str, **options: Any) -> Any:
        return original(path, **{name: value for name, value in options.items() if value is not None})

    AutoModelForCausalLM.from_pretrained = from_pretrained


def main() -> None:
    drop_nones()
    chance = np.random.default_rng(3)
    times = np.arange(SPANS[0][1]) / 16_000
    voice = sum(np.sin(2 * np.pi * f * times * (1 + 0.1 * times)) for f in (140, 410, 900, 2_200))
    audio = (voice * (0.3 + 0.2 * np.sin(7 * times)) + chance.normal(0, 0.1, len(times))) * 6_000
    pcm = torch.from_numpy(audio.round().clip(-32_768, 32_767).astype(np.int16))
    stored: dict[str, torch.Tensor] = {"audio": pcm}
    facts: dict[str, Any] = {"spans": SPANS, "tokenizer": "", "models": {}}
    for name, settings in SETTINGS.items():
        torch.manual_seed(5)
        with tempfile.TemporaryDirectory() as place:
            facts["models"][name] = reference(name, settings, Path(place), pcm.float() / 32_768, stored)
            facts["tokenizer"] = facts["models"][name].pop("tokenizer")
    save_file(stored, FIXTURE, {"facts": json.dumps(facts)})
    print(FIXTURE, FIXTURE.stat().st_size)


def reference(
    name: str, settings: dict[str, Any], place: Path, pcm: torch.Tensor, stored: dict[str, torch.Tensor]
) -> dict[str, Any]:
    folder = place / settings["llm_conf"]["init_param_path"]
    folder.mkdir()
    config = {"model_type": FAMILIES[name], **LANGUAGE_MODEL}
    (folder / "config.json").write_text(json.dumps(config))
    facts = {"settings": settings, "language_model": config, "tokenizer": write_tokenizer(folder), "cmvn": ""}
    used = json.loads(json.dumps(settings))
    used["llm_conf"]["init_param_path"] = str(folder)
    if used["frontend_conf"].get("cmvn_file"):
        used["frontend_conf"]["cmvn_file"] = str(place / "am.mvn")
        width = used["frontend_conf"]["n_mels"] * used["frontend_conf"]["lfr_m"]
        facts["cmvn"] = write_cmvn(place / "am.mvn", width)
    frontend = WavFrontend(**used["frontend_conf"])
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    made.save_pretrained(folder)
    model = (FunASRNano if name == "nano" else LLMASR3)(input_size=frontend.output_size(), **used).eval()
    randomize(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.llm.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    stored.update({f"{name}.weights.{key}": value.half() for key, value in model.state_dict().items()})
    del stored[f"{name}.weights.llm.lm_head.weight"]  # it is the embedding
    facts["clips"] = []
    options = {"device": "cpu", "tokenizer": tokenizer, "frontend": frontend, "dataset_conf": settings["dataset_conf"]}
    for index, (start, end) in enumerate(SPANS):
        clip, requests = pcm[start:end], []
        features, lengths = frontend(clip[None], torch.tensor([len(clip)]))
        with torch.no_grad():
            frames, counts = model.encode(features.clone(), lengths)
            embeddings, _ = model.audio_adaptor(frames, counts)
        if index == 2:  # the shortest: the fixture is small
            stored[f"{name}.features.{index}"] = features[0].clone()
        stored[f"{name}.frames.{index}"], stored[f"{name}.embeddings.{index}"] = frames[0], embeddings[0]
        for request in REQUESTS[: 4 if index == 0 else 2] if name == "nano" else REQUESTS[:1]:
            made = answer(name, model, clip, request, options)
            stored[f"{name}.logits.{index}.{len(requests)}"] = made.pop("logits")
            requests.append(made)
        facts["clips"].append(requests)
    if name == "llmasr":
        linear = Linear(downsample_rate=3, encoder_dim=16, llm_dim=24, ffn_dim=32).eval()
        randomize(linear)
        stored.update({f"linear.weights.{key}": value.half() for key, value in linear.state_dict().items()})
        for index in range(len(SPANS)):
            with torch.no_grad():
                stored[f"linear.embeddings.{index}"] = linear(stored[f"{name}.frames.{index}"][None])[0]
    return facts


def answer(name: str, model: Any, clip: torch.Tensor, request: dict[str, Any], options: dict[str, Any]) -> Any:
    """Prompt and greedy answer, and the logits at the end of the prompt."""
    if name == "nano":
        prompt = model.get_prompt(request.get("hotwords", []), request.get("language"), request.get("itn", True))
        chat = model.generate_chatml(prompt, clip)
        with torch.no_grad():
            embeddings, *_, sources, _ = model.inference_prepare([chat], **options)
        tokens = sources[0].tolist()
    else:
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            soundfile.write(file.name, clip.numpy(), 16_000, "FLOAT")
            user = f"语音转写：<|startofspeech|>!{file.name}<|endofspeech|>"
            chat = [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": user},
                {"role": "assistant", "content": "null"},
            ]
            made = model.data_load_speech(model.data_template(chat), **options)
        with torch.no_grad():
            frames, counts = model.encode(made["speech"], made["speech_lengths"][:, 0])
            audio, counts = model.audio_adaptor(frames, counts)
            tokens = made["source_ids"][0].tolist()
            embeddings = model.llm.get_input_embeddings()(made["source_ids"])
            at = int(made["fbank_beg"][0, 0])
            embeddings[0, at : at + int(counts[0])] = audio[0, : int(counts[0])]
    with torch.no_grad():
        logits = model.llm(inputs_embeds=embeddings).logits[0, -1]
        greedy = model.llm.generate(
            inputs_embeds=embeddings,
            attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        penalized = model.llm.generate(
            inputs_embeds=embeddings,
            attention_mask=torch.ones(embeddings.shape[:2], dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=0,
        )
    return {
        "request": request,
        "logits": logits,
        "prompt": tokens,
        "answer": greedy[0].tolist(),
        "penalized": penalized[0].tolist(),
    }


if __name__ == "__main__":
    main()
