import { microphone, SpeechError, type Microphone } from "asr-serve";

/** A microphone that makes a WAV file: 16 bits, one channel. */
export class Recorder {
  #opened: Microphone | undefined;
  #frames: Int16Array<ArrayBuffer>[] = [];
  #samples = 0;
  #failed: SpeechError | undefined;
  #stopped = false;

  /** `level`: the loudest sample of the last moment, 0..1. `full`: `longestS` seconds are recorded, or the microphone is
   * gone; `stop` gives what there is. */
  constructor(
    private readonly rateHz: number,
    private readonly longestS: number,
    private readonly level: (peak: number, seconds: number) => void,
    private readonly full: () => void,
  ) {}

  /** Resolves when it records, or once the browser has answered after `stop`: then the microphone is off again. Rejects
   * with SpeechError, as `microphone` does. */
  async start(): Promise<void> {
    const opened = await microphone({ rate: this.rateHz });
    if (this.#stopped) return opened.stop();
    this.#opened = opened;
    opened.on("level", ({ peak }) => this.level(peak, this.#samples / this.rateHz));
    opened.on("frame", (frame) => {
      if (this.#samples >= this.longestS * this.rateHz) return;
      this.#frames.push(frame);
      this.#samples += frame.length;
      if (this.#samples >= this.longestS * this.rateHz) this.full();
    });
    opened.on("ended", (error) => {
      this.#failed = error;
      this.full();
    });
  }

  /** Why the microphone stopped by itself; undefined: it did not. */
  get failed(): SpeechError | undefined {
    return this.#failed;
  }

  /** End it. Resolves with what was recorded; undefined: nothing was. */
  async stop(name: string): Promise<File | undefined> {
    this.#stopped = true;
    await this.#opened?.stop();
    if (!this.#samples) return undefined;
    return new File([wavHead(this.#samples, this.rateHz), ...this.#frames], name, { type: "audio/wav" });
  }
}

/** Header of a RIFF file of 16-bit samples in one channel. */
export function wavHead(samples: number, rateHz: number): ArrayBuffer {
  const head = new DataView(new ArrayBuffer(44));
  const text = (at: number, letters: string): void => [...letters].forEach((letter, n) => head.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, 36 + 2 * samples, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true); // PCM
  head.setUint16(22, 1, true);
  head.setUint32(24, rateHz, true);
  head.setUint32(28, 2 * rateHz, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  text(36, "data");
  head.setUint32(40, 2 * samples, true);
  return head.buffer;
}
