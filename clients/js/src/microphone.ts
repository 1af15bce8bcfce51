import { Emitter } from "./emitter.js";
import { SpeechError } from "./errors.js";
import { toInt16 } from "./pcm.js";
import { expectNames } from "./options.js";
import { Resampler } from "./resample.js";

export interface MicrophoneOptions {
  deviceId?: string;
  /** These two please ears and cost a recogniser words. Default false; for a page that plays sound meanwhile, true. */
  echoCancellation?: boolean;
  noiseSuppression?: boolean;
  /** Default: as the browser thinks best. */
  autoGainControl?: boolean;
  /** Hz of the frames. Default 16 000. */
  rate?: number;
  /** Length of a frame. Default 100. */
  frameMs?: number;
  /** Find speech on the audio thread, and give frames of it alone; `silence` tells how much was between. */
  speechOnly?: SpeechOnlyOptions;
}

export interface SpeechOnlyOptions {
  /** Where vad.wasm is (this package has it as `asr-serve/vad.wasm`), or its bytes. */
  module: string | URL | ArrayBuffer;
  /** Probability at which speech starts. Default 0.3. */
  threshold?: number;
  /** Probability from which on speech goes on. Default 0.2. */
  negThreshold?: number;
  /** Sound before speech that goes with it. Default 640. */
  preRollMs?: number;
  /** Sound after speech that goes with it. Default 960. */
  hangoverMs?: number;
  /** Sound at the beginning that is sent in any case: the server hears the noise of the room. Default 512. */
  leadMs?: number;
}

/** Of 20 ms; 1 is full scale. */
export interface Level {
  rms: number;
  peak: number;
}

export interface MicrophoneEvents {
  /** Mono, at the rate asked for; the listener may keep it. With `speechOnly`, of any length. */
  frame: [Int16Array<ArrayBuffer>];
  /** With `speechOnly`: so many samples of silence in place of a frame. */
  silence: [number];
  level: [Level];
  /** It was unplugged, or the permission was withdrawn. */
  ended: [SpeechError];
}

const BLOCK_MS = 20;
/** Of what vad.wasm hears. */
const VOICE_HZ = 16_000;
/** An audio thread that was interrupted is not waited for. */
const FINISH_MS = 500;

/** The microphone, once the browser and whoever sits before it agree. In browsers only.
 *
 * Rejects with SpeechError: `insecure-context` (the page came over plain http), `no-permission`, `no-microphone`,
 * `in-use` (another program holds it); with `speechOnly`, `no-voice-activity` (the module cannot be had, or the browser
 * records at a rate of its own).
 */
export async function microphone(options: MicrophoneOptions = {}): Promise<Microphone> {
  expectNames(options.speechOnly ?? {}, GATE, "speechOnly.");
  // Before the device is open: what is said meanwhile would be lost.
  const voiceActivity = options.speechOnly && (await fetched(options.speechOnly.module));
  const stream = await ask(options);
  try {
    return await capture(stream, options, voiceActivity);
  } catch (failure) {
    for (const track of stream.getTracks()) track.stop();
    throw failure;
  }
}

/** An open microphone. It sends frames until `stop`. */
export class Microphone extends Emitter<MicrophoneEvents> {
  readonly rate: number;
  /** What the browser calls the device. */
  readonly label: string;
  /** What it records, for a call. */
  readonly track: MediaStreamTrack;
  readonly #context: AudioContext;
  readonly #resampler: Resampler | undefined;
  readonly #frame: Int16Array<ArrayBuffer>;
  #filled = 0;
  #closing: Promise<void> | undefined;
  #finished: (() => void) | undefined;

  /** Use `microphone()`. */
  constructor(
    track: MediaStreamTrack,
    context: AudioContext,
    rate: number,
    frameMs: number,
    private readonly gated?: MessagePort,
  ) {
    super();
    [this.track, this.#context, this.rate, this.label] = [track, context, rate, track.label];
    this.#resampler = context.sampleRate === rate ? undefined : new Resampler(context.sampleRate, rate);
    this.#frame = new Int16Array(Math.round((rate * frameMs) / 1_000));
    track.addEventListener("ended", () => {
      void this.stop();
      this.emit("ended", new SpeechError("no-microphone", `The microphone is gone: ${this.label}. Plug it in again.`));
    });
    context.addEventListener("statechange", () => {
      // A telephone call, or another page, may have interrupted it.
      if (context.state !== "running" && context.state !== "closed") void context.resume().catch(() => {});
    });
  }

  /** The audio thread has failed. */
  fail(): void {
    void this.stop();
    this.emit("ended", new SpeechError("no-voice-activity", "This browser cannot run vad.wasm on its audio thread."));
  }

  /** What the gate on the audio thread lets through. */
  pass({ speech, silence, finished }: Gated): void {
    if (speech) this.emit("frame", speech);
    if (silence) this.emit("silence", silence);
    if (finished) this.#finished?.();
  }

  /** A block from the audio thread, at the context's rate. */
  put(block: Float32Array): void {
    if (this.#closing) return;
    let [peak, power] = [0, 0];
    for (const sample of block) {
      peak = Math.max(peak, Math.abs(sample));
      power += sample * sample;
    }
    this.emit("level", { rms: Math.sqrt(power / block.length), peak });
    if (this.gated) return;
    let pcm = toInt16(this.#resampler ? this.#resampler.push(block) : block);
    while (pcm.length) {
      const taken = pcm.subarray(0, this.#frame.length - this.#filled);
      this.#frame.set(taken, this.#filled);
      this.#filled += taken.length;
      pcm = pcm.subarray(taken.length);
      if (this.#filled === this.#frame.length) this.#give();
    }
  }

  /** Let go of the device. What is left of the last frame is sent first. */
  stop(): Promise<void> {
    if (!this.#closing) {
      this.track.stop();
      this.#closing = this.#rest().then(() => this.#context.close()); // twice would be an error, and an unplugged one stops by itself
      if (this.#filled) this.#give();
    }
    return this.#closing;
  }

  /** The gate tells what it holds back. */
  async #rest(): Promise<void> {
    if (!this.gated) return;
    const finished = new Promise<void>((resolve) => (this.#finished = resolve));
    this.gated.postMessage("finish");
    await Promise.race([finished, new Promise((resolve) => setTimeout(resolve, FINISH_MS))]);
  }

  #give(): void {
    const frame = this.#frame.slice(0, this.#filled);
    this.#filled = 0;
    this.emit("frame", frame);
  }
}

/** From the gate on the audio thread. */
interface Gated {
  speech?: Int16Array<ArrayBuffer>;
  silence?: number;
  finished?: true;
}

const OPTIONS = {
  deviceId: true,
  echoCancellation: true,
  noiseSuppression: true,
  autoGainControl: true,
  rate: true,
  frameMs: true,
  speechOnly: true,
} as const satisfies Record<keyof MicrophoneOptions, true>;

async function ask(options: MicrophoneOptions): Promise<MediaStream> {
  expectNames(options, OPTIONS);
  const { deviceId, echoCancellation = false, noiseSuppression = false, autoGainControl } = options;
  if (!globalThis.isSecureContext || !navigator.mediaDevices) {
    throw new SpeechError("insecure-context", "Browsers give a microphone to pages from https or localhost only.");
  }
  const audio: MediaTrackConstraints = {
    ...(deviceId !== undefined && { deviceId: { exact: deviceId } }),
    echoCancellation,
    noiseSuppression,
    ...(autoGainControl !== undefined && { autoGainControl }),
  };
  try {
    return await navigator.mediaDevices.getUserMedia({ audio });
  } catch (cause) {
    throw refused(cause);
  }
}

function refused(cause: unknown): unknown {
  switch (cause instanceof DOMException ? cause.name : "") {
    case "NotFoundError":
    case "OverconstrainedError":
      return new SpeechError("no-microphone", "There is no microphone, or not this one. Plug one in.", { cause });
    case "NotAllowedError":
    case "SecurityError":
      return new SpeechError("no-permission", "The microphone is not allowed. Allow it in the address bar.", { cause });
    case "NotReadableError":
    case "AbortError":
      return new SpeechError("in-use", "The microphone cannot be read: another program may hold it.", { cause });
    default:
      return cause;
  }
}

const GATE = { module: true, threshold: true, negThreshold: true, preRollMs: true, hangoverMs: true, leadMs: true } as const;

/** Bytes of vad.wasm. */
async function fetched(module: string | URL | ArrayBuffer): Promise<ArrayBuffer> {
  if (module instanceof ArrayBuffer) return module;
  try {
    const answer = await fetch(module);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return await answer.arrayBuffer();
  } catch (cause) {
    throw new SpeechError("no-voice-activity", `vad.wasm cannot be fetched from ${String(module)}.`, { cause });
  }
}

async function capture(
  stream: MediaStream,
  { rate = 16_000, frameMs = 100, speechOnly }: MicrophoneOptions,
  voiceActivity: ArrayBuffer | undefined,
): Promise<Microphone> {
  const { threshold, negThreshold, preRollMs, hangoverMs } = speechOnly ?? {};
  const gate = { threshold, negThreshold, preRollMs, hangoverMs };
  const [context, source] = connect(stream, rate);
  try {
    if (speechOnly && (context.sampleRate !== VOICE_HZ || rate !== VOICE_HZ)) {
      const why = `It hears 16 kHz, and this browser records at ${context.sampleRate} Hz`;
      throw new SpeechError("no-voice-activity", `Speech cannot be found here. ${why}. Ask without speechOnly.`);
    }
    await context.audioWorklet.addModule(new URL("./capture-worklet.js", import.meta.url));
    const node = new AudioWorkletNode(context, "asr-serve-capture", {
      processorOptions: { blockFrames: Math.round((context.sampleRate * BLOCK_MS) / 1_000), voiceActivity, gate },
    });
    const track = stream.getAudioTracks()[0]!;
    const made = new Microphone(track, context, rate, frameMs, speechOnly && node.port);
    node.onprocessorerror = () => made.fail();
    node.port.onmessage = ({ data }: MessageEvent<Float32Array | Gated>) => {
      if (data instanceof Float32Array) made.put(data);
      else made.pass(data);
    };
    source.connect(node).connect(context.destination); // silence: it only keeps the node running, in Safari too
    await context.resume();
    return made;
  } catch (failure) {
    void context.close();
    throw failure;
  }
}

/** At the rate wanted, where the browser resamples; else (Firefox) at the device's. */
function connect(stream: MediaStream, sampleRate: number): [AudioContext, MediaStreamAudioSourceNode] {
  const context = new AudioContext({ sampleRate });
  try {
    return [context, context.createMediaStreamSource(stream)];
  } catch {
    void context.close();
    const own = new AudioContext();
    return [own, own.createMediaStreamSource(stream)];
  }
}
