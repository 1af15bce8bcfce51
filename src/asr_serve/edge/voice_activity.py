"""Voice activity at the edge: vad.wasm run by wasmtime, for many callers in batches.

The module is Silero in WebAssembly (wasm/vad.c), the same file that browsers run. It is sandboxed, imports nothing and
has a fixed memory: a packet allocates nothing in it. Its probabilities equal those of models/auxiliary/silero.py to
1e-4, and are the same to the last bit in every batch and on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asr_serve.config import cache_dir
from asr_serve.cores import usable_cores
from asr_serve.edge.speech_gate import WINDOW_SAMPLES, GateConfig, GateOutput, SpeechGate
from asr_serve.errors import AtCapacity, OptionError, ProgramMissing, UnsupportedAudio, WeightsMissing
from asr_serve.output_file import replaced_file

MODULE = Path(__file__).parent / "wasm" / "vad.wasm"
MAX_INSTANCES = 64
SLOTS = 1_024
"""Callers of an instance."""
RETRY_MS = 1_000


class VoiceActivityModule:
    """vad.wasm, compiled for this CPU. Instances share it.

    Raises  ProgramMissing (without the extra `edge`), WeightsMissing
    """

    def __init__(self, cache: Path | None = None) -> None:
        """`cache`: folder of the compiled module, which has the permissions of one's own programs: what is in it is
        executed. None for the cache of weights."""
        try:
            import wasmtime
        except ImportError as error:
            raise ProgramMissing(
                "wasmtime is not installed", "it runs voice activity at the edge", "pip install 'asr-serve[edge]'"
            ) from error
        try:
            raw = MODULE.read_bytes()
        except FileNotFoundError as error:
            raise WeightsMissing(
                f"{MODULE} is not there", "it is part of the asr-serve package", "reinstall asr-serve"
            ) from error
        self._wasmtime: Any = wasmtime
        self.engine: Any = wasmtime.Engine()
        version = importlib.metadata.version("wasmtime")
        name = f"vad-{hashlib.sha256(raw).hexdigest()[:16]}-wasmtime-{version}.cwasm"
        compiled = (cache_dir() if cache is None else cache) / "edge" / name
        self.module: Any = self._load(raw, compiled)

    def _load(self, raw: bytes, compiled: Path) -> Any:
        # wasmtime refuses what another version or another kind of CPU has compiled; then it is compiled anew.
        with contextlib.suppress(OSError, self._wasmtime.WasmtimeError):
            return self._wasmtime.Module.deserialize(self.engine, compiled.read_bytes())
        module = self._wasmtime.Module(self.engine, raw)
        with contextlib.suppress(OSError):  # a cache that cannot be written costs the next start 40 ms
            compiled.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replaced_file(compiled) as part:
                part.write_bytes(module.serialize())
        return module

    def instantiate(self) -> tuple[Any, dict[str, Any]]:
        """Returns a new store, and the exports of an instance in it by name."""
        store = self._wasmtime.Store(self.engine)
        exports = self._wasmtime.Instance(store, self.module, []).exports(store)
        return store, dict(exports.items())


class VoiceActivityInstance:
    """Instance of vad.wasm with the state of `slots` callers. Any thread may step it, one at a time."""

    def __init__(self, module: VoiceActivityModule) -> None:
        self._store, exports = module.instantiate()
        constant = {
            name: int(exports[name](self._store))
            for name in ("slot_count", "batch_limit", "window_samples", "state_bytes")
        }
        assert (constant["window_samples"], constant["slot_count"]) == (WINDOW_SAMPLES, SLOTS)
        self.slots, self.batch_limit = constant["slot_count"], constant["batch_limit"]
        memory = exports["memory"]
        # The memory never grows, so that it never moves. Its store owns it: both live as long as this object.
        whole = np.ctypeslib.as_array(memory.data_ptr(self._store), (memory.data_len(self._store),))

        def view(pointer: str, count: int, kind: type[np.generic]) -> NDArray[Any]:
            at, size = exports[pointer](self._store), count * np.dtype(kind).itemsize
            found: NDArray[Any] = whole[at : at + size].view(kind)
            return found

        self.input = view("input_pointer", self.batch_limit * WINDOW_SAMPLES, np.int16).reshape(-1, WINDOW_SAMPLES)
        """(batch_limit, 512) int16: the windows of a step."""
        self.slot_numbers = view("slots_pointer", self.batch_limit, np.uint32)
        """(batch_limit,) uint32: the slots of a step, each once."""
        self.probabilities = view("probabilities_pointer", self.batch_limit, np.float32)
        """(batch_limit,) float32: the answers of a step."""
        self.states = view("state_pointer", self.slots * constant["state_bytes"] // 4, np.float32).reshape(
            self.slots, -1
        )
        """(slots, 320) float32: the last 64 samples, h and c of each slot."""
        self._step, self._reset = exports["step"], exports["reset"]
        self.lock = threading.Lock()
        """Held by whoever writes `input` and `slot_numbers`, until the answers are read."""
        self._free = list(range(self.slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """Returns a slot with a fresh state. Call with the lock held, and with a free slot."""
        slot = self._free.pop()
        self._reset(self._store, slot)
        return slot

    def release(self, slot: int) -> None:
        """Gives back a slot. Call with the lock held."""
        self._free.append(slot)

    def step(self, count: int) -> None:
        """Steps the first `count` rows of `input` and `slot_numbers`. Call with the lock held."""
        refused = self._step(self._store, count)
        assert refused == 0, f"vad.wasm refused a step of {count} with {refused}"


class VoiceActivityPool:
    """Instances of vad.wasm, and the callers whose state they hold.

    >>> import numpy as np
    >>> from asr_serve.edge.speech_gate import GatedSilence
    >>> pool = VoiceActivityPool()
    >>> with pool.open() as caller:
    ...     outputs = caller.feed(np.zeros(16_000, np.int16)) + caller.finish()
    >>> sum(output.count for output in outputs if isinstance(output, GatedSilence))  # all but the first 512 ms
    7808
    """

    def __init__(self, instances: int = 1, module: VoiceActivityModule | None = None) -> None:
        """`instances`: how many threads may step at once. Raises OptionError, ProgramMissing, WeightsMissing."""
        if not 1 <= instances <= MAX_INSTANCES:
            raise OptionError(f"{instances} instances of voice activity", f"from 1 to {MAX_INSTANCES}")
        shared = module or VoiceActivityModule()
        self._threads = ThreadPoolExecutor(min(instances, usable_cores()), "voice-activity")
        """Threads that step the instances of a batch, side by side."""
        self._instances = [VoiceActivityInstance(shared) for _ in range(instances)]

    def open(self, config: GateConfig | None = None) -> GatedCaller:
        """Opens a caller. Raises AtCapacity when all slots are taken."""
        for instance in sorted(self._instances, key=lambda instance: -instance.free_slots):
            with instance.lock:
                if instance.free_slots:
                    return GatedCaller(instance, SpeechGate(config))
        slots = sum(instance.slots for instance in self._instances)
        raise AtCapacity(f"{slots} callers have voice activity", "no more in this pool", RETRY_MS)

    @property
    def free_slots(self) -> int:
        return sum(instance.free_slots for instance in self._instances)

    def feed(self, packets: Sequence[tuple[GatedCaller, NDArray[np.int16]]]) -> list[list[GateOutput]]:
        """Feeds a packet of each of several callers in batches, and returns what each of them forwards. A caller may
        be there once. Raises UnsupportedAudio."""
        for _, pcm in packets:
            _check(pcm)
        assert len({id(caller) for caller, _ in packets}) == len(packets), "a caller twice in a batch"
        shares: dict[int, list[tuple[GatedCaller, NDArray[np.int16]]]] = {}
        for caller, pcm in packets:
            shares.setdefault(id(caller.instance), []).append((caller, pcm))
        if len(shares) > 1:
            list(self._threads.map(_feed_share, shares.values()))
        else:
            for share in shares.values():
                _feed_share(share)
        return [caller.gate.take() for caller, _ in packets]


class GatedCaller:
    """Caller with a gate and a slot of an instance. Call from one thread at a time, and close it."""

    def __init__(self, instance: VoiceActivityInstance, gate: SpeechGate) -> None:
        self.instance, self.gate = instance, gate
        self.slot: int | None = instance.acquire()

    def __enter__(self) -> GatedCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def feed(self, pcm: NDArray[np.int16]) -> list[GateOutput]:
        """Feeds samples (n,) at 16 kHz and returns what is to be forwarded. Raises UnsupportedAudio."""
        _check(pcm)
        with self.instance.lock:
            _feed_locked(self.instance, [(self, pcm)])
        return self.gate.take()

    def flush(self) -> list[GateOutput]:
        """Returns everything that is held back, as audio. The caller goes on."""
        self.gate.flush()
        return self.gate.take()

    def finish(self) -> list[GateOutput]:
        """Ends the audio and returns the rest."""
        if (tail := self.gate.tail()) is None:
            self.gate.finish()
        else:
            with self.instance.lock:
                _step_locked(self.instance, [self], [tail])
                self.gate.finish(float(self.instance.probabilities[0]))
        return self.gate.take()

    def close(self) -> None:
        """Gives back the slot. Safe to call twice."""
        if self.slot is not None:
            with self.instance.lock:
                self.instance.release(self.slot)
            self.slot = None


def _check(pcm: NDArray[np.int16]) -> None:
    if pcm.dtype != np.int16 or pcm.ndim != 1:
        raise UnsupportedAudio(
            f"an array of {pcm.dtype} with the shape {pcm.shape} came", "int16 samples (n,) at 16 kHz are allowed"
        )


def _step_locked(
    instance: VoiceActivityInstance, callers: Sequence[GatedCaller], windows: Sequence[NDArray[np.int16]]
) -> None:
    for row, (caller, window) in enumerate(zip(callers, windows, strict=True)):
        assert caller.slot is not None, "a caller that was closed"
        instance.slot_numbers[row] = caller.slot
        instance.input[row] = window
    instance.step(len(callers))


def _feed_share(share: Sequence[tuple[GatedCaller, NDArray[np.int16]]]) -> None:
    """Feeds callers of one instance."""
    instance = share[0][0].instance
    with instance.lock:
        _feed_locked(instance, share)


def _feed_locked(instance: VoiceActivityInstance, packets: Sequence[tuple[GatedCaller, NDArray[np.int16]]]) -> None:
    rest = list(packets)
    while rest:
        appended = [(caller, pcm, caller.gate.append(pcm)) for caller, pcm in rest]
        while True:
            ready = [(caller, window) for caller, _ in rest if (window := caller.gate.window()) is not None]
            if not ready:
                break
            for begin in range(0, len(ready), instance.batch_limit):
                batch = ready[begin : begin + instance.batch_limit]
                _step_locked(instance, [caller for caller, _ in batch], [window for _, window in batch])
                for row, (caller, _) in enumerate(batch):
                    caller.gate.apply_probability(float(instance.probabilities[row]))
        rest = [(caller, pcm[taken:]) for caller, pcm, taken in appended if taken < len(pcm)]
