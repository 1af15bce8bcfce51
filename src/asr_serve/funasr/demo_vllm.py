"""FunASR's `demo_vllm.py`: transcribes a recording or a list of them.

python -m asr_serve.funasr.demo_vllm --input wav.scp --batch-size 32 --output results.jsonl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from asr_serve.api.cli.exit_codes import print_error
from asr_serve.funasr.offline import MAX_NEW_TOKENS, AutoModelVLLM
from asr_serve.funasr.programs import add_model_flags, load_arguments, run_program


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the key and the text of each recording. Raises as AutoModelVLLM and its `generate` do."""
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
    args = parser.parse_args(argv)
    started_s = time.perf_counter()
    model = AutoModelVLLM(
        args.model, **load_arguments(args), tensor_parallel_size=args.tensor_parallel_size, max_num_seqs=args.batch_size
    )
    loaded_s = time.perf_counter()
    results = model.generate(
        args.input,
        language=args.language,
        hotwords=args.hotwords,
        itn=not args.no_itn,
        max_new_tokens=args.max_new_tokens,
        output=args.output,
    )
    done_s = time.perf_counter()
    model.close()
    for found in results:
        print(f"[{found['key']}] {found['text']}")
    times = f"loaded in {loaded_s - started_s:.1f} s, transcribed in {done_s - loaded_s:.1f} s"
    print_error(f"{len(results)} recordings: {times}{f' -> {args.output}' if args.output else ''}")


if __name__ == "__main__":
    run_program(main)
