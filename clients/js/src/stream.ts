import { Connection } from "./connection.js";
import { Emitter } from "./emitter.js";
import { SpeechError } from "./errors.js";
import { counted } from "./events.js";
import type * as wire from "./events.js";
import { beginMessage, beginUrl, expectOptions, keyProtocols, resumeUrl, socketClass, type StreamOptions } from "./options.js";
import { Outgoing, type Command } from "./outgoing.js";
import { toBytes } from "./pcm.js";
import { Retry } from "./retry.js";
import { Transcript, type Segment } from "./transcript.js";
import { waiting, type Waiting } from "./waiting.js";

export type StreamState = "connecting" | "open" | "reconnecting" | "closed" | "failed";

/** What there is to say about a state: why, and when the next attempt is. */
export interface StateDetail {
  reason?: string;
  retryInMs?: number;
  error?: SpeechError;
}

/** A new session goes on where the server lost the one before. */
export interface Restart {
  /** Where it begins, seconds. What was said shortly before may be missing. */
  position_s: number;
  /** The words that were open; they will not change any more. */
  segment?: Segment;
}

export interface StreamEvents {
  session: [wire.SessionEvent];
  partial: [wire.PartialEvent];
  ack: [wire.AckEvent];
  locked: [wire.LockedEvent];
  segment: [wire.SegmentEvent];
  flushed: [wire.FlushedEvent];
  turn: [wire.TurnEvent];
  speakers: [wire.SpeakersEvent];
  end: [wire.EndEvent];
  restarted: [Restart];
  error: [SpeechError];
  state: [StreamState, StateDetail];
}

const MAX_BUFFERED_BYTES = 4 << 20;
/** Several seconds of any encoding, so that an ack is due before the buffer is full. */
const LEAST_BUFFERED_BYTES = 512 << 10;
const SILENCE_MS = 15_000;
/** The session is not to be had any more. */
const LOST_SESSION = ["session_expired", "events_expired"];
/** Encodings that tell how long they are. */
const SAMPLE_BYTES: Partial<Record<string, number>> = { s16le: 2, mulaw: 1, alaw: 1 };
const LONGEST_ID = 200;
/** The server has room for twice as many: after a resume each may be there twice. */
const MOST_FLUSHES = 32;

/** One caller's audio going out, and what was heard coming back.
 *
 * A lost connection is replaced, and the session goes on where it was: no word is lost or told twice. With `newSession` a
 * lost session is replaced too, by one that goes on with the audio that the server had not acknowledged. Each `on`
 * listener is told after the transcript knows.
 */
export class SpeechStream extends Emitter<StreamEvents> {
  readonly transcript = new Transcript();
  #state: StreamState = "closed";
  #session: wire.SessionEvent | undefined;
  #seq = 0;
  /** Events up to this one are older than the connection: until they have come again, nothing is sent. */
  #missed = 0;
  #connection: Connection | undefined;
  #greeted = false;
  /** The session is lost: the next connection begins another. */
  #anew = false;
  #origin: wire.Origin = { bytes: 0, seconds: 0, segments: 0 };
  /** The session was stored outside its server at some time: any server may go on with it. */
  #stored = false;
  /** The newest claim of it. */
  #epoch = 0;
  /** So many seconds of audio the server has. */
  #receivedS = 0;
  /** What the server complained of on this connection. */
  #failure: SpeechError | undefined;
  readonly #out: Outgoing;
  readonly #maxBytes: number;
  readonly #retry: Retry;
  readonly #flushes = new Map<string, { command: Command; waiting: Waiting<wire.FlushedEvent> }>();
  /** Answered flushes that the server may have been asked for twice, and so may answer again. */
  readonly #answered = new Set<string>();
  #flushCount = 0;
  #opening: Waiting<wire.SessionEvent> | undefined;
  #ending: { command: Command; waiting: Waiting<Transcript> } | undefined;
  #room: Waiting<void> | undefined;

  /** Throws SpeechError when an option cannot be. */
  constructor(private readonly options: StreamOptions) {
    super();
    expectOptions(options);
    socketClass(options);
    beginUrl(options);
    this.#maxBytes = options.maxBufferedBytes ?? MAX_BUFFERED_BYTES;
    if (!(this.#maxBytes >= LEAST_BUFFERED_BYTES)) {
      throw new SpeechError("bad_option", `maxBufferedBytes ${this.#maxBytes}: ${LEAST_BUFFERED_BYTES} or more.`);
    }
    this.#out = new Outgoing(options.encoding !== "opus", SAMPLE_BYTES[options.encoding ?? "s16le"], this.#maxBytes);
    this.#retry = new Retry(options.reconnect?.maxDelayMs, () => this.#connect());
  }

  get state(): StreamState {
    return this.#state;
  }

  get sessionId(): string | undefined {
    return this.#session?.session_id;
  }

  /** Audio that is kept because the server does not have it yet. */
  get bufferedBytes(): number {
    return this.#out.bytes;
  }

  /** Begin a session; once. Rejects with SpeechError, `retryAfterMs` when the server is full. */
  open(): Promise<wire.SessionEvent> {
    if (this.#opening) return this.#opening.promise;
    this.#opening = waiting();
    this.#become("connecting", {});
    this.#connect();
    return this.#opening.promise;
  }

  /** Send audio, or keep it while there is no connection. False: nothing was taken, since the buffer is full
   * or the stream is not open. Float32Array becomes s16le. Throws SpeechError for audio that can never be sent. */
  send(audio: ArrayBuffer | ArrayBufferView): boolean {
    const bytes = toBytes(audio, this.options.encoding ?? "s16le");
    const most = this.#maxBytes / 2; // at once, so that what is before it is enough for an ack
    if (bytes.length > most) throw new SpeechError("bad_audio", `${bytes.length} bytes at once: at most ${most}.`);
    if (!this.#active || this.#ending || this.#out.bytes + bytes.length > this.#maxBytes) return false;
    this.#out.put(bytes);
    this.#pump();
    return true;
  }

  /** So many samples of silence, at the stream's rate, in place of audio: a few bytes are sent, and times stay as they
   * are. `noise`: the server goes on with the noise of the audio before it, as a microphone's gate wants; else it is zeros.
   * False, and SpeechError, as of `send`; not of `opus` and `ogg`, which have silence of their own. */
  sendSilence(samples: number, noise = false): boolean {
    const sampleBytes = SAMPLE_BYTES[this.options.encoding ?? "s16le"];
    if (!sampleBytes) throw new SpeechError("bad_audio", `Silence is no count in ${this.options.encoding}: send its packets.`);
    const most = Math.floor(this.#maxBytes / 2 / sampleBytes);
    if (!Number.isInteger(samples) || samples < 0 || samples > most) {
      throw new SpeechError("bad_audio", `${samples} samples of silence: a whole number up to ${most}.`);
    }
    if (this.#out.written % sampleBytes) throw new SpeechError("bad_audio", "Silence came in the middle of a sample.");
    if (!this.#active || this.#ending || this.#out.bytes + samples * sampleBytes > this.#maxBytes) return false;
    this.#out.silence(samples, noise);
    this.#pump();
    return true;
  }

  /** After a `send` that was false: resolves when the server has taken more. */
  room(): Promise<void> {
    if (!this.#active || this.#ending) return Promise.reject(this.#gone());
    this.#room ??= waiting();
    return this.#room.promise;
  }

  /** Make final what was sent so far. Resolves when every word before is. The same id again is the same flush. */
  flush(id: string = `flush-${++this.#flushCount}`): Promise<wire.FlushedEvent> {
    const before = this.#flushes.get(id);
    if (before) return before.waiting.promise;
    if (!id || id.length > LONGEST_ID || this.#answered.has(id)) {
      return Promise.reject(new SpeechError("bad_option", `The flush id ${id}: a new one, of up to ${LONGEST_ID}.`));
    }
    if (!this.#active || this.#ending) return Promise.reject(this.#gone());
    if (this.#flushes.size >= MOST_FLUSHES) {
      return Promise.reject(new SpeechError("at_capacity", `${MOST_FLUSHES} flushes are under way: await one.`));
    }
    const flush = { command: this.#out.command({ type: "flush", id }), waiting: waiting<wire.FlushedEvent>() };
    this.#flushes.set(id, flush);
    this.#pump();
    return flush.waiting.promise;
  }

  /** No more audio. Resolves when all of it is text. */
  end(): Promise<Transcript> {
    if (this.#ending) return this.#ending.waiting.promise;
    if (!this.#active) return Promise.reject(this.#gone());
    this.#ending = { command: this.#out.command({ type: "end" }), waiting: waiting() };
    this.#pump();
    return this.#ending.waiting.promise;
  }

  /** Hang up now; what was not heard is lost. */
  close(): void {
    if (!this.#active) return;
    this.#connection?.hangUp();
    this.#finish("closed", new SpeechError("closed", "The stream was closed before its end."));
  }

  get #active(): boolean {
    return this.#state === "connecting" || this.#state === "open" || this.#state === "reconnecting";
  }

  #connect(): void {
    const { options } = this;
    this.#greeted = false;
    this.#connection?.drop();
    const session = this.#anew ? undefined : this.#session;
    const url = session ? resumeUrl(options, session.session_id, this.#seq, this.#claim) : beginUrl(options);
    const first = session ? undefined : beginMessage(options);
    try {
      const events = {
        event: (event: wire.ServerEvent) => this.#hear(event),
        lost: (reason: string, deliberate: boolean) => this.#lost(reason, deliberate),
      };
      const silenceMs = options.reconnect?.silenceMs ?? SILENCE_MS;
      this.#connection = new Connection(socketClass(options), url, keyProtocols(options), silenceMs, events, first);
    } catch (cause) {
      // A page from https may not connect to ws, for one.
      this.#fail(new SpeechError("connection_failed", `Cannot connect to ${options.url}: ${String(cause)}.`, { cause }));
    }
  }

  /** What a server must have, to go on with a session that is stored. */
  get #claim(): Record<string, number> {
    return this.#stored ? { received: this.#out.dropped - this.#origin.bytes, epoch: this.#epoch } : {};
  }

  #hear(said: wire.ServerEvent): void {
    if (said.type === "error") return this.#refused(said);
    if (said.type === "session") return this.#greet(said);
    const event = counted(said, this.#origin);
    if (!this.#greeted) return this.#broken(`${event.type} before session`);
    if ("seq" in event) {
      if (event.seq !== this.#seq + 1) return this.#broken(`event ${event.seq} after event ${this.#seq}`);
      this.#seq = event.seq;
    }
    this.#retry.restored();
    this.transcript.apply(event);
    switch (event.type) {
      case "ack":
        return this.#acknowledged(event);
      case "flushed":
        this.#flushed(event);
        break;
      case "end":
        return this.#ended(event);
      case "partial":
        this.emit("partial", event);
        break;
      case "locked":
        this.emit("locked", event);
        break;
      case "segment":
        this.emit("segment", event);
        break;
      case "turn":
        this.emit("turn", event);
        break;
      case "speakers":
        this.emit("speakers", event);
        break;
    }
    this.#pump();
  }

  #greet(said: wire.SessionEvent): void {
    const restart = this.#anew ? this.#renew() : undefined;
    const event = counted(said, this.#origin);
    if (!restart && this.#session && event.session_id !== this.#session.session_id) return this.#broken("another session");
    const known = this.#out.received;
    this.#stored ||= event.durable === true;
    const durable = event.durable === true || !this.#stored;
    if (!this.#out.resume(event.received_bytes, durable)) return this.#broken(`${event.received_bytes} bytes received`);
    if (this.#out.received > known) this.#makeRoom(); // the acknowledgements were lost with the connection
    this.#session = event;
    this.#greeted = true;
    this.#failure = undefined;
    this.#missed = event.last_seq;
    this.#epoch = Math.max(this.#epoch, event.epoch ?? 0);
    this.#retry.connected();
    this.transcript.apply(event);
    if (restart) this.emit("restarted", restart);
    this.#become("open", {});
    this.#opening?.resolve(event);
    this.emit("session", event);
    this.#pump();
  }

  /** There is a session, and it is another one. */
  #renew(): Restart {
    this.#anew = this.#stored = false;
    this.#seq = this.#epoch = 0;
    this.#answered.clear();
    const { rate_hz, encoding } = this.#session!;
    const sampleBytes = SAMPLE_BYTES[encoding];
    this.#out.renew([...this.#flushes.values()].map(({ command }) => command), sampleBytes ?? 1);
    const seconds = sampleBytes ? this.#out.received / sampleBytes / rate_hz : this.#receivedS;
    const segment = this.transcript.settle();
    this.#origin = { bytes: this.#out.received, seconds, segments: this.transcript.segments.length };
    return { position_s: seconds, ...(segment && { segment }) };
  }

  #acknowledged(event: wire.AckEvent): void {
    this.#receivedS = event.received_s;
    if (!this.#out.acknowledge(event.received_bytes, event.durable !== false)) return this.#broken(`${event.received_bytes} bytes received`);
    this.emit("ack", event);
    this.#makeRoom();
    this.#pump();
  }

  /** For whoever waits to send. */
  #makeRoom(): void {
    this.#room?.resolve();
    this.#room = undefined;
  }

  #flushed(event: wire.FlushedEvent): void {
    const flush = this.#flushes.get(event.id);
    if (!flush) {
      if (!this.#answered.delete(event.id)) this.emit("flushed", event);
      return;
    }
    this.#flushes.delete(event.id);
    this.#out.drop(flush.command);
    if (flush.command.again) this.#answered.add(event.id);
    flush.waiting.resolve(event);
    this.emit("flushed", event);
  }

  #ended(event: wire.EndEvent): void {
    if (this.#leaving) {
      const { rate_hz, encoding } = this.#session!;
      const bytes = Math.round(event.duration_s * rate_hz) * (SAMPLE_BYTES[encoding] ?? 0);
      this.#out.acknowledge(Math.min(bytes, this.#out.written)); // heard, though there was no `ack` any more
      this.#receivedS = event.duration_s;
      if (!this.#ending || this.#out.bytes) return this.#beginAgain(this.#failure!);
    }
    this.#ending?.waiting.resolve(this.transcript); // first: a listener may close the stream
    this.emit("end", event);
    this.#connection?.hangUp();
    this.#finish("closed", new SpeechError("closed", "The session has ended."));
  }

  /** Send what may be sent now. */
  #pump(): void {
    if (!this.#greeted || this.#state !== "open" || this.#seq < this.#missed || this.#leaving) return;
    const connection = this.#connection!;
    for (let data = this.#out.take(); data !== undefined; data = this.#out.take()) connection.send(data);
    if (this.#out.full || this.#flushes.size || this.#ending) connection.expectAnswer();
  }

  #refused(event: wire.ErrorEvent): void {
    const error = new SpeechError(event.code, event.message, {
      retryAfterMs: event.retry_after_ms,
      param: event.param,
    });
    if (this.#greeted) {
      // Either the server closes now, or the rest of the text follows, and `end`.
      if (error.code === "out_of_turn" && this.#session!.resumed && this.#ending) return; // sent again, and needless
      if (this.#leaving) return; // of what was on its way
      this.#failure = error;
      if (!this.#leaving) this.emit("error", error);
    } else if (this.#session && !this.#anew && this.#renewable && LOST_SESSION.includes(error.code)) {
      this.#anew = true;
      this.#connect();
    } else if (this.#session && error.retryAfterMs !== undefined) {
      this.#connection?.drop();
      this.#retryLater(error.message, error);
    } else {
      this.#fail(error);
    }
  }

  get #renewable(): boolean {
    return this.options.newSession === true && this.options.encoding !== "ogg";
  }

  /** The server goes down, and another session goes on. */
  get #leaving(): boolean {
    return this.#failure?.code === "draining" && this.#renewable;
  }

  /** The session has ended, and not by our wish. */
  #beginAgain(why: SpeechError): void {
    this.#anew = true;
    this.#failure = undefined;
    this.#connection?.hangUp();
    this.#retryLater(why.message, why);
  }

  #broken(what: string): void {
    this.#fail(new SpeechError("protocol", `The server sent what the protocol does not have: ${what}.`));
  }

  #lost(reason: string, deliberate: boolean): void {
    if (!this.#session) {
      this.#fail(new SpeechError("connection_failed", `No session at ${this.options.url}: ${reason}. Is a server there?`));
    } else if (this.#leaving) {
      this.#retryLater(reason, this.#failure);
    } else if (deliberate && this.#failure) {
      this.#finish("failed", this.#failure);
    } else {
      this.#retryLater(reason);
    }
  }

  #retryLater(reason: string, refusal?: SpeechError): void {
    this.#greeted = false;
    const giveUpMs = this.options.reconnect?.giveUpAfterMs ?? this.#session!.resume_s * 1_000;
    const retryInMs = this.#retry.next(giveUpMs, refusal?.retryAfterMs);
    if (retryInMs !== undefined) this.#become("reconnecting", { reason, retryInMs });
    else this.#fail(refusal ?? new SpeechError("connection_lost", `The connection is lost, and not back: ${reason}.`));
  }

  #fail(error: SpeechError): void {
    this.#finish("failed", error);
    this.emit("error", error);
  }

  /** The last state: nobody waits any more. */
  #finish(state: "closed" | "failed", error: SpeechError): void {
    if (!this.#active) return; // a listener has closed it
    this.#retry.stop();
    this.#connection?.drop();
    this.#connection = undefined;
    this.#become(state, state === "failed" ? { error, reason: error.message } : {});
    this.#opening?.reject(error);
    this.#ending?.waiting.reject(error);
    this.#room?.reject(error);
    for (const { waiting } of this.#flushes.values()) waiting.reject(error);
    this.#flushes.clear();
  }

  #become(state: StreamState, detail: StateDetail): void {
    this.#state = state;
    this.emit("state", state, detail);
  }

  #gone(): SpeechError {
    return new SpeechError("closed", this.#ending ? "No more after end()." : `The stream is ${this.#state}.`);
  }
}
