import { RATE_HZ } from "./request";

/** Between the first piece and its sound: for the browser to get it to the speaker in time. */
const LEAD_S = 0.05;

/** Sound as it comes: every piece is lined up on the audio clock behind the one before it. */
export class Player {
  readonly #context = new AudioContext({ sampleRate: RATE_HZ });
  readonly analyser = this.#context.createAnalyser();
  /** Of the pieces that are not over: where each begins, on the audio clock and in the speech. */
  #pieces: { atS: number; fromS: number; untilS: number }[] = [];
  #endS = 0;
  #sentS = 0;
  /** How often the sound ran out before more of it came. */
  gaps = 0;

  constructor() {
    this.analyser.connect(this.#context.destination);
  }

  /** Play it behind all that came before. */
  push(pcm: Int16Array): void {
    if (!pcm.length) return;
    const buffer = this.#context.createBuffer(1, pcm.length, RATE_HZ);
    buffer.copyToChannel(Float32Array.from(pcm, (sample) => sample / 32_768), 0);
    const now = this.#context.currentTime;
    if (this.#endS < now) {
      if (this.#endS) this.gaps++;
      this.#endS = now + LEAD_S;
    }
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.analyser);
    source.start(this.#endS);
    const piece = { atS: this.#endS, fromS: this.#sentS, untilS: this.#endS + buffer.duration };
    this.#pieces.push(piece);
    this.#endS = piece.untilS;
    this.#sentS += buffer.duration;
  }

  /** How much of the speech has been heard. */
  get seconds(): number {
    const now = this.#context.currentTime;
    while (this.#pieces.length > 1 && this.#pieces[0]!.untilS <= now) this.#pieces.shift();
    const piece = this.#pieces[0];
    if (!piece) return 0;
    return piece.fromS + Math.min(Math.max(0, now - piece.atS), piece.untilS - piece.atS);
  }

  /** How much is here and has not been heard. */
  get aheadS(): number {
    return Math.max(0, this.#endS - this.#context.currentTime);
  }

  async close(): Promise<void> {
    if (this.#context.state !== "closed") await this.#context.close();
  }
}
