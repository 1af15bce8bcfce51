import {
  microphone,
  SpeechCall,
  SpeechError,
  SpeechStream,
  type Level,
  type Microphone,
  type Restart,
  type Segment,
  type StreamState,
  type Transcript,
} from "asr-serve";
import { address } from "../page/api";
import { key } from "../page/key";
import type { Lag } from "./lag";
import type { Take } from "./take";
import type { RichOptions } from "./wanted";

const FRAME_MS = 40;
/** As long as there is room for the sound. */
const GIVE_UP_MS = 120_000;

export interface TalkOptions {
  deviceId: string | undefined;
  model: string;
  language: string;
  /** Send silence as its length. */
  speechOnly: boolean;
  /** Over WebRTC. */
  calls: boolean;
  rich: RichOptions;
}

export interface TalkEvents {
  level(level: Level): void;
  /** The open segment has changed. What was said up to `settledS` will not. */
  text(settledS?: number): void;
  segment(segment: Segment): void;
  /** Segments are by others than they told. */
  speakers(): void;
  /** `lostS`: seconds of sound that found no room while there was no connection. */
  state(state: StreamState, lostS: number): void;
  /** The server has lost the session, and another goes on. */
  restarted(restart: Restart): void;
  /** The microphone is gone, or the session: `end` is still to be called. */
  broken(error: SpeechError): void;
}

/** What the sound goes to, and the text comes from. */
export interface Line {
  readonly transcript: Transcript;
}

/** Somebody talking: a microphone, a stream or a call, and what comes back. */
export class Talk {
  #microphone: Microphone | undefined;
  #stream: SpeechStream | undefined;
  #call: SpeechCall | undefined;
  #rateHz = 16_000;
  #samples = 0;
  #silent = 0;
  #lostSamples = 0;
  #deaf = false;
  #began = false;
  #abandoned = false;

  constructor(
    private readonly make: (line: Line) => Take,
    private readonly lag: Lag,
    private readonly events: TalkEvents,
  ) {}

  /** Seconds of sound so far. */
  get seconds(): number {
    return this.#samples / this.#rateHz;
  }

  /** Share of the sound that was sent as sound, 0..1; the rest was told as its length. */
  get sentShare(): number {
    return this.#samples ? 1 - this.#silent / this.#samples : 1;
  }

  /** Sound finds no room now, and is lost. */
  get deaf(): boolean {
    return this.#deaf;
  }

  /** Resolves when the server hears. Sound before that waits for it. Rejects with SpeechError. */
  async begin({ deviceId, model, language, speechOnly, calls, rich }: TalkOptions): Promise<void> {
    const opened = await microphone({
      ...(deviceId && { deviceId }),
      frameMs: FRAME_MS,
      ...(speechOnly && { speechOnly: { module: address("assets/vad.wasm") } }),
    });
    if (this.#abandoned) return opened.stop(); // allowed after all: nobody would see that it is on
    this.#microphone = opened;
    this.#rateHz = opened.rate;
    const apiKey = key();
    const asked = { ...(apiKey !== undefined && { apiKey }), ...(model && { model }), ...(language && { language }), ...rich };
    this.lag.begin(opened.rate, calls);
    opened.on("level", (level) => this.events.level(level));
    opened.on("ended", (error) => this.events.broken(error));
    try {
      if (calls) {
        const call = (this.#call = new SpeechCall({ url: address("v1/whip"), ...asked }));
        this.#listenToCall(call, this.make(call));
        await call.open(opened.track);
        opened.on("frame", (frame) => this.#called(frame)); // from now on the server hears
      } else {
        const stream = (this.#stream = new SpeechStream({
          url: address("v1/stream"),
          rate: opened.rate,
          newSession: true,
          reconnect: { giveUpAfterMs: GIVE_UP_MS },
          ...asked,
        }));
        this.#listen(stream, this.make(stream));
        opened.on("frame", (frame) => this.#frame(frame));
        opened.on("silence", (samples) => this.#silence(samples));
        await stream.open();
      }
      this.#began = true;
    } catch (failure) {
      await opened.stop();
      throw failure;
    }
  }

  /** No more sound. Resolves when all of it is text; rejects with SpeechError. */
  async end(): Promise<void> {
    if (this.#call) {
      // The browser sends by itself: what was just said is still on its way.
      const last = this.#call.state === "open" ? this.#call.end() : undefined;
      await Promise.allSettled([last]);
      await this.#microphone?.stop();
      await last;
      return;
    }
    await this.#microphone?.stop();
    if (this.#stream && this.#stream.state !== "failed" && this.#stream.state !== "closed") await this.#stream.end();
  }

  /** Let go of everything. */
  async abandon(): Promise<void> {
    this.#abandoned = true;
    this.#stream?.close();
    this.#call?.close();
    await this.#microphone?.stop();
  }

  #frame(frame: Int16Array): void {
    const stream = this.#stream!;
    this.#deaf = !stream.send(frame);
    if (this.#deaf) {
      this.#lostSamples += frame.length;
      return;
    }
    this.#samples += frame.length;
    this.lag.frame(frame.length, frame.byteLength, stream.state !== "open");
  }

  /** The browser has sent it by itself. */
  #called(frame: Int16Array): void {
    this.#samples += frame.length;
    this.lag.frame(frame.length, frame.byteLength, false);
  }

  #silence(samples: number): void {
    const stream = this.#stream!;
    this.#deaf = !stream.sendSilence(samples, true);
    if (this.#deaf) {
      this.#lostSamples += samples;
      return;
    }
    this.#samples += samples;
    this.#silent += samples;
    this.lag.frame(samples, 2 * samples, stream.state !== "open");
  }

  #listenToCall(call: SpeechCall, take: Take): void {
    call.on("partial", ({ end_s, text }) => {
      this.events.text();
      this.lag.text(text, end_s);
    });
    call.on("locked", ({ end_s }) => this.events.text(end_s));
    call.on("segment", () => this.events.segment(take.transcript.segments.at(-1)!));
    call.on("speakers", () => this.events.speakers());
    call.on("stats", (stats) => this.lag.network(stats));
    call.on("error", (error) => {
      if (this.#began) this.events.broken(error);
    });
  }

  #listen(stream: SpeechStream, take: Take): void {
    stream.on("partial", ({ end_s, text }) => {
      this.events.text();
      this.lag.text(text, end_s);
    });
    stream.on("locked", ({ end_s }) => this.events.text(end_s));
    stream.on("segment", () => {
      this.events.segment(take.transcript.segments.at(-1)!);
    });
    stream.on("speakers", () => this.events.speakers());
    stream.on("ack", ({ received_bytes }) => this.lag.ack(received_bytes));
    stream.on("restarted", (restart) => this.events.restarted(restart));
    stream.on("state", (state) => {
      this.events.state(state, this.#lostSamples / this.#rateHz);
      if (state === "open") this.#lostSamples = 0;
    });
    stream.on("error", (error) => {
      if (this.#began) this.events.broken(error);
    });
  }
}
