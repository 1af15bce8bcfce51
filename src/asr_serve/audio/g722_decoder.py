"""G.722 to samples, by PyAV."""

from __future__ import annotations

import av
import av.error
import numpy as np

from asr_serve.audio.pcm import to_mono
from asr_serve.errors import CorruptAudio

G722_RATE_HZ = 16_000
SAMPLES_PER_BYTE = 2


class G722Decoder:
    """Decoder of one stream at 64 kbit/s, cut anywhere between bytes.

    Out     (2 n,) float32, mono, 16 kHz, for n bytes
    Raises  CorruptAudio for no bytes; any other bytes are valid
    Source  ITU-T G.722; ffmpeg's decoder, as for files
    """

    def __init__(self) -> None:
        self._codec = av.CodecContext.create("g722", "r")
        self._codec.layout = "mono"

    def decode(self, data: bytes) -> np.ndarray:
        if not data:
            raise CorruptAudio("a G.722 packet without a byte came", "one byte at least", "send each packet whole")
        try:
            frames = [to_mono(frame.to_ndarray(), CorruptAudio) for frame in self._codec.decode(av.Packet(data))]
        except av.error.FFmpegError as error:
            raise CorruptAudio(f"a G.722 packet cannot be decoded: {error}", "ITU-T G.722 at 64 kbit/s") from error
        return np.concatenate(frames)
