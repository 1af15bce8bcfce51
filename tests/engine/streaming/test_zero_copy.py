"""Posteriors and states reach the native searches and kernels where they lie: same addresses, no copy (B4)."""

from __future__ import annotations

import pytest
import torch
from tiny_streaming import model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asr_serve import kernels as native
from asr_serve.decoding.ctc import CtcPrefixBeam
from asr_serve.engine.state_cache import StateCacheManager
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk


class Copies(TorchDispatchMode):
    """Operations that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if any(word in name for word in ("copy", "clone", "contiguous", "index", "gather", "cat")):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_posteriors_and_search_state_reach_the_beam_where_they_lie():
    network = model("u2pp 2")
    search = CtcPrefixBeam(network, 4)
    states = StateCacheManager(search.state_specs(), 3)
    slots = [states.allocate(), states.allocate()]
    rows = states.prepare_rows(slots)
    posteriors: list[Tensor] = []
    ctc, step, address = network.ctc_logprobs, search._native.step, search._native.address
    seen: list[list[int]] = []

    class Watched:
        ctc_logprobs = staticmethod(lambda hidden: posteriors.append(ctc(hidden)) or posteriors[-1])
        blank_id = network.blank_id

    class Native:
        @staticmethod
        def step(*arguments):
            seen.append([address(arguments[0]), *(each.data_ptr() for each in arguments[1:9])])
            assert copies.found == [], "before the search"
            found = step(*arguments)
            assert copies.found == [], "in the search"
            return found

    search.model, search._native = Watched, Native
    counts = torch.tensor([4, 3])
    chunk = StreamingChunk(
        torch.zeros(2, 1), rows, torch.zeros(2, dtype=torch.int64), counts, torch.tensor([UNBOUNDED_SAMPLES] * 2)
    )
    with torch.inference_mode():
        hidden = torch.randn(2, 4, 16)
        posteriors_alone = ctc(hidden)
        with Copies() as copies:
            search.step(hidden, chunk, states.tensors)
    assert seen[0][0] == posteriors[0].data_ptr() != posteriors_alone.data_ptr()
    assert seen[0][1:4] == [rows.data_ptr(), chunk.start_frames.data_ptr(), counts.data_ptr()]
    assert seen[0][4:] == [tensor.data_ptr() for tensor in states.tensors.values()]


def test_the_counter_counts():
    with Copies() as copies:
        torch.zeros(2).clone()
    assert copies.found


@pytest.mark.skipif(native.core() is None, reason="the native core was not built")
def test_attention_windows_reach_the_kernels_where_they_lie(monkeypatch: pytest.MonkeyPatch):
    """Every step hands the same memory to the kernels, and it is the state cache's."""
    network = model("fastconformer 8,1")
    kernels = network.device.kernels
    search = CtcPrefixBeam(network, 4)
    wrapper = ChunkedModelRunner(network, search, network.device, slots=3, chunk=2, use_chunked_inference=True)
    known = {tensor.data_ptr() for tensor in wrapper.states.tensors.values()}
    given: list[set[int]] = []

    class Watched:
        def __getattr__(self, name: str):
            return getattr(kernels, name)

        @staticmethod
        def window_attention(q, k, v, keys, values, *rest):
            given.append({kernels.address(keys), kernels.address(values)})
            kernels.window_attention(q, k, v, keys, values, *rest)

        @staticmethod
        def causal_conv(x, weight, bias, tail, *rest):
            given.append({kernels.address(tail)})
            kernels.causal_conv(x, weight, bias, tail, *rest)

    monkeypatch.setattr(network.device, "kernels", Watched())
    sessions = [wrapper.open_session() for _ in range(2)]
    for session in sessions:
        wrapper.append_audio(session, torch.randn(12_000).numpy(), 0.0)
    while running := wrapper.schedule(1e9):
        wrapper.step(running, 0.0)
    assert len(given) > 8
    assert set().union(*given) <= known
    assert {tensor.data_ptr() for tensor in wrapper.states.tensors.values()} == known


class Shapes(TorchDispatchMode):
    """Shapes of what operations hand out in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor) and not each.is_mkldnn}
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.found.append(tuple(each.shape))
        return out


@pytest.mark.skipif(native.core() is None, reason="the native core was not built")
def test_a_step_allocates_no_window_of_attention_and_nothing_that_stays():
    network = model("fastconformer 8,1")
    wrapper = ChunkedModelRunner(
        network, CtcPrefixBeam(network, 4), network.device, slots=4, chunk=2, use_chunked_inference=True
    )
    rings = {spec.shape for name, spec in wrapper.states.specs.items() if ".keys." in name or ".values." in name}
    assert rings == {(4, 8 + 32, 8)}
    sessions = [wrapper.open_session() for _ in range(3)]
    for session in sessions:
        wrapper.append_audio(session, torch.randn(30_000).numpy(), 0.0)
    wrapper.step(wrapper.schedule(1e9), 0.0)
    addresses = {name: tensor.data_ptr() for name, tensor in wrapper.states.tensors.items()}
    with Shapes() as shapes:
        for _ in range(3):
            assert len(wrapper.step(wrapper.schedule(1e9), 0.0)) == 3
    assert len(shapes.found) > 100, "it counts"
    assert not [shape for shape in shapes.found if shape[-3:] in rings]
    assert {name: tensor.data_ptr() for name, tensor in wrapper.states.tensors.items()} == addresses
