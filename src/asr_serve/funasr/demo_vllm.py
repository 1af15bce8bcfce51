"""FunASR's `demo_vllm.py`: transcribes a recording or a list of them.

python -m asr_serve.funasr.demo_vllm --input wav.scp --batch-size 32 --output results.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import get_args

from asr_serve.api.cli.exit_codes import FAILED, print_error
from asr_serve.funasr.offline import MAX_NEW_TOKENS, AutoModelVLLM, OnError
from asr_serve.funasr.option_names import flag_names, renamed_options
from asr_serve.funasr.programs import add_model_flags, load_arguments, run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the key and the text of each recording. Returns the exit code: FAILED where errors of recordings were
    recorded. Raises as AutoModelVLLM and its `generate` do."""
    parser = argparse.ArgumentParser(prog="python -m asr_serve.funasr.demo_vllm", description=__doc__)
    parser.add_argument("--input", required=True, nargs="+", help="recordings, folders, wav.scp or jsonl")
    add_model_flags(parser, "--model-dir")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the language model")
    parser.add_argument("--batch-size", type=int, help="segments that are decoded at once")
    parser.add_argument("--language", help="language, as a name or a code (the model detects it)")
    parser.add_argument("--hotwords", nargs="*", default=[], help="hotwords")
    parser.add_argument("--no-itn", action="store_true", help="ask for the spoken form of numbers and dates")
    parser.add_argument("--max-new-tokens", type=int, help=f"most tokens of a segment ({MAX_NEW_TOKENS})")
    parser.add_argument("--output", help="jsonl file for the results")
    parser.add_argument(
        "--on-error", default="raise", choices=get_args(OnError), help="record: go on after a recording that fails"
    )
    args = parser.parse_args(argv)
    with renamed_options(flag_names(parser, max_num_seqs="batch_size")):
        started_s = time.perf_counter()
        model = AutoModelVLLM(
            args.model,
            **load_arguments(args),
            tensor_parallel_size=args.tensor_parallel_size,
            max_num_seqs=args.batch_size,
        )
        loaded_s = time.perf_counter()
        with contextlib.closing(model):
            results = model.generate(
                args.input,
                language=args.language,
                hotwords=args.hotwords,
                itn=not args.no_itn,
                max_new_tokens=args.max_new_tokens,
                output=args.output,
                on_error=args.on_error,
            )
            done_s = time.perf_counter()
    failed = [found for found in results if "error" in found]
    for found in results:
        if "error" not in found:
            print(f"[{found['key']}] {found['text']}")
    times = f"loaded in {loaded_s - started_s:.1f} s, transcribed in {done_s - loaded_s:.1f} s"
    counts = f"{len(results)} recordings{f', {len(failed)} failed' if failed else ''}"
    print_error(f"{counts}: {times}{f' -> {args.output}' if args.output else ''}")
    for found in failed:
        print_error(f"failed: {found['key']}: {found['error']}")
    return FAILED if failed else 0


if __name__ == "__main__":
    run_program(main)
