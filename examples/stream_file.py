"""Print words as soon as they are certain: python examples/stream_file.py FILE..."""

import sys

import asr_serve

with asr_serve.load() as model:
    for path in sys.argv[1:]:
        printed = 0
        for result in model.stream(path):
            print(result.fixed_text[printed:], end="", flush=True)  # it only grows
            printed = len(result.fixed_text)
        print()
