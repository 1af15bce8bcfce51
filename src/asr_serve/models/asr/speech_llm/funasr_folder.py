"""Model folders of FunASR's speech LLMs, and their conversion into checkpoint folders.

A folder of FunASR holds `config.yaml`, `model.pt` with all tensors, the folder of the language model with its
config.json and tokenizer, and for a CTC head `multilingual.tiktoken`, its vocabulary. A converted one holds
config.json, model.safetensors (encoder, adaptor, CTC head), tokenizer.json, ctc_tokenizer.json, and in
`language_model` a checkpoint of the language model alone, as transformers and vLLM read it.

Source: the layout that funasr 1.4.16's AutoModel and AutoModelVLLM read.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm import byte_level
from asr_serve.models.asr.speech_llm.whisper_windows import WhisperSizes
from asr_serve.models.asr.whisper import checkpoint_formats
from asr_serve.models.checkpoints.hugging_face import UNREADABLE

log = logging.getLogger(__name__)

SETTINGS, PICKLE = "config.yaml", "model.pt"
CTC_VOCABULARY, CTC_TOKENIZER = "multilingual.tiktoken", "ctc_tokenizer.json"
"""Vocabulary of the CTC head in a folder of FunASR, and in a converted one."""
CTC_TENSORS = ("ctc.ctc_lo.weight", "ctc.ctc_lo.bias", "ctc_decoder.linear1.weight", "ctc_decoder.linear2.weight")
"""Tensors without which there is no CTC head."""
CTC_OUTPUTS = 60_515
"""Outputs of the CTC head where config.yaml says nothing of them."""
LANGUAGE_MODEL = "language_model"
"""Folder of the language model in a converted folder."""
KINDS = {
    "FunASRNano": "fun_asr_nano",
    "LLMASR": "llm_asr",
    "LLMASR2": "llm_asr",
    "LLMASR3": "llm_asr",
    "LLMASR4": "llm_asr",
}
"""Values of `model` in config.yaml -> the model file that computes them."""
WHISPER = "Whisper"
"""Audio encoder of a converted folder for any encoder of Whisper."""
ENCODERS = {"SenseVoiceEncoderSmall": "WavFrontend", WHISPER: "WhisperFrontend"}
"""Audio encoders that can be computed -> the frontend that makes their features."""
ADAPTORS = ("Linear", "Transformer")
COPIED = (".json", ".txt", ".jinja", ".model")
"""Suffixes of the files that are copied with the language model: its config, and its tokenizer in any form."""


def holds(*models: str) -> Callable[[Path], bool]:
    """Function that returns whether a path is a folder of FunASR whose `model` is one of these."""
    return lambda path: (path / SETTINGS).is_file() and _model_of(path) in models


def _model_of(folder: Path) -> str:
    """The `model` of config.yaml; empty for a file that is none of FunASR's."""
    try:
        return str(read_settings(folder).get("model", ""))
    except WeightsCorrupt:
        return ""


def read_settings(folder: Path) -> dict[str, Any]:
    """Settings of config.yaml. Raises WeightsCorrupt."""
    path = folder / SETTINGS
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as failure:
        raise WeightsCorrupt(
            f"{path} cannot be read: {failure}", "settings by name, as FunASR writes them"
        ) from failure


def is_complete(folder: Path) -> bool:
    """Returns whether the files are there that config.yaml names, and the vocabulary of a CTC head."""
    settings = read_settings(folder)
    named = (settings.get("frontend_conf") or {}).get("cmvn_file")
    files = [PICKLE, *([CTC_VOCABULARY] if settings.get("ctc_decoder") else [])]
    files += [Path(str(named)).name] if named else []
    try:
        _language_model_folder(folder, settings)
    except WeightsCorrupt:
        return False
    return all((folder / name).is_file() for name in files)


def convert(source: Path, target: Path) -> None:
    """Converts a folder of FunASR. Raises WeightsCorrupt."""
    settings = read_settings(source)
    config = _config(settings)
    language_folder = _language_model_folder(source, settings)
    tensors = read_tensors(source / PICKLE)
    language_tensors = _language_tensors(tensors, settings)
    if config["audio_encoder"] == WHISPER:
        _read_whisper(settings, config, tensors)
    audio = {
        name: tensor for name, tensor in tensors.items() if name.startswith(("audio_encoder.", "audio_adaptor."))
    } | _cmvn(source, settings)
    if (ctc := _ctc_head(source, settings, tensors, config["audio_adaptor_conf"]["encoder_dim"])) is not None:
        config["ctc"], vocabulary, ctc_tensors = ctc
        audio |= ctc_tensors
        (target / CTC_TOKENIZER).write_text(vocabulary, "utf-8")
    if not audio:
        raise WeightsCorrupt(f"{source / PICKLE} has no tensors of an encoder", "audio_encoder. and audio_adaptor.")
    into = target / LANGUAGE_MODEL
    into.mkdir(parents=True)
    for path in sorted(language_folder.iterdir()):
        if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, into / path.name)
    width = json.loads((into / "config.json").read_text("utf-8")).get("hidden_size")
    config["audio_adaptor_conf"]["llm_dim"] = width or config["audio_adaptor_conf"].get("llm_dim")
    save_file(_separate(language_tensors), into / "model.safetensors", {"format": "pt"})
    shutil.copyfile(into / "tokenizer.json", target / "tokenizer.json")
    save_file(_separate(audio), target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), "utf-8")


def _config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a converted folder. Raises WeightsCorrupt for what is not computed."""
    model = settings.get("model")
    encoder, adaptor = settings.get("audio_encoder"), settings.get("audio_adaptor")
    if WHISPER.casefold() in str(encoder).casefold():  # `iic/Whisper-large-v3` and the like
        encoder = WHISPER
    for name, value, allowed in (
        ("model", model, tuple(KINDS)),
        ("audio_encoder", encoder, tuple(ENCODERS)),
        ("audio_adaptor", adaptor, ADAPTORS),
    ):
        if value not in allowed:
            raise WeightsCorrupt(f"{SETTINGS} says {name}: {value}", f"one of {', '.join(allowed)}")
    if (frontend := settings.get("frontend")) != ENCODERS[str(encoder)]:
        raise WeightsCorrupt(f"{SETTINGS} says frontend: {frontend}", f"{ENCODERS[str(encoder)]}, for {encoder}")
    sections = {
        name: dict(settings.get(name) or {}) for name in ("audio_encoder_conf", "frontend_conf", "audio_adaptor_conf")
    }
    hub = sections["audio_encoder_conf"].get("hub")
    if hub and encoder != WHISPER:  # whose sizes are those of its tensors
        raise WeightsCorrupt(f"{SETTINGS} says audio_encoder_conf.hub: {hub}", "an encoder whose sizes stand there")
    sections["audio_adaptor_conf"]["encoder_dim"] = sections["audio_encoder_conf"].get("output_size", 256)
    chat = settings.get("dataset_conf") or {}
    return {
        "model_type": KINDS[str(model)],
        "audio_encoder": encoder,
        "audio_adaptor": adaptor,
        **sections,
        "use_low_frame_rate": bool(sections["audio_adaptor_conf"].get("use_low_frame_rate")),
        "do_think": bool(chat.get("do_think", True)),
        "sys_prompt": bool(chat.get("sys_prompt", True)),
    }


def _read_whisper(settings: Mapping[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Gives the tensors of Whisper's encoder, which may have OpenAI's names, those of Hugging Face, and the config the
    sizes that they have. Raises WeightsCorrupt."""
    for name in [name for name in tensors if name.startswith("audio_encoder.")]:
        tail = name.removeprefix("audio_encoder.").removeprefix("encoders.").removeprefix("encoder.")
        tensor, renamed = tensors.pop(name), checkpoint_formats.rename(f"encoder.{tail}")
        if renamed is not None:
            tensors[renamed.replace("model.encoder.", "audio_encoder.", 1)] = tensor
    frontend = settings.get("frontend_conf") or {}
    if not frontend.get("do_pad_trim", True):
        raise WeightsCorrupt(f"{SETTINGS} says frontend_conf.do_pad_trim: false", "true: whole windows are encoded")
    heads = (settings.get("audio_encoder_conf") or {}).get("n_audio_head")
    if heads is not None and not isinstance(heads, int):
        raise WeightsCorrupt(f"{SETTINGS} says audio_encoder_conf.n_audio_head: {heads}", "a whole number")
    sizes = WhisperSizes.of(whisper_tensors(tensors), heads)
    bins = LARGE_BINS if frontend.get("whisper_model") in LARGE_MODELS else frontend.get("n_mels", 80)
    if bins != sizes.mel_bins:
        raise WeightsCorrupt(f"the frontend makes {bins} mel bins", f"{sizes.mel_bins}, which the encoder reads")
    config["whisper"] = msgspec.to_builtins(sizes)
    config["audio_encoder_conf"], config["frontend_conf"] = {}, {}
    config["audio_adaptor_conf"]["encoder_dim"] = sizes.width


def whisper_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of Whisper's encoder under its own names, `encoder.conv1.weight` and so on."""
    found = {name.removeprefix("audio_"): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in found.items() if name.startswith("encoder.")}


LARGE_MODELS, LARGE_BINS = ("large-v3", "large"), 128
"""Values of `whisper_model` whose frontend makes so many mel bins whatever `n_mels` says."""


def _ctc_head(
    source: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], encoder_dim: int
) -> tuple[dict[str, Any], str, dict[str, Tensor]] | None:
    """Config of the CTC head, the text of its ctc_tokenizer.json, and its tensors. None: there is none, or it is not
    whole: without it the model recognizes the same, and only has no times of words. Raises WeightsCorrupt for what is
    not computed."""
    decoder = settings.get("ctc_decoder")
    if not decoder:
        return None
    if decoder not in ADAPTORS:
        raise WeightsCorrupt(f"{SETTINGS} says ctc_decoder: {decoder}", f"one of {', '.join(ADAPTORS)}")
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(("ctc_decoder.", "ctc.ctc_lo."))}
    missing = [name for name in CTC_TENSORS if name not in found]
    if not (source / CTC_VOCABULARY).is_file():
        missing.append(CTC_VOCABULARY)
    if missing:
        log.warning("%s has no %s: the model will have no times of words", source, ", ".join(missing))
        return None
    outputs = settings.get("ctc_vocab_size") or CTC_OUTPUTS
    blank = (settings.get("ctc_conf") or {}).get("blank_id")
    for name, number in (("ctc_vocab_size", outputs), ("ctc_conf.blank_id", 0 if blank is None else blank)):
        if not isinstance(number, int):
            raise WeightsCorrupt(f"{SETTINGS} says {name}: {number}", "a whole number")
    config = {
        "decoder": decoder,
        "decoder_conf": {**(settings.get("ctc_decoder_conf") or {}), "encoder_dim": encoder_dim},
        "vocab_size": outputs,
        "blank_id": outputs - 1 if blank is None else blank,
    }
    pieces = byte_level.read_tiktoken(source / CTC_VOCABULARY)
    return config, byte_level.tokenizer_json(pieces, byte_level.GPT2_PATTERN), found


def _language_model_folder(source: Path, settings: Mapping[str, Any]) -> Path:
    """The folder with the language model's config.json and tokenizer.json. Raises WeightsCorrupt."""
    named = Path(str((settings.get("llm_conf") or {}).get("init_param_path") or "")).name
    candidates = [source / named] if named else sorted(path for path in source.iterdir() if path.is_dir())
    for folder in candidates:
        if all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
            return folder
    raise WeightsCorrupt(
        f"{source / named if named else source} has no config.json and tokenizer.json of the language model",
        "the folder that llm_conf.init_param_path names, beside config.yaml",
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a model.pt, whatever it is wrapped in. Nothing but tensors is unpickled. Raises WeightsCorrupt."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as failure:
        raise WeightsCorrupt(f"{path} cannot be read: {failure}", "tensors by name, as FunASR writes them") from failure
    while isinstance(state, dict):
        inner = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
        if inner is None:
            break
        state = inner
    if not isinstance(state, dict):
        raise WeightsCorrupt(f"{path} holds a {type(state).__name__}", "tensors by name")
    return {str(name).removeprefix("module."): each for name, each in state.items() if isinstance(each, Tensor)}


WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint of training keeps the tensors."""


def _language_tensors(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of the language model by transformers' names, low-rank adapters added in. Raises WeightsCorrupt."""
    found = {name.removeprefix("llm."): tensor for name, tensor in tensors.items() if name.startswith("llm.")}
    if "model.embed_tokens.weight" not in found:
        raise WeightsCorrupt(f"{PICKLE} has no llm.model.embed_tokens.weight", "the tensors of a language model")
    lora = (settings.get("llm_conf") or {}).get("lora_conf") or {}
    for name in [name for name in found if name.endswith(".lora_A")]:
        low, high = found.pop(name).float(), found.pop(f"{name[:-1]}B").float()
        weight = found[f"{name.removesuffix('.lora_A')}.weight"]
        scale = float(lora.get("lora_alpha", 32)) / len(low)
        found[f"{name.removesuffix('.lora_A')}.weight"] = (weight.float() + scale * (high @ low)).to(weight.dtype)
    head = found.get("lm_head.weight")
    if head is not None and torch.equal(head, found["model.embed_tokens.weight"]):
        del found["lm_head.weight"]  # readers take the embedding instead
    return found


def _cmvn(source: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Shift and scale of the features: the am.mvn that frontend_conf.cmvn_file names, in the form of
    Kaldi's nnet1; empty where it names none. Raises WeightsCorrupt."""
    named = (settings.get("frontend_conf") or {}).get("cmvn_file")
    if not named:
        return {}
    path = source / Path(str(named)).name
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise WeightsCorrupt(
            f"{path} cannot be read: {failure}", "the file that frontend_conf.cmvn_file names"
        ) from None
    made = {}
    for part, name in (("<AddShift>", "shift"), ("<Rescale>", "scale")):
        match = re.search(rf"{part}[^\[]*\[([^\]]*)\]", text)
        try:
            numbers = [float(word) for word in match[1].split()] if match else []
        except ValueError:
            numbers = []
        if not numbers:
            raise WeightsCorrupt(f"{path} has no numbers after {part}", "an am.mvn with <AddShift> and <Rescale>")
        made[f"frontend.cmvn.{name}"] = torch.tensor(numbers)
    return made


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without shared memory, which safetensors does not write."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
