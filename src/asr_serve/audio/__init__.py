"""Audio of any kind to chunks of 16 kHz mono float32.

    open_audio   a path, bytes, a stream or an array, read piece by piece
    read_audio   the same, all at once
    Resampler    one stream at any rate to 16 kHz

`reader` is the entry point for recordings. It uses `byte_source` (bytes), `container_headers` (announced lengths),
`media_reader` (decoding), `pcm` (samples to -1..1 mono) and `resample`. `stream_decoder` is the entry point for
live audio, with `ogg_opus` and `opus_decoder`.
"""

from asr_serve.audio.reader import CHUNK_SAMPLES, AudioLimits, AudioStream, Source, open_audio, read_audio
from asr_serve.audio.resample import Resampler

__all__ = ["CHUNK_SAMPLES", "AudioLimits", "AudioStream", "Resampler", "Source", "open_audio", "read_audio"]
