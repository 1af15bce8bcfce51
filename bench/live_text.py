"""How live text differs from that of whole recordings: by the limit of a segment, and by the rule that locks words.

    python bench/live_text.py --speech DIR --json live-text.json

DIR holds FLAC or WAV files whose text need not be known: the model's own text of the whole recording is compared with.

`limits` are live sessions, fed as fast as they take it, each with two clips and a pause between them: live text is the
same at any pace. `rules` recognize every segment at its anchors as a live session does, each from what was locked
before it, and then whole, from what was locked and from nothing. `after_s` is the time from a word to its locking, with
words spread evenly over their segment; a word that is never locked waits for the segment's end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import clips
import machine
import numpy as np
from clips import RATE_HZ, Audio
from serve import numbers

import asr_serve
from asr_serve.audio.endpointing import LOOK_BACK
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import NO_DRAFT, DraftTokens, SearchOptions
from asr_serve.errors import AtCapacity
from asr_serve.pipelines.live import repeated_segment
from asr_serve.pipelines.live.repeated_segment import PendingHypothesis, RepeatedSegment
from asr_serve.pipelines.live.segment_encoder import WholeSegmentEncoder
from asr_serve.pipelines.options import ANCHOR_INTERVAL_MS, MAX_LIVE_SEGMENT_MS
from asr_serve.pipelines.segments import pad_with_silence
from asr_serve.types import Span
from asr_serve_tools.evaluate.wer import wer

Row = dict[str, Any]
Rule = tuple[tuple[int, float], ...]
"""As repeated_segment.LOCKING."""
RULES: tuple[Rule, ...] = (
    *(((count, 0.0),) for count in (2, 3, 4, 5)),
    ((2, 0.7),),
    ((2, 0.7), (3, 0.6)),
    ((2, 0.7), (3, 0.6), (5, 0.4)),
    ((2, 0.7), (3, 0.6), (5, 0.0)),
    ((2, 0.7), (3, 0.6), (4, 0.4), (5, 0.0)),
    ((2, 0.7), (3, 0.5), (4, 0.3), (5, 0.0)),
)
NEVER_MS = 1_000_000
"""Interval of anchors that no segment reaches."""
ANCHOR, FINAL = SearchOptions(temperatures=(0.0,), hurried=True), SearchOptions(hurried=True)
PAUSE_S, CHUNK_S, SESSIONS, IN_FLIGHT = 2.5, 0.5, 3, 256
ANCHOR_SAMPLES = ANCHOR_INTERVAL_MS * RATE_HZ // 1_000
ANCHORS_WITHIN_SAMPLES = round((1 - LOOK_BACK) * MAX_LIVE_SEGMENT_MS * RATE_HZ / 1_000)
"""Start of a segment in which no cut can fall: there are no anchors after it."""
FADING_SAMPLES = 3 * RATE_HZ // 8
"""End of a segment that voice activity does not call speech: the padding, and a little."""
PAUSE_AT_END_S = 1.5
"""Pause after which a segment of middle length ends, and its words are locked."""


def limits_of(model: Any, audio: Sequence[Audio], limits_ms: Sequence[int]) -> list[Row]:
    """A row for each limit, without locked words and with."""
    pause = np.zeros(round(PAUSE_S * RATE_HZ), np.float32)
    spoken = [np.concatenate([one, pause, other]) for one, other in list(pairwise(audio))[::2]]
    whole = [transcript.text for transcript in model.transcribe(spoken)]
    rows = []
    for limit_ms in limits_ms:
        for locks in (False, True):
            options = {"max_segment_ms": limit_ms} | ({} if locks else {"lock_ms": NEVER_MS})
            before_s = time.process_time()
            with ThreadPoolExecutor(SESSIONS) as pool:
                heard = list(pool.map(partial(listen, model, options), spoken))
            row = {
                "limit_ms": limit_ms,
                "locks": locks,
                "minutes": round(clips.seconds(spoken) / 60, 1),
                "segments": sum(len(each.segments) for each in heard),
                "cpu_s": round(time.process_time() - before_s, 1),
                **changed(whole, [each.text for each in heard]),
            }
            rows.append(told(row))
    return rows


def listen(model: Any, options: dict[str, Any], pcm: Audio) -> Any:
    """The last result of a live session."""
    step = round(CHUNK_S * RATE_HZ)
    while True:
        try:
            *_, last = model.stream((pcm[at : at + step] for at in range(0, len(pcm), step)), **options)
        except AtCapacity:
            time.sleep(1)
        else:
            return last


def rules_of(model: Any, audio: Sequence[Audio], rules: Sequence[Rule]) -> list[Row]:
    transcripts = model.transcribe(list(audio), silence_schedule=STREAMING_SCHEDULE, max_segment_ms=MAX_LIVE_SEGMENT_MS)
    segments = [
        pcm[segment.start_samples : segment.end_samples]
        for pcm, transcript in zip(audio, transcripts, strict=True)
        for segment in transcript.segments
    ]
    ends = [
        range(ANCHOR_SAMPLES, min(len(pcm) - FADING_SAMPLES, ANCHORS_WITHIN_SAMPLES), ANCHOR_SAMPLES)
        for pcm in segments
    ]
    free = recognize(model, [(pcm, NO_DRAFT) for pcm in segments], FINAL)
    texts = [model.tokenizer.decode(list(each.tokens)) for each in free]
    rows = []
    for rule in rules:
        with mock.patch.object(repeated_segment, "LOCKING", rule):
            locked = lock(model, segments, ends)
        wrong = [i for i, (tokens, _) in enumerate(locked) if free[i].tokens[: len(tokens)] != tokens]
        finals = recognize(model, [(segments[i], DraftTokens(locked[i][0], len(locked[i][0]))) for i in wrong], FINAL)
        live = list(texts)
        for i, final in zip(wrong, finals, strict=True):
            live[i] = model.tokenizer.decode(list(final.tokens))
        delays = sorted(
            delay
            for pcm, final, (_, times) in zip(segments, free, locked, strict=True)
            for delay in delays_of(len(pcm) / RATE_HZ, len(final.tokens), times)
        )
        row = {
            "rule": rule,
            "minutes": round(clips.seconds(segments) / 60, 1),
            "segments": len(segments),
            "segments_changed": len(wrong),
            "locked": round(sum(len(tokens) for tokens, _ in locked) / sum(len(each.tokens) for each in free), 3),
            "after_s": round(statistics.fmean(delays), 2),
            "after_p50_s": round(delays[len(delays) // 2], 2),
            "after_p90_s": round(delays[len(delays) * 9 // 10], 2),
            **changed(texts, live),
        }
        rows.append(told(row))
    return rows


def recognize(model: Any, questions: Sequence[tuple[Audio, DraftTokens]], options: SearchOptions) -> list[Recognition]:
    answers: list[Recognition] = []
    pending: list[Future[Recognition]] = []
    for pcm, draft in questions:
        if len(pending) == IN_FLIGHT:
            answers.append(pending.pop(0).result())
        pending.append(model.client.submit(pad_with_silence(pcm), options, "bulk", admitted=True, draft=draft).future)
    return answers + [each.result() for each in pending]


def lock(
    model: Any, segments: Sequence[Audio], ends: Sequence[Sequence[int]]
) -> list[tuple[tuple[int, ...], list[float]]]:
    """The tokens that each segment with anchors at these samples locks, and at which of its seconds each of them."""
    encoder = WholeSegmentEncoder(model.client, None)  # type: ignore[arg-type]  # nothing is submitted
    live = [RepeatedSegment(0, False, model.tokenizer.decode, encoder) for _ in segments]
    times: list[list[float]] = [[] for _ in segments]
    for round_ in range(max(map(len, ends))):
        asked = [i for i, each in enumerate(ends) if round_ < len(each)]
        answers = recognize(model, [(segments[i][: ends[i][round_]], live[i].draft) for i in asked], ANCHOR)
        for i, heard in zip(asked, answers, strict=True):
            end = ends[i][round_]
            live[i].accept_result(PendingHypothesis("anchor", Span(0, end), Future(), lambda: None), heard)
            times[i] += [end / RATE_HZ] * (live[i].locked_tokens - len(times[i]))
    return [(each.tokens[: each.locked_tokens], when) for each, when in zip(live, times, strict=True)]


def delays_of(length_s: float, tokens: int, times: Sequence[float]) -> list[float]:
    """For each token of a segment, seconds from its end until it is locked. `times`: when the first of them were."""
    known = [*times, *[length_s + PAUSE_AT_END_S] * max(0, tokens - len(times))]
    return [known[i] - (i + 1) / tokens * length_s for i in range(tokens)]


def changed(before: Sequence[str], after: Sequence[str]) -> Row:
    found = wer(before, after)
    return {"words": found.reference, "words_changed": found.errors, "changed_percent": round(found.percent, 2)}


def told(row: Row) -> Row:
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--speech", type=Path, required=True, metavar="DIR", help="folder of clips without text")
    add("--model", default="moonshine-tiny-en", metavar="NAME", help="(moonshine-tiny-en)")
    add("--clips", type=int, metavar="N", help="of the folder at most (all)")
    add("--limit-clips", type=int, default=60, metavar="N", help="of them for the limits (60)")
    add("--limits", type=numbers, default=[16_000, 20_000, 24_000], metavar="MS,MS", help="(16000,20000,24000)")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    args = parser.parse_args(argv)
    audio = [clip.audio for clip in clips.without_text(args.speech, args.clips)]
    about = machine.describe(machine.cores())
    with asr_serve.load(args.model, engine=EngineConfig(prefix_bytes=0)) as model:
        limits = limits_of(model, audio[: args.limit_clips], args.limits)
        rules = rules_of(model, audio, RULES)
        products = model.describe()["products"]
    found = {"bench": "live_text", "machine": about, "model": args.model, "products": products}
    machine.write(args.json, {**found, "limits": limits, "rules": rules})
    return 0


if __name__ == "__main__":
    sys.exit(main())
