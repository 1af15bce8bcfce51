"""In the place of cloning/worker where a test is about the queue: what happens is what the recordings' names
ask for."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from asr_serve.voices.cloned_voice import ClonedVoiceCard
from asr_serve.voices.cloning_messages import (
    ClipReport,
    CloneFailed,
    CloneMessage,
    CloneProgress,
    CloneReport,
    CloneRequest,
)
from asr_serve.voices.voice_store import VoiceStore


def say(what: CloneMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.flush()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=CloneRequest)
    asks = " ".join(order.audio)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), stop.set()), daemon=True).start()
    Path(tempfile.gettempdir(), "left-behind").write_bytes(b"x")
    say(CloneProgress("listening", 0.1))
    if "die" in asks:
        print("the reason", file=sys.stderr, flush=True)
        os._exit(3)
    if "wait" in asks:
        say(CloneProgress("learning", 0.3, 0.9, 100.0))
        stop.wait()
        say(CloneFailed("cancelled", "the cloning was cancelled"))
        return
    if "deaf" in asks:
        say(CloneProgress("learning", 0.3))
        while True:
            time.sleep(60)
    if "bad" in asks:
        say(CloneFailed("too_few_clips", f"1 good clips. Left out: {order.audio[0]}: noise"))
        return
    tensors = b"tensors"
    card = ClonedVoiceCard(
        name=order.name,
        created=1,
        model=order.model,
        fingerprint="f",
        consent=order.consent,
        clips=1,
        seconds=30.0,
        start="heart",
        similarity=0.8,
        ceiling=0.9,
        steps=9,
        seed=order.seed,
        sha256=hashlib.sha256(tensors).hexdigest(),
        release=f"{os.nice(0)} {order.texts}",
    )
    VoiceStore(Path(order.voices_dir)).add(card, tensors)
    say(CloneReport(card, [ClipReport(audio, 3.0, "text") for audio in order.audio], 2.0, 1.0, 0.1))


if __name__ == "__main__":
    main()
