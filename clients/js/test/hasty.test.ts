/** With a server that is hasty: a session waits a second for its client, and a second and a half for audio. */

import assert from "node:assert/strict";
import { before, describe, test } from "node:test";
import { SpeechStream } from "asr-serve";
import { Network } from "./proxy.js";
import { clip, hasty, letGo, sixteen, WebSocket } from "./speech.js";

const skip = !hasty || !clip ? "ASR_SERVE_HASTY_URL is not set" : false;

describe("what the server ends itself", { skip, timeout: 240_000 }, () => {
  let pcm: Int16Array;
  before(() => void (pcm = sixteen(clip))); // which takes a while

  test("a client that sends nothing: an error, then the rest of the text and the end", async () => {
    const stream = new SpeechStream({ url: hasty, WebSocket });
    const seen: string[] = [];
    stream.on("error", ({ code }) => seen.push(code));
    const end = new Promise((resolve) => stream.on("end", resolve));
    await stream.open();
    stream.send(pcm.subarray(0, 16_000 * 6));
    await end;
    seen.push(stream.state);
    assert.deepEqual(seen, ["idle_timeout", "closed"]);
    assert.match(stream.transcript.text, /best of times/i);
    await assert.rejects(stream.end(), { code: "closed" });
  });

  test("a session whose client comes back too late", async () => {
    const network = await Network.to(hasty);
    const stream = new SpeechStream({ url: network.url, WebSocket, reconnect: { giveUpAfterMs: 200_000 } });
    const { session_id } = await stream.open();
    stream.send(pcm.subarray(0, 16_000));
    const end = stream.end();
    network.down = true;
    network.cut();
    await letGo(hasty, session_id);
    network.down = false;
    await assert.rejects(end, { code: "session_expired" });
    assert.equal(stream.state, "failed");
    network.close();
  });

  test("the same, where a new session may go on", async () => {
    const network = await Network.to(hasty);
    const reconnect = { giveUpAfterMs: 200_000 };
    const stream = new SpeechStream({ url: network.url, WebSocket, reconnect, newSession: true });
    const restarts: number[] = [];
    stream.on("restarted", ({ position_s }) => restarts.push(position_s));
    const { session_id } = await stream.open();
    network.down = true;
    network.cut();
    void letGo(hasty, session_id).then(() => (network.down = false));
    stream.send(pcm.subarray(0, 16_000 * 6));
    const transcript = await stream.end();
    assert.deepEqual(restarts, [0]);
    assert.match(transcript.text, /best of times/i);
    assert.equal(transcript.duration, 6);
    network.close();
  });
});
