import type { CallStats } from "asr-serve";
import { byId } from "../page/dom";
import { delay } from "../page/words";

/** Measurements that count. */
const LAST = 20;
/** Sound and messages older than this are answered no more. */
const KEPT = 4_096;

interface Mark {
  /** Samples from the session's first to the end of this piece. */
  samples: number;
  /** performance.now() when its last sample reached the page. */
  atMs: number;
}

/** How late text is, and how far the server. Only what this page can see is measured: see the page's tooltips. */
export class Lag {
  #rateHz = 16_000;
  #samples = 0;
  #marks: Mark[] = [];
  #sent: { bytes: number; atMs: number }[] = [];
  #bytes = 0;
  #delays: number[] = [];
  #trips: number[] = [];
  #partial = "";
  #calls = false;

  /** `calls`: over WebRTC, whose `network` tells the round trip and the losses. */
  begin(rateHz: number, calls = false): void {
    this.#calls = calls;
    byId("loss-room").hidden = !calls;
    byId("loss").textContent = "–";
    byId("loss-count").textContent = "";
    this.#rateHz = rateHz;
    this.#samples = this.#bytes = 0;
    this.#marks = [];
    this.#sent = [];
    this.#delays = [];
    this.#trips = [];
    this.#partial = "";
    this.#show();
  }

  /** A frame of so many samples has come from the microphone, and is sent now unless `waits`. */
  frame(samples: number, bytes: number, waits: boolean): void {
    const atMs = performance.now();
    this.#samples += samples;
    this.#bytes += bytes;
    this.#marks.push({ samples: this.#samples, atMs });
    // What waits for a connection would measure the outage.
    if (waits || this.#calls) this.#sent = [];
    else this.#sent.push({ bytes: this.#bytes, atMs });
    if (this.#marks.length > KEPT) this.#marks.splice(0, KEPT / 2);
    if (this.#sent.length > KEPT) this.#sent.splice(0, KEPT / 2);
  }

  /** The server has so many bytes. */
  ack(bytes: number): void {
    const last = this.#sent.findIndex((piece) => piece.bytes >= bytes);
    if (last < 0) return;
    const piece = this.#sent[last]!;
    this.#sent.splice(0, last + (piece.bytes === bytes ? 1 : 0));
    if (piece.bytes === bytes) push(this.#trips, performance.now() - piece.atMs);
    this.#show();
  }

  /** How the network of a call is. */
  network({ sent, lost, roundTripMs }: CallStats): void {
    if (roundTripMs !== undefined) push(this.#trips, roundTripMs);
    const share = sent ? (100 * lost) / sent : 0;
    byId("loss").textContent = sent ? `${share.toFixed(share < 10 ? 1 : 0)} %` : "–";
    byId("loss-count").textContent = sent ? `${lost.toLocaleString("en")} of ${sent.toLocaleString("en")}` : "";
    this.#show();
  }

  /** A partial that covers the sound up to `endS` is in the page, and on the screen with the next picture. */
  text(partial: string, endS: number): void {
    if (!partial || partial === this.#partial || document.hidden) return; // hidden pages draw nothing
    this.#partial = partial;
    const end = endS * this.#rateHz;
    const mark = this.#marks.find(({ samples }) => samples >= end);
    if (!mark) return;
    const heardMs = mark.atMs - ((mark.samples - end) / this.#rateHz) * 1_000;
    requestAnimationFrame(() => {
      push(this.#delays, performance.now() - heardMs);
      this.#show();
    });
  }

  #show(): void {
    const [half, trip] = [median(this.#delays), median(this.#trips)];
    byId("delay").textContent = half === undefined ? "–" : delay(half);
    byId("delay-worst").textContent = half === undefined ? "" : `slowest ${delay(Math.max(...this.#delays))}`;
    byId("trip").textContent = trip === undefined ? "–" : delay(trip);
    byId("lag").textContent = half === undefined ? "" : `${delay(half)} behind`;
  }
}

function push(values: number[], value: number): void {
  values.push(value);
  if (values.length > LAST) values.shift();
}

function median(values: readonly number[]): number | undefined {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : sorted.length ? (sorted[middle - 1]! + sorted[middle]!) / 2 : undefined;
}
