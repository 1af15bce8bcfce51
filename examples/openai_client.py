"""Many files at once through OpenAI's own client: python examples/openai_client.py FILE..."""

import asyncio
import sys
from pathlib import Path

import openai

MODEL = "moonshine-tiny-en"


async def transcribe(client, path):
    try:
        answer = await client.audio.transcriptions.create(model=MODEL, file=Path(path), response_format="verbose_json")
    except openai.APIStatusError as error:
        print(f"{path}: {error.message} (request {error.request_id})", file=sys.stderr)
        return
    print(f"{path}: {answer.duration:.1f} s")
    for segment in answer.segments:
        print(f"{segment.start:8.2f} {segment.end:8.2f}  {segment.text}")


async def main(paths):
    # Any key does where the server asks for none. When it is full it says when to try again, and the client does.
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=10)
    async with client, asyncio.TaskGroup() as callers:
        for path in paths:
            callers.create_task(transcribe(client, path))


asyncio.run(main(sys.argv[1:]))
