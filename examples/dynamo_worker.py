"""A model as a worker of NVIDIA Dynamo: python examples/dynamo_worker.py [MODEL] [ENDPOINT]

    pip install asr-serve ai-dynamo-runtime
    DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=/tmp/dynamo python examples/dynamo_worker.py

A request is {"audio": a file's bytes in base64} with any option of `transcribe` beside it, as "language". The responses
are the file's segments as they are recognised, then {"text", "language", "duration_s"}; or {"error"}. Workers of one
endpoint are found by Dynamo's clients, which choose one for each request.
"""

import asyncio
import base64
import contextlib
import sys
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.runtime import Context, DistributedRuntime, dynamo_worker

import asr_serve
from asr_serve.api.library import Model
from asr_serve.api.reading import read_in_threads
from asr_serve.audio.input_manifest import expand_inputs
from asr_serve.errors import AsrServeError
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, SegmentDone
from asr_serve.pipelines.options import TranscribeOptions


class Transcriber:
    """Handler of the endpoint. Requests are batched by the engine, as if callers shared one process."""

    def __init__(self, model: Model) -> None:
        self.model = model

    async def responses(self, request: dict[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the responses to a request; a caller that leaves ends its work."""
        try:
            options = dict(request)
            audio = base64.b64decode(options.pop("audio", ""), validate=True)
            events = self.model.events(expand_inputs([audio]), TranscribeOptions.of(options))
        except ValueError as error:
            yield {"error": f"audio is not base64: {error}"}
            return
        except AsrServeError as error:
            yield {"error": str(error)}
            return
        async with contextlib.aclosing(read_in_threads(events)) as stream:
            async for event in stream:
                if context.is_stopped():
                    return
                match event:
                    case SegmentDone(segment=segment):
                        yield {"start_s": segment.start_s, "end_s": segment.end_s, "text": segment.text}
                    case FileDone(transcript=done):
                        yield {"text": done.text, "language": done.language, "duration_s": done.duration_s}
                    case FileFailed(error=error):
                        yield {"error": str(error)}


@dynamo_worker()
async def serve(runtime: DistributedRuntime, model_name: str, path: str) -> None:
    """Serves the endpoint until the runtime is shut down."""
    with asr_serve.load(model_name) as model:
        await runtime.endpoint(path).serve_endpoint(Transcriber(model).responses)


if __name__ == "__main__":
    name, path = [*sys.argv[1:], *("moonshine-tiny-en", "asr_serve.recognizer.transcribe")[len(sys.argv) - 1 :]]
    asyncio.run(serve(name, path))
