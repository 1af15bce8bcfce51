/** With a server that is killed, or told to go, while somebody talks, and started again. */

import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { createServer, type AddressInfo } from "node:net";
import { after, before, describe, test } from "node:test";
import { SpeechStream, type Restart, type StreamState, type Transcript } from "asr-serve";
import { clip, command, pause, sixteen, WebSocket } from "./speech.js";

const skip = !command.length || !clip ? "ASR_SERVE_COMMAND is not set" : false;
const RATE = 16_000;
const SECONDS = 14;
const GOES_AT_S = 6;
const FLUSH_AT_S = 8;

describe("a server that is restarted", { skip, timeout: 240_000 }, () => {
  let pcm: Int16Array;
  let port: number;
  let server: ChildProcess;

  before(async () => {
    pcm = sixteen(clip).subarray(0, SECONDS * RATE);
    const probe = createServer().listen(0, "127.0.0.1");
    await once(probe, "listening");
    port = (probe.address() as AddressInfo).port;
    probe.close();
    await start();
  });
  after(() => server?.kill("SIGKILL"));

  async function start(): Promise<void> {
    const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("ASR_SERVE_")));
    server = spawn(command[0]!, [...command.slice(1), "--port", String(port)], { stdio: "ignore", env });
    while (!(await fetch(`http://127.0.0.1:${port}/ready`).then((ready) => ready.ok, () => false))) {
      assert.equal(server.exitCode, null, "the server ended");
      await pause(100);
    }
  }

  async function restart(signal: NodeJS.Signals): Promise<void> {
    const gone = once(server, "exit");
    server.kill(signal);
    await gone;
    await start();
  }

  interface Run {
    transcript: Transcript;
    restarts: Restart[];
    states: StreamState[];
    errors: string[];
    acknowledgedS: number;
    flushedS: number;
  }

  /** All of the speech, four times as fast. */
  async function talk(signal: NodeJS.Signals): Promise<Run> {
    const stream = new SpeechStream({
      url: `http://127.0.0.1:${port}`,
      WebSocket,
      newSession: true,
      reconnect: { giveUpAfterMs: 120_000 },
    });
    const found = { restarts: [] as Restart[], states: [] as StreamState[], errors: [] as string[], acknowledgedS: 0 };
    stream.on("restarted", (restart) => found.restarts.push(restart));
    stream.on("state", (state) => found.states.push(state));
    stream.on("error", ({ code }) => found.errors.push(code));
    stream.on("ack", ({ received_s }) => {
      if (!found.restarts.length) found.acknowledgedS = received_s;
    });
    await stream.open();
    let back: Promise<void> | undefined;
    let flushed: Promise<{ position_s: number }> | undefined;
    for (let at = 0; at < pcm.length; at += RATE / 10) {
      if (at === GOES_AT_S * RATE) {
        // What a server has taken and not yet told goes with it.
        while (!/best of times/i.test(stream.transcript.text)) await pause(20);
        back = restart(signal);
      }
      if (at === FLUSH_AT_S * RATE) flushed = stream.flush();
      assert.ok(stream.send(pcm.subarray(at, at + RATE / 10)));
      await pause(25);
    }
    const [transcript, { position_s }] = await Promise.all([stream.end(), flushed!, back]);
    assert.equal(stream.state, "closed");
    return { ...found, transcript, flushedS: position_s };
  }

  /** What the server makes of the audio behind. */
  async function heardFrom(startS: number): Promise<string[]> {
    const stream = new SpeechStream({ url: `http://127.0.0.1:${port}`, WebSocket });
    await stream.open();
    const [start, flush] = [startS * RATE, FLUSH_AT_S * RATE];
    stream.send(pcm.subarray(start, flush));
    void stream.flush();
    stream.send(pcm.subarray(flush));
    const { segments } = await stream.end();
    return segments.map(({ text }) => text);
  }

  function whole({ transcript, restarts, flushedS }: Run): void {
    assert.equal(restarts.length, 1);
    assert.equal(flushedS, FLUSH_AT_S);
    assert.equal(transcript.duration, SECONDS);
    assert.deepEqual(transcript.segments.map(({ index }) => index), transcript.segments.map((_, n) => n));
    for (const [n, { start, end }] of transcript.segments.entries()) {
      assert.ok(start >= (transcript.segments[n - 1]?.end ?? 0) && end >= start, `segment ${n} from ${start} to ${end}`);
    }
  }

  test("killed: what was not acknowledged is heard by the next", async () => {
    const found = await talk("SIGKILL");
    whole(found);
    const [{ position_s, segment }] = found.restarts as [Restart];
    assert.equal(position_s, found.acknowledgedS);
    assert.match(found.transcript.text, /^It was the best of times/);
    if (segment) assert.ok(found.transcript.segments.includes(segment));
    const later = found.transcript.segments.filter(({ start }) => start >= position_s).map(({ text }) => text);
    assert.deepEqual(later, await heardFrom(position_s));
    assert.deepEqual(found.states.filter((state, n) => state !== found.states[n - 1]), [
      "connecting",
      "open",
      "reconnecting",
      "open",
      "closed",
    ]);
    assert.deepEqual(found.errors, []);
  });

  test("told to go: not a sample is lost or heard twice", async () => {
    const found = await talk("SIGTERM");
    whole(found);
    const [{ position_s }] = found.restarts as [Restart];
    assert.ok(position_s >= found.acknowledgedS);
    const later = found.transcript.segments.filter(({ start }) => start >= position_s).map(({ text }) => text);
    assert.deepEqual(later, await heardFrom(position_s));
    assert.deepEqual(found.errors, []);
  });
});
