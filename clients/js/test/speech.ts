/** The server and the recording that the tests are given. `tests/clients_js` starts the one and names the other. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { Resampler } from "asr-serve";
import { WebSocket } from "ws";

const { ASR_SERVE_URL, ASR_SERVE_HASTY_URL, ASR_SERVE_COMMAND, ASR_SERVE_CLIP } = process.env;

export { WebSocket };
/** A running server, http://host:port. */
export const url = ASR_SERVE_URL ?? "";
/** Another, with session_idle_s=1.5 and resume_s=1. */
export const hasty = ASR_SERVE_HASTY_URL ?? "";
/** What starts one more, but for its port. */
export const command = JSON.parse(ASR_SERVE_COMMAND ?? "[]") as string[];
/** A wav file: 16 bits, mono. */
export const clip = ASR_SERVE_CLIP ?? "";
/** Why tests that want them are skipped; false when they are there. */
export const skip = !url || !clip ? "ASR_SERVE_URL (a server) and ASR_SERVE_CLIP (a wav file) are not set" : false;

const WAIT_MS = 120_000;

export function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Why a server has let a session go, when it has. It is asked beside the session's connections, which it leaves
 * alone: whoever connects takes the session over, and keeps it alive. */
export async function letGo(server: string, session: string): Promise<string> {
  for (const endMs = performance.now() + WAIT_MS; ; await pause(50)) {
    const asked = { method: "POST", body: '{"id":"still there"}' };
    const answer = await fetch(`${server}/v1/stream/${session}/flush`, asked);
    const said = await answer.text();
    if (answer.status === 410) return said;
    assert.ok(performance.now() < endMs, `it never went: ${answer.status} ${said}`);
  }
}

/** Samples of a clip as bytes, and their rate. */
export function readWav(path: string): { pcm: Uint8Array<ArrayBuffer>; rate: number } {
  const file = new Uint8Array(readFileSync(path));
  const head = new DataView(file.buffer);
  return { pcm: file.slice(44), rate: head.getUint32(24, true) };
}

/** A clip at 16 kHz. */
export function sixteen(path: string): Int16Array {
  const { pcm, rate } = readWav(path);
  const floats = Float32Array.from(new Int16Array(pcm.buffer), (x) => x / 32_768);
  return Int16Array.from(new Resampler(rate, 16_000).push(floats), (x) => x * 32_767);
}
