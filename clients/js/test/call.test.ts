// Calls whose peer connection is not real, as Node has none; the server of the offers is.
import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, beforeEach, test } from "node:test";
import { SpeechCall } from "../dist/index.js";

const ANSWER = "v=0\r\n";

/** A peer connection that makes an offer, and never gets through. `ready`: when its offer is made. */
class Peer {
  static ready: Promise<void> = Promise.resolve();
  static made: Peer[] = [];
  localDescription = { sdp: "v=0\r\noffer" };
  connectionState = "new";
  onconnectionstatechange: (() => void) | null = null;
  closed = false;
  remote: unknown;
  refuses = false;
  channel = { onmessage: null, onclose: null as (() => void) | null, readyState: "connecting" };
  constructor() {
    Peer.made.push(this);
  }
  addTransceiver(): void {}
  createDataChannel(): unknown {
    return this.channel;
  }
  async createOffer(): Promise<unknown> {
    await Peer.ready;
    return this.localDescription;
  }
  async setLocalDescription(): Promise<void> {}
  async setRemoteDescription(answer: unknown): Promise<void> {
    if (this.refuses) throw new Error("no such codec");
    this.remote = answer;
  }
  close(): void {
    this.closed = true;
  }
}

let asked: string[] = [];
let answer: (response: ServerResponse) => void;
let waiting: (() => void)[] = [];
const server = createServer((request: IncomingMessage, response: ServerResponse) => {
  asked.push(`${request.method} ${request.url} ${request.headers.authorization ?? ""}`.trim());
  for (const wake of waiting.splice(0)) wake();
  request.resume();
  if (request.method === "POST") answer(response);
  else response.writeHead(200).end();
});

/** Until the server was asked so often. */
async function times(count: number): Promise<void> {
  while (asked.length < count) await new Promise<void>((resolve) => waiting.push(resolve));
}

function accept(response: ServerResponse): void {
  response.writeHead(201, { Location: "/v1/whip/rtc_1", "Content-Type": "application/sdp" }).end(ANSWER);
}

function call(): SpeechCall {
  return new SpeechCall({ url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/v1/whip`, apiKey: "k" });
}

const TRACK = {} as MediaStreamTrack;
const CALLED = ["POST /v1/whip Bearer k", "DELETE /v1/whip/rtc_1 Bearer k"];

beforeEach(async () => {
  asked = [];
  answer = accept;
  Peer.made = [];
  Peer.ready = Promise.resolve();
  Object.assign(globalThis, { RTCPeerConnection: Peer });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
});

afterEach(async () => {
  Reflect.deleteProperty(globalThis, "RTCPeerConnection");
  server.closeAllConnections();
  await new Promise((resolve) => server.close(resolve));
});

test("a call that is closed while the server answers is ended there when it has", async () => {
  let late: ServerResponse | undefined;
  answer = (response) => (late = response);
  const made = call();
  const opening = assert.rejects(made.open(TRACK), { code: "closed" });
  await times(1);
  made.close();
  await opening;
  assert.equal(made.state, "closed");
  assert.deepEqual(asked, CALLED.slice(0, 1));
  accept(late!);
  await times(2);
  assert.deepEqual(asked, CALLED);
  assert.ok(Peer.made[0]!.closed);
  assert.equal(Peer.made[0]!.remote, undefined);
});

test("a call that is closed before its offer is made is never placed", async () => {
  let ready = (): void => {};
  Peer.ready = new Promise((resolve) => (ready = resolve));
  const made = call();
  const opening = assert.rejects(made.open(TRACK), { code: "closed" });
  made.close();
  await opening;
  ready();
  await new Promise((resolve) => setTimeout(resolve, 50));
  assert.deepEqual(asked, []);
});

test("a call that is closed after the answer is ended at the server, once", async () => {
  const made = call();
  const opening = assert.rejects(made.open(TRACK), { code: "closed" });
  await times(1);
  while (Peer.made[0]!.remote === undefined) await new Promise((resolve) => setTimeout(resolve, 1));
  made.close();
  made.close();
  await opening;
  await times(2);
  assert.deepEqual(asked, CALLED);
});

test("a call that fails here is ended at the server", async () => {
  answer = (response) => {
    Peer.made[0]!.refuses = true;
    accept(response);
  };
  const made = call();
  await assert.rejects(made.open(TRACK), { code: "connection_failed" });
  await times(2);
  assert.deepEqual(asked, CALLED);
  assert.equal(made.state, "failed");
});

test("a call that the server refuses leaves nothing to end", async () => {
  answer = (response) => response.writeHead(429, { "retry-after-ms": "500" }).end('{"error":{"code":"at_capacity"}}');
  await assert.rejects(call().open(TRACK), { code: "at_capacity", retryAfterMs: 500 });
  await new Promise((resolve) => setTimeout(resolve, 50));
  assert.deepEqual(asked, CALLED.slice(0, 1));
});
