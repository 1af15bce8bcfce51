"""Deepgram's SDK against a server of ours; prints what comes, a JSON object a line. Runs in the environment of
`make clients`.

    deepgram_sdk.py URL listen WAV      a recording over HTTP, and over a WebSocket
    deepgram_sdk.py URL speak TEXT      a text over HTTP, and over a WebSocket
"""

from __future__ import annotations

import json
import sys
import threading
import wave
from typing import Any

from deepgram import DeepgramClient, DeepgramClientEnvironment
from deepgram.core.api_error import ApiError
from deepgram.core.events import EventType

STEP_BYTES = 3_200
SAMPLES: dict[str, Any] = {"encoding": "linear16", "sample_rate": 16_000}


def tell(event: str, text: str | None = None) -> None:
    print(json.dumps({"event": event, "text": text}), flush=True)


def listen(client: DeepgramClient, path: str) -> None:
    with open(path, "rb") as file:
        audio = file.read()
    answer = client.listen.v1.media.transcribe_file(request=audio, model="nova-3", smart_format=True, utterances=True)
    tell("file", answer.results.channels[0].alternatives[0].transcript)
    try:
        client.listen.v1.media.transcribe_file(request=audio, model="nova-3", summarize="v2")
    except ApiError as error:
        tell("refused", f"{error.status_code} {error.body['err_code']}")
    with wave.open(path) as wav:
        pcm = wav.readframes(wav.getnframes()) + bytes(64_000)
    options = {"interim_results": "true", "vad_events": "true", "utterance_end_ms": "1000", "punctuate": "true"}
    with client.listen.v1.connect(model="nova-3", **SAMPLES, **options) as line:
        line.on(EventType.MESSAGE, on_message)
        reader = threading.Thread(target=line.start_listening)
        reader.start()
        line.send_keep_alive()
        for at in range(0, len(pcm), STEP_BYTES):
            line.send_media(pcm[at : at + STEP_BYTES])
        line.send_finalize()
        line.send_close_stream()
        reader.join(240)


def on_message(message: Any) -> None:
    if message.type == "Results":
        tell("final" if message.is_final else "interim", message.channel.alternatives[0].transcript)
    else:
        tell(message.type)


def speak(client: DeepgramClient, text: str) -> None:
    options = {"encoding": "linear16", "model": "aura-2-thalia-en"}
    audio = client.speak.v1.audio.generate(text=text, container="none", **options)
    tell("file", str(len(b"".join(audio))))
    received = 0
    with client.speak.v1.connect(**options) as line:
        for part in text.split(". "):
            line.send_text(parse_text(part))
        line.send_flush()
        for message in line:
            if isinstance(message, bytes):
                received += len(message)
                continue
            tell(message.type)
            if message.type == "Flushed":
                break
        line.send_close()
        tell("audio", str(received + sum(len(rest) for rest in line if isinstance(rest, bytes))))


def parse_text(text: str) -> Any:
    from deepgram.speak.v1.types import SpeakV1Text

    return SpeakV1Text(text=text if text.endswith(".") else f"{text}. ")


def main(url: str, what: str, argument: str) -> None:
    ws = url.replace("http", "ws", 1)
    environment = DeepgramClientEnvironment(base=url, production=ws, agent=ws, agent_rest=url)
    client = DeepgramClient(api_key="none", environment=environment)
    {"listen": listen, "speak": speak}[what](client, argument)


if __name__ == "__main__":
    main(*sys.argv[1:])
