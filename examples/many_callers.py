"""Many callers, one model: their segments share every batch. python examples/many_callers.py FILE..."""

import asyncio
import sys

import asr_serve


async def caller(model, path):
    # Somebody waits for this one, so it goes ahead of bulk work.
    (transcript,) = await model.atranscribe(path, priority="interactive")
    print(f"{path}: {transcript.text}")


async def main(paths):
    with asr_serve.load() as model:
        async with asyncio.TaskGroup() as callers:
            for path in paths:
                callers.create_task(caller(model, path))


asyncio.run(main(sys.argv[1:]))
