"""Process of a rank other than 0: loads its part of a decoder, and does what rank 0 commands.

python -m asr_serve.engine.tensor_parallel.worker SOCKET STORE file descriptors, inherited

It ends when rank 0 is gone, which the end of the socket reports at once, or a collective that fails or takes too long.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys

import torch

from asr_serve import devices
from asr_serve.devices.cpu import keep_memory
from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.seq2seq.paged_decoder import PagedDecoder
from asr_serve.engine.tensor_parallel import commands
from asr_serve.engine.tensor_parallel.commands import MessageSocket
from asr_serve.engine.tensor_parallel.communicator import ProcessGroupCommunicator
from asr_serve.errors import AsrServeError
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.packing import PackedBatch

log = logging.getLogger(__name__)


class RankWorker:
    """One rank's part of a decoder, without its pages until they are allocated."""

    def __init__(self, spec: commands.RankSpec) -> None:
        """Loads the weights. Raises AsrServeError."""
        group = TensorParallelGroup(spec.rank, spec.size)
        self.device = devices.make_device(spec.device, spec.dtype, spec.quantize, group)
        model = AsrCheckpoint.find(spec.model, spec.weights).load_model(self.device)
        assert isinstance(model, EncoderDecoderModel), "rank 0 has refused other models"
        self.model = model

    def run(self, line: MessageSocket) -> None:
        """Runs commands until rank 0 is gone. Raises RuntimeError when a collective fails."""
        message = line.receive()
        if message is None:
            return
        first = commands.decode_command(message)
        assert isinstance(first, commands.AllocatePages), "a command before there are pages"
        decoder = PagedDecoder(self.model, self.device, first.pages)
        while (message := line.receive()) is not None:
            self._run(decoder, commands.decode_command(message))

    def _run(self, decoder: PagedDecoder, command: commands.Command) -> None:
        target = self.device.torch_device
        match command:
            case commands.DecodeStep(inputs=inputs):
                decoder.decode(*(each.tensor(target) for each in inputs))
            case commands.StoreFrames(hidden=hidden, pages=pages):
                decoder.store_hidden(hidden.tensor(target), pages)
            case commands.CopyPages(copies=copies):
                decoder.copy_pages(copies)
            case commands.ReadPages(pages=pages):
                decoder.read_pages(pages)
            case commands.WritePages(pages=pages, saved=saved):
                decoder.write_pages(pages, saved.tensor(torch.device("cpu")))
            case commands.AlignAnswers():
                decoder.align(
                    command.tokens.tensor(target),
                    PackedBatch(command.positions, command.total),
                    command.audio_tables.tensor(target),
                    command.audio_lengths.tensor(target),
                    command.frames,
                )


def main(arguments: list[str]) -> int:
    """Runs a rank and returns the exit code."""
    # Rank 0 decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket_fd, store_fd = map(int, arguments)
    line = MessageSocket(socket.socket(fileno=socket_fd))
    message = line.receive()
    if message is None:
        return 0
    spec = commands.decode_spec(message)
    logging.basicConfig(level=logging.INFO, format=f"rank {spec.rank}: %(message)s")
    keep_memory()
    try:
        worker = RankWorker(spec)
    except AsrServeError as failure:
        line.send(commands.encode(commands.RankFailed(str(failure))))
        return 1
    try:
        line.send(commands.encode(commands.RankReady()))
        worker.device.group.connect(ProcessGroupCommunicator(store_fd, worker.device, spec.timeout_s))
        with torch.inference_mode():
            worker.run(line)
    except (OSError, RuntimeError) as failure:  # rank 0 or another rank is gone
        log.error("the engine's group of ranks is lost: %s", failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
