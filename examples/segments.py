"""Print every segment as soon as it and all before it are recognised: python examples/segments.py FILE..."""

import sys

import asr_serve
from asr_serve.audio.input_manifest import expand_inputs
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, SegmentDone

with asr_serve.load() as model:
    # Files, folders, globs and lists; any number of them: few are read at once, and never a whole one.
    for event in model.events(expand_inputs(sys.argv[1:])):
        match event:
            case SegmentDone(key=key, segment=segment):
                print(f"{key} {segment.start_s:8.2f} {segment.end_s:8.2f}  {segment.text}")
            case FileDone(key=key, transcript=transcript):
                print(f"{key} done: {transcript.duration_s:.1f} s of audio")
            case FileFailed(key=key, error=error):
                print(f"{key} failed: {error}", file=sys.stderr)
