import { Emitter } from "./emitter.js";
import { SpeechError } from "./errors.js";
import type * as wire from "./events.js";
import { callUrl, expectCallOptions, type CallOptions } from "./options.js";
import { Transcript } from "./transcript.js";
import { waiting, type Waiting } from "./waiting.js";

export type CallState = "connecting" | "open" | "closed" | "failed";

/** How the network is, as the browser and the server's reports have it. */
export interface CallStats {
  /** Packets of audio so far, and how many of them the server did not get. */
  sent: number;
  lost: number;
  /** There and back; undefined: not measured yet. */
  roundTripMs: number | undefined;
}

export interface CallEvents {
  session: [wire.SessionEvent];
  partial: [wire.PartialEvent];
  locked: [wire.LockedEvent];
  segment: [wire.SegmentEvent];
  flushed: [wire.FlushedEvent];
  turn: [wire.TurnEvent];
  speakers: [wire.SpeakersEvent];
  loss: [wire.LossEvent];
  end: [wire.EndEvent];
  /** Once a second. */
  stats: [CallStats];
  error: [SpeechError];
  state: [CallState];
}

const STATS_MS = 1_000;
/** What was said before the end is still in the encoder, and on its way. */
const UNDER_WAY_MS = 300;
const CONNECT_MS = 15_000;

/** A microphone's track over WebRTC, and what was heard coming back. In browsers only.
 *
 * The browser sends the audio by itself, and a lost packet delays nothing; a call that is lost does not come back. The
 * events are those of `SpeechStream`, but for `ack` and `restarted`. Each `on` listener is told after the transcript knows.
 */
export class SpeechCall extends Emitter<CallEvents> {
  readonly transcript = new Transcript();
  #state: CallState = "closed";
  #peer: RTCPeerConnection | undefined;
  #channel: RTCDataChannel | undefined;
  #location: string | undefined;
  #opening: Waiting<wire.SessionEvent> | undefined;
  #ending: Waiting<Transcript> | undefined;
  readonly #flushes = new Map<string, Waiting<wire.FlushedEvent>>();
  #flushCount = 0;
  #timers: ReturnType<typeof setInterval>[] = [];

  /** Throws SpeechError when an option cannot be. */
  constructor(private readonly options: CallOptions) {
    super();
    expectCallOptions(options);
    callUrl(options);
  }

  get state(): CallState {
    return this.#state;
  }

  /** Call, with the track of a microphone; once. Rejects with SpeechError, `retryAfterMs` when the server is full. */
  open(track: MediaStreamTrack): Promise<wire.SessionEvent> {
    if (this.#opening) return this.#opening.promise;
    this.#opening = waiting();
    this.#become("connecting");
    void this.#call(track).catch((failure: unknown) => this.#fail(asError(failure)));
    return this.#opening.promise;
  }

  /** Make final what was said so far. Resolves when every word before is. */
  flush(id: string = `flush-${++this.#flushCount}`): Promise<wire.FlushedEvent> {
    if (this.#state !== "open" || this.#ending) return Promise.reject(gone());
    const before = this.#flushes.get(id);
    if (before) return before.promise;
    const flush = waiting<wire.FlushedEvent>();
    this.#flushes.set(id, flush);
    this.#channel!.send(JSON.stringify({ type: "flush", id }));
    return flush.promise;
  }

  /** No more audio. Resolves when all of it is text. Stop the microphone after it: what was just said is on its way. */
  end(): Promise<Transcript> {
    if (this.#ending) return this.#ending.promise;
    if (this.#state !== "open") return Promise.reject(gone());
    this.#ending = waiting();
    setTimeout(() => {
      if (this.#channel?.readyState === "open") this.#channel.send('{"type":"end"}');
    }, UNDER_WAY_MS);
    return this.#ending.promise;
  }

  /** Hang up now; what was not heard is lost. */
  close(): void {
    if (this.#state !== "connecting" && this.#state !== "open") return;
    this.#finish("closed", new SpeechError("closed", "The call was ended before its end."));
    this.#hangUp();
  }

  /** End the call at the server too. Of one whose answer is still on its way, nobody knows the address: it is ended when the
   * answer comes. */
  #hangUp(): void {
    const location = this.#location;
    this.#location = undefined;
    if (location === undefined) return;
    // A page that is being left may still send it.
    void fetch(location, { method: "DELETE", headers: this.#headers, keepalive: true }).catch(() => {});
  }

  get #headers(): Record<string, string> {
    const { apiKey } = this.options;
    return apiKey === undefined ? {} : { Authorization: `Bearer ${apiKey}` };
  }

  async #call(track: MediaStreamTrack): Promise<void> {
    const peer = new RTCPeerConnection();
    this.#peer = peer;
    peer.addTransceiver(track, { direction: "sendonly" });
    const channel = peer.createDataChannel("events");
    this.#channel = channel;
    channel.onmessage = ({ data }: MessageEvent<string>) => this.#hear(JSON.parse(data) as wire.ServerEvent);
    channel.onclose = () => this.#lost("the data channel closed");
    peer.onconnectionstatechange = () => {
      if (peer.connectionState === "failed") this.#lost("no packets come through");
    };
    this.#timers.push(setTimeout(() => this.#opened || this.#lost("no connection in time"), CONNECT_MS));
    await peer.setLocalDescription(await peer.createOffer());
    if (this.#state !== "connecting") return; // or the server would have a call that nobody makes
    const answer = await this.#offer(peer.localDescription!.sdp);
    if (this.#state !== "connecting") return;
    await peer.setRemoteDescription({ type: "answer", sdp: answer });
  }

  /** The server's answer to an offer. Candidates need not be in it: the server answers checks from anywhere. */
  async #offer(body: string): Promise<string> {
    let answer: Response;
    const url = callUrl(this.options);
    try {
      const headers = { ...this.#headers, "Content-Type": "application/sdp" };
      answer = await fetch(url, { method: "POST", headers, body, signal: AbortSignal.timeout(CONNECT_MS) });
    } catch (cause) {
      throw new SpeechError("connection_failed", `No server answers at ${url}.`, { cause });
    }
    const location = answer.headers.get("location");
    if (answer.ok && location !== null) this.#location = new URL(location, url).href;
    if (this.#state !== "connecting") this.#hangUp(); // it was closed, or failed, meanwhile
    const text = await answer.text();
    if (answer.ok) {
      return text;
    }
    throw refusal(answer, text);
  }

  get #opened(): boolean {
    return this.#state !== "connecting";
  }

  #hear(event: wire.ServerEvent | wire.LossEvent): void {
    if (event.type === "loss") return this.emit("loss", event);
    if (event.type === "error") return this.#refused(event);
    this.transcript.apply(event);
    switch (event.type) {
      case "session":
        return this.#greeted(event);
      case "flushed":
        this.#flushes.get(event.id)?.resolve(event);
        this.#flushes.delete(event.id);
        return this.emit("flushed", event);
      case "end":
        this.#ending?.resolve(this.transcript); // first: a listener may close the call
        this.emit("end", event);
        this.#location = undefined; // the server has ended it
        return this.#finish("closed", new SpeechError("closed", "The session has ended."));
      case "partial":
        return this.emit("partial", event);
      case "locked":
        return this.emit("locked", event);
      case "segment":
        return this.emit("segment", event);
      case "turn":
        return this.emit("turn", event);
      case "speakers":
        return this.emit("speakers", event);
    }
  }

  #greeted(event: wire.SessionEvent): void {
    this.#timers.push(setInterval(() => void this.#measure(), STATS_MS));
    this.#become("open");
    this.#opening!.resolve(event);
    this.emit("session", event);
  }

  async #measure(): Promise<void> {
    const stats: CallStats = { sent: 0, lost: 0, roundTripMs: undefined };
    for (const each of ((await this.#peer?.getStats()) ?? new Map()).values()) {
      if (each.type === "outbound-rtp") stats.sent = each.packetsSent;
      if (each.type === "remote-inbound-rtp") stats.lost = Math.max(0, each.packetsLost);
      // The checks of ICE: as often as the reports of RTCP, and from the first second on.
      if (each.type === "candidate-pair" && each.nominated && each.currentRoundTripTime !== undefined) {
        stats.roundTripMs = 1_000 * each.currentRoundTripTime;
      }
    }
    if (this.#state === "open") this.emit("stats", stats);
  }

  /** Either the call ends now, or the rest of the text follows, and `end`. */
  #refused(event: wire.ErrorEvent): void {
    const error = new SpeechError(event.code, event.message, { retryAfterMs: event.retry_after_ms, param: event.param });
    if (this.#state === "connecting") return this.#fail(error);
    this.emit("error", error);
  }

  #lost(why: string): void {
    const before = this.#state === "connecting";
    const code = before ? "connection_failed" : "connection_lost";
    this.#fail(new SpeechError(code, `The call ${before ? "was not connected" : "was lost"}: ${why}.`));
  }

  #fail(error: SpeechError): void {
    if (this.#state !== "connecting" && this.#state !== "open") return;
    this.#finish("failed", error);
    this.#hangUp();
    this.emit("error", error);
  }

  #finish(state: "closed" | "failed", error: SpeechError): void {
    if (this.#state !== "connecting" && this.#state !== "open") return;
    for (const timer of this.#timers) clearInterval(timer);
    // Without WebRTC here there is neither.
    if (this.#channel) this.#channel.onclose = null;
    if (this.#peer) {
      this.#peer.onconnectionstatechange = null;
      this.#peer.close();
    }
    this.#become(state);
    this.#opening?.reject(error);
    this.#ending?.reject(error);
    for (const flush of this.#flushes.values()) flush.reject(error);
    this.#flushes.clear();
  }

  #become(state: CallState): void {
    this.#state = state;
    this.emit("state", state);
  }
}

function gone(): SpeechError {
  return new SpeechError("closed", "There is no call that is open.");
}

function asError(failure: unknown): SpeechError {
  if (failure instanceof SpeechError) return failure;
  return new SpeechError("connection_failed", `No call can be made here: ${String(failure)}.`, { cause: failure });
}

/** The error in an answer of the server, or of a proxy before it. */
function refusal(answer: Response, body: string): SpeechError {
  const retry = answer.headers.get("retry-after-ms");
  const retryAfterMs = retry === null ? undefined : Number(retry);
  try {
    const { code, type, message, param } = (JSON.parse(body) as { error: Record<string, string | null> }).error;
    return new SpeechError(code ?? type ?? "error", message ?? "", { retryAfterMs, param: param ?? undefined });
  } catch {
    return new SpeechError(`http_${answer.status}`, `The server, or a proxy before it, answered with status ${answer.status}.`, {
      retryAfterMs,
    });
  }
}
