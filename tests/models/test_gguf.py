"""GGUF files are read as gguf and transformers read them, and damaged ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from asr_serve import devices
from asr_serve.errors import WeightsCorrupt
from asr_serve.kernels import PAGE
from asr_serve.models.causal_lm import CausalConfig, CausalLanguageModel
from asr_serve.models.checkpoints.gguf_causal_lm import convert
from asr_serve.models.checkpoints.gguf_file import FORMATS, GgufFile
from asr_serve.models.packing import PagedKeyValues

FIXTURES = Path(__file__).parent / "fixtures"
ARCHITECTURES = ("llama", "qwen3", "gemma3")
TOKENS = [3, 9, 4, 30, 31, 12, 5]
"""Those of generate_gguf.py."""


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(values: dict[str, tuple[int, bytes]], tensors: list[bytes] = [], data: bytes = b"") -> bytes:  # noqa: B006
    """A file of metadata (type and value), headers of tensors, and their data."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(text(name) + struct.pack("<I", kind) + value for name, (kind, value) in values.items())
    head += b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def header(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [layout.name for layout in FORMATS.values() if layout.name != "F32"])
def test_blocks_are_dequantized_as_by_gguf(name: str) -> None:
    (layout,) = (layout for layout in FORMATS.values() if layout.name == name)
    with safe_open(FIXTURES / "gguf.safetensors", "pt") as file:
        raw, numbers = file.get_tensor(f"{name}.raw"), file.get_tensor(f"{name}.numbers")
    assert torch.equal(torch.from_numpy(layout.dequantize(raw.numpy())).flatten(), numbers.flatten())


def test_values_and_tensors_of_every_kind(tmp_path: Path) -> None:
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 65_000), 3: ("h", -9), 4: ("I", 1 << 31), 5: ("i", -7)}
    numbers |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 60)), 12: ("d", 1e-300)}
    values = {f"n{kind}": (kind, struct.pack(f"<{layout}", value)) for kind, (layout, value) in numbers.items()}
    values["text"] = 8, text("für")
    values["list"] = 9, struct.pack("<IQ2i", 5, 2, -1, 4)
    values["texts"] = 9, struct.pack("<IQ", 8, 2) + text("a") + text("")
    values["nested"] = 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQB", 0, 1, 5)
    values["general.alignment"] = 4, struct.pack("<I", 32)
    tensors = [header("whole", (2, 3), 0), header("short", (4,), 1, 32)]
    data = struct.pack("<6f", *range(6)) + b"\0" * 8 + struct.pack("<4e", 1, 2, 3, -4)
    path = tmp_path / "all.gguf"
    path.write_bytes(gguf(values, tensors, data))
    file = GgufFile(path)
    for kind, (_, value) in numbers.items():
        assert file.metadata[f"n{kind}"] == value
    assert file.value("text", str) == "für"
    assert (file.metadata["list"], file.metadata["texts"], file.metadata["nested"]) == ([-1, 4], ["a", ""], [[5]])
    assert file.tensor("whole").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert file.tensor("short").tolist() == [1, 2, 3, -4]
    for name, kind in (("text", int), ("n7", int), ("absent", str)):
        with pytest.raises(WeightsCorrupt, match=name):
            file.value(name, kind)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "GGML"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "ends within its metadata"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "ends within its metadata"),
        (gguf({"a": (13, b"")}), "a value of type 13"),
        (gguf({"a": (8, struct.pack("<Q", 1 << 60))}), "ends within its metadata"),
        (gguf({"a": (9, struct.pack("<IQ", 6, 1 << 60))}), "ends within its metadata"),
        (gguf({"a": (9, struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQ", 0, 0))}), "a value of type 9"),
        (gguf({"general.alignment": (4, struct.pack("<I", 0))}), "general.alignment"),
        (gguf({"general.alignment": (8, text("x"))}), "general.alignment"),
        (gguf({}, [header("w", (1,) * 5, 0)]), "5 dimensions"),
        (gguf({}, [header("w", (), 0)]), "0 dimensions"),
        (gguf({}, [header("w", (32,), 10)], bytes(99)), "type 10"),
        (gguf({}, [header("w", (33,), 2)], bytes(99)), "rows of 33"),
        (gguf({}, [header("w", (8,), 0)], bytes(31)), "ends within w"),
        (gguf({}, [header("w", (8,), 0, 1 << 62)], bytes(32)), "ends within w"),
        (gguf({}, [header("w", (1 << 40, 1 << 40), 0)], bytes(32)), "ends within w"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsCorrupt, match=named):
        GgufFile(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damage_raises_anything_else(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = bytearray((FIXTURES / "gguf_llama.gguf").read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, 9_000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        file = GgufFile(path)
    except WeightsCorrupt:
        return
    for name in file.tensors:
        assert file.tensor(name).dtype == torch.float32


# --- language models ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHITECTURES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    convert(FIXTURES / f"gguf_{request.param}.gguf", folder)
    return request.param, folder


def test_a_converted_model_computes_what_transformers_does(converted: tuple[str, Path]) -> None:
    architecture, folder = converted
    with safe_open(FIXTURES / "gguf.safetensors", "pt") as file:
        expected = file.get_tensor(f"{architecture}.logits")
    config = CausalConfig.of(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    model = CausalLanguageModel(config, weights, devices.make_device("cpu", "fp32"))
    pool = torch.zeros(2, len(model.layers), 2, config.num_key_value_heads, config.head_dim * PAGE)
    count = len(TOKENS)
    own = PagedKeyValues(pool, torch.ones(count, 1, dtype=torch.int32), torch.arange(count) + 1)
    with torch.inference_mode():
        logits, _ = model.decode(torch.tensor(TOKENS), own)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


def test_a_converted_tokenizer_cuts_as_transformers_does(converted: tuple[str, Path]) -> None:
    architecture, folder = converted
    with safe_open(FIXTURES / "gguf.safetensors", "pt") as file:
        expected = json.loads(file.metadata()["facts"])[architecture]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert {line: tokenizer.encode(line, add_special_tokens=False).ids for line in expected} == expected
    for line, tokens in expected.items():
        spoken = line.replace("<end>", "").removeprefix(" ") if architecture == "llama" else line.replace("<end>", "")
        assert tokenizer.decode(tokens) == spoken, "special tokens are no text"


def test_transformers_loads_a_converted_folder(converted: tuple[str, Path]) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle: pip install 'asr-serve[dev]'")
    architecture, folder = converted
    with safe_open(FIXTURES / "gguf.safetensors", "pt") as file:
        expected = file.get_tensor(f"{architecture}.logits")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.eos_token_id == model.config.eos_token_id is not None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"llama", b"mamba", "mamba"),
        (b"blk.0.attn_q.weight", b"blk.0.attn_x.weight", "attn_x"),
        (b"token_embd.weight", b"token_embe.weight", "token_embe"),
        (b"llama.block_count", b"llama.block_xount", "block_count"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.modex", "tokenizer.ggml.model"),
        (b"tokenizer.ggml.scores", b"tokenizer.ggml.scorex", "tokenizer.ggml.scores"),
    ],
)
def test_models_that_are_not_read_are_refused(tmp_path: Path, old: bytes, new: bytes, named: str) -> None:
    data = (FIXTURES / "gguf_llama.gguf").read_bytes()
    assert old in data
    path = tmp_path / "other.gguf"
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(WeightsCorrupt, match=named):
        convert(path, tmp_path)
    assert not (tmp_path / "config.json").exists(), "a folder that looks whole"
