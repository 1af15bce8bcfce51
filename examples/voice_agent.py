"""Answer telephone calls, listen, speak back, and stop when interrupted.

asr-serve serve --voice hibari & asr-serve edge --sip 127.0.0.1:5060 & python examples/voice_agent.py

It repeats what it hears, or lets a language model answer: --llm http://127.0.0.1:11434/v1 --llm-model NAME
"""

import argparse
import asyncio
import contextlib
import json
import os
import re

import httpx

PARSER = argparse.ArgumentParser(description="Voice agent for calls of `asr-serve edge --sip`.")
PARSER.add_argument("--edge", default="http://127.0.0.1:8004", help="control API of the edge; its key: EDGE_API_KEY")
PARSER.add_argument("--server", default="http://127.0.0.1:8000", help="server that speaks; its key: ASR_SERVE_API_KEY")
PARSER.add_argument("--voice", default="alloy")
PARSER.add_argument("--greeting", default="Hello. What can I do for you?")
PARSER.add_argument("--llm", help="OpenAI-compatible URL; its key: OPENAI_API_KEY. Without it, the agent repeats")
PARSER.add_argument("--llm-model", default="default")
PARSER.add_argument("--instructions", default="You are on the telephone. Answer in one or two short sentences.")

SENTENCE = re.compile(r"(?<=[.!?])\s+")
RATE_HZ = 24_000
"""Rate of `pcm` from /v1/audio/speech."""


def client(url, key):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=httpx.Timeout(30, read=None))


async def server_sent_events(http, path):
    """Events of a path, those before the connection too. The number of the last one resumes a lost connection."""
    last = "0"
    while True:
        with contextlib.suppress(httpx.TransportError):
            async with http.stream("GET", path, headers={"Last-Event-ID": last}) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        last = value
                    elif name == "data":
                        yield json.loads(value)
                return  # it was the last event
        await asyncio.sleep(1)


class EchoBot:
    """Bot that says what it has heard."""

    async def reply(self, text):
        yield f"You said: {text}"


class ChatBot:
    """Bot that asks a language model, and yields sentence by sentence what it answers."""

    def __init__(self, http, options):
        self.http, self.options = http, options
        self.messages = [{"role": "system", "content": options.instructions}]

    async def reply(self, text):
        self.messages.append({"role": "user", "content": text})
        said = pending = ""
        body = {"model": self.options.llm_model, "messages": self.messages, "stream": True}
        try:
            async with self.http.stream("POST", "chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        pending += choice["delta"].get("content") or ""
                    *whole, pending = SENTENCE.split(pending)
                    for sentence in whole:
                        said += f"{sentence} "
                        yield sentence
            said += pending
            if pending.strip():
                yield pending
        finally:  # what it began to say belongs to the conversation, if it was interrupted too
            self.messages.append({"role": "assistant", "content": said})


class Conversation:
    """Conversation of one call: turns of the caller, and answers that end when the caller speaks again."""

    def __init__(self, edge, server, options, session, bot):
        self.edge, self.server, self.options, self.bot = edge, server, options, bot
        self.session = f"/v1/edge/sessions/{session}"
        self.heard = []
        self.speaking = None

    async def run(self):
        try:
            state = (await self.edge.get(self.session)).raise_for_status().json()
            if state["ended"]:  # calls of the time before this program began are told too
                print(f"skipped a call that has ended: {state['id']}", flush=True)
            else:
                await self.listen()
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (404, 410):
                print(f"skipped a call that has ended: {self.session.rpartition('/')[2]}", flush=True)
            else:
                print(f"the call is lost: {error}", flush=True)
        except httpx.HTTPError as error:
            print(f"the call is lost: {error}", flush=True)
        await self.interrupt()

    async def listen(self):
        self.speak(self.greet())
        async for event in server_sent_events(self.edge, f"{self.session}/events"):
            match event:
                case {"type": "turn", "state": "started"}:
                    await self.interrupt()
                case {"type": "segment", "text": text}:
                    print(f"caller: {text}", flush=True)
                    self.heard.append(text)
                case {"type": "turn", "state": "ended"} if self.heard:
                    text, self.heard = " ".join(self.heard), []
                    await self.interrupt()  # an answer that came too late to be interrupted by this turn
                    self.speak(self.bot.reply(text))
                case {"type": "digit", "digit": digit}:
                    print(f"key: {digit}", flush=True)
                case {"type": "played", "interrupted": True, "played_s": seconds}:
                    print(f"interrupted after {seconds} s", flush=True)

    async def greet(self):
        yield self.options.greeting

    def speak(self, sentences):
        self.speaking = asyncio.create_task(self.say_all(sentences))

    async def say_all(self, sentences):
        try:
            async with contextlib.aclosing(sentences):
                async for sentence in sentences:
                    print(f"agent: {sentence}", flush=True)
                    if await self.say(sentence):
                        return
        except httpx.HTTPError as error:
            print(f"not said: {error}", flush=True)

    async def say(self, text):
        """Speaks while the sound comes, until the caller has heard it. Returns whether it was interrupted."""
        body = {"input": text, "voice": self.options.voice, "response_format": "pcm"}
        async with self.server.stream("POST", "/v1/audio/speech", json=body) as speech:
            speech.raise_for_status()
            sound = speech.aiter_bytes()
            played = await self.edge.post(f"{self.session}/audio", params={"rate": RATE_HZ}, content=sound)
            return played.raise_for_status().json()["interrupted"]

    async def interrupt(self):
        if self.speaking is None or self.speaking.done():
            return
        with contextlib.suppress(httpx.HTTPError):
            await self.edge.delete(f"{self.session}/audio")  # what was sent is not played
        self.speaking.cancel()  # nor is any further sentence said
        await asyncio.gather(self.speaking, return_exceptions=True)


async def main(options):
    async with (
        client(options.edge, os.environ.get("EDGE_API_KEY")) as edge,
        client(options.server, os.environ.get("ASR_SERVE_API_KEY")) as server,
        client(options.llm or "", os.environ.get("OPENAI_API_KEY")) as llm,
        asyncio.TaskGroup() as calls,
    ):
        async for event in server_sent_events(edge, "/v1/edge/calls/events"):
            if event["type"] == "call":
                bot = ChatBot(llm, options) if options.llm else EchoBot()
                print(f"call from {event['caller']}", flush=True)
                calls.create_task(Conversation(edge, server, options, event["session"], bot).run())


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(PARSER.parse_args()))
