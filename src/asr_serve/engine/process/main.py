"""Engine process: the loop on its main thread, the server's messages on another.

python -m asr_serve.engine.process.main PIPE BELL RING file descriptors, inherited

It ends on request, and when the server is gone, which the end of the pipe reports at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

import msgspec

from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import keep_memory
from asr_serve.engine.builder import (
    AsrCheckpoint,
    build_loop,
    card_of_loaded,
    find_checkpoint,
    measure_new_live_callers,
)
from asr_serve.engine.cache.digest import use_key
from asr_serve.engine.diarization_runner import models_available
from asr_serve.engine.loop import Loop
from asr_serve.engine.process import messages
from asr_serve.engine.process.server_link import SERVER_BITS, EngineFacts, ServerLink
from asr_serve.engine.process.server_listener import ServerListener
from asr_serve.engine.remote.encode_worker import EncodeWorker
from asr_serve.engine.remote.roles import quantize_mode
from asr_serve.engine.stats import EngineStats
from asr_serve.engine.turn_runner import TurnRunner, load_turn_model
from asr_serve.errors import AsrServeError
from asr_serve.garbage_collection import exclude_loaded_objects
from asr_serve.metrics import EngineMetrics
from asr_serve.models.checkpoints.store import multilingual_model
from asr_serve.models.registry import AsrCard, engine_cards
from asr_serve.text.tokenizers import tokenizer_checksum
from asr_serve.transfer.ring import PcmReader

log = logging.getLogger(__name__)


class EngineProcessServer:
    """Runs the loop for the server that started this process, and for others that connect."""

    def __init__(self, pipe: Connection, ring: PcmReader) -> None:
        self._owner = ServerLink(pipe, ring, 0, "to the server")
        self._listener: ServerListener | None = None

    def run(self, spec: messages.EngineSpec) -> int:
        """Runs the engine and returns the exit code. All messages are sent before it returns."""
        try:
            return self._run(spec)
        finally:
            self._finish()
            self._owner.join()
            if self._listener is not None:
                self._listener.close()

    def _finish(self) -> None:
        """Sends nothing after what is queued: servers submit the rest to other engines."""
        self._owner.finish()
        if self._listener is not None:
            self._listener.finish()

    def _run(self, spec: messages.EngineSpec) -> int:
        started = time.perf_counter()
        try:
            checkpoint = find_checkpoint(spec.model, spec.weights, spec.config)
            fingerprint = checkpoint.fingerprint()
            if spec.digest_key:
                use_key(spec.digest_key)
            turns = load_turn_model(spec.turn_model if isinstance(checkpoint.card, AsrCard) else "none")
            keep_memory()
            config = _with_room(spec)
            parts = checkpoint.build(spec.device, spec.dtype, quantize_mode(config), config.tensor_parallel_size)
            new_live_callers = measure_new_live_callers(parts, checkpoint.card, config)
            meeting = checkpoint.peer_identity(spec.config, spec.listen, spec.peer_keys)
            metrics = EngineMetrics(checkpoint.card.name)
            loop = build_loop(
                parts,
                checkpoint.card,
                config,
                on_done=lambda _: None,
                # Rejections of the ending loop are not sent: the server resubmits the requests to the next engine.
                on_stop=self._finish,
                on_start=self._requests_started,
                stats=EngineStats(metrics),
                keep_states=True,
                meeting=meeting,
            )
            turn_runner = TurnRunner(turns, parts.device, loop.stats) if turns else None
            ranks = parts.ranks
            collectives_s = None if ranks is None else lambda: ranks.collectives_s
            facts = EngineFacts(loop, turn_runner, metrics, collectives_s)
            if spec.servers is not None:
                self._listener = ServerListener(spec.servers)
        except AsrServeError as failure:
            self._owner.send(messages.EngineLoadFailed(messages.ErrorMessage.from_error(failure)))
            return 1
        whisper = multilingual_model()
        ready = messages.EngineReady(
            card_of_loaded(checkpoint.card, parts),
            turns.card if turns else None,
            tuple(engine_cards().values()),
            str(checkpoint.tokenizer_folder if isinstance(checkpoint, AsrCheckpoint) else checkpoint.folder),
            fingerprint,
            tokenizer_checksum(checkpoint.tokenizer_folder) if isinstance(checkpoint, AsrCheckpoint) else 0,
            parts.device.describe(),
            round(time.perf_counter() - started, 3),
            models_available(),
            self._address(loop, spec),
            multilingual="" if whisper is None else whisper.name,
            quantization=parts.device.quantize,
            new_live_callers=new_live_callers,
        )
        self._owner.send(ready)
        threading.Thread(target=self._owner.read_messages, args=(facts,), name="messages", daemon=True).start()
        if self._listener is not None:
            loop.executor.watch_audio(self._listener.audio_changed)
            self._listener.start(facts, ready)
        exclude_loaded_objects()
        loop.run()
        if turn_runner is not None:
            turn_runner.close()
        return 0

    def _address(
        self, loop: Loop, spec: messages.EngineSpec
    ) -> messages.EngineAddress | messages.EncoderAddress | None:
        """Address at which others reach this process."""
        if isinstance(loop.executor, EncodeWorker):
            return messages.EncoderAddress(spec.listen[0], loop.executor.port)
        return self._listener.address if self._listener else None

    def _requests_started(self, ids: list[int]) -> None:
        """Tells each server which of its requests have begun."""
        by_server: dict[int, list[int]] = {}
        for request_id in ids:
            by_server.setdefault(request_id >> SERVER_BITS, []).append(request_id & (1 << SERVER_BITS) - 1)
        for number, own in by_server.items():
            link: ServerLink | None = self._owner
            if number:
                assert self._listener is not None
                link = self._listener.link(number)
            if link is not None:
                link.requests_started(tuple(own))

    def log(self, record: logging.LogRecord, text: str) -> None:
        self._owner.send(messages.EngineLog(record.name, record.levelno, text))


def _with_room(spec: messages.EngineSpec) -> EngineConfig:
    """Settings of the engine, with room for the sessions that other servers have beside those of its own."""
    others = 0 if spec.servers is None else spec.servers.max_sessions or 0
    return msgspec.structs.replace(spec.config, max_sessions=spec.config.max_sessions + others)


class _ForwardingLogHandler(logging.Handler):
    def __init__(self, host: EngineProcessServer) -> None:
        super().__init__()
        self._server = host

    def emit(self, record: logging.LogRecord) -> None:
        self._server.log(record, self.format(record))


def main(arguments: list[str]) -> int:
    # Both signals go to the whole process group; the server decides when its engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe_fd, bell_fd, ring_fd = map(int, arguments)
    pipe = Connection(pipe_fd)
    server = EngineProcessServer(pipe, PcmReader(ring_fd, socket.socket(fileno=bell_fd)))
    logging.basicConfig(level=logging.INFO, handlers=[_ForwardingLogHandler(server)], format="%(message)s")
    try:
        spec = messages.decode_spec(pipe.recv_bytes())
    except (EOFError, OSError):
        return 0  # the server is gone
    return server.run(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
