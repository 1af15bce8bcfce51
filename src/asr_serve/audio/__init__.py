"""Any audio in, chunks of 16 kHz mono float32 out.

    open_audio   a path, bytes, a stream or an array, read piece by piece
    read_audio   the same, all at once
    Resampler    one stream at any rate to 16 kHz

`io` is the door. Behind it: `sources` (bytes), `headers` (what they announce), `media` (decoding),
`pcm` (numbers to -1..1 mono), `resample`. `live` is the door for bytes as they are spoken, with `ogg` and `opus`
behind it.
"""

from asr_serve.audio.reader import CHUNK_SAMPLES, AudioLimits, AudioStream, Source, open_audio, read_audio
from asr_serve.audio.resample import Resampler

__all__ = ["CHUNK_SAMPLES", "AudioLimits", "AudioStream", "Resampler", "Source", "open_audio", "read_audio"]
