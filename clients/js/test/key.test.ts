// Where a stream's key travels. The WebSocket is real, its server only looks at what it is asked.
import assert from "node:assert/strict";
import { once } from "node:events";
import type { IncomingMessage } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { SpeechStream } from "asr-serve";
import { WebSocket, WebSocketServer } from "ws";

/** The request for a WebSocket that a stream makes. Rejects as `open` does where none comes. */
async function upgradeRequest(apiKey: string | undefined): Promise<IncomingMessage> {
  const server = new WebSocketServer({ port: 0, host: "127.0.0.1" });
  try {
    await once(server, "listening");
    const request = new Promise<IncomingMessage>((resolve) => {
      server.on("connection", (_, message) => resolve(message));
    });
    const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    const stream = new SpeechStream({ url, WebSocket, ...(apiKey !== undefined && { apiKey }) });
    const opened = stream.open();
    const seen = await Promise.race([request, opened.then(() => request)]);
    stream.close();
    await opened.catch(() => {});
    return seen;
  } finally {
    server.close();
  }
}

test("a key is no part of the address, which proxies log", async () => {
  const { url, headers } = await upgradeRequest("sk-live_1.~2");
  assert.equal(headers["sec-websocket-protocol"], "bearer,sk-live_1.~2");
  assert.equal(url, "/v1/stream");
});

test("a key that no subprotocol can hold is in the address", async () => {
  const { url, headers } = await upgradeRequest("a/b=c");
  assert.equal(headers["sec-websocket-protocol"], undefined);
  assert.equal(new URL(url ?? "", "ws://server").searchParams.get("api_key"), "a/b=c");
});

test("without a key nothing is said of one", async () => {
  const { url, headers } = await upgradeRequest(undefined);
  assert.deepEqual([url, headers["sec-websocket-protocol"]], ["/v1/stream", undefined]);
});
