import { byId } from "../page/dom";
import { onTheme } from "../page/theme";

/** A bar and the gap behind it, in CSS pixels. */
const BAR_PX = 3;
const GAP_PX = 2;
/** Each bar of a live wave is the loudest moment of so many seconds. */
const BAR_S = 0.06;
/** Between how sound is measured (1) and how it is heard. */
const CURVE = 0.6;
const STILL_MS = 500;

interface Bar {
  peak: number;
  atS: number | undefined;
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** The picture of the sound. Live it scrolls, and sound whose words are settled is in the accent's colour; of a recording it
 * shows the whole, coloured up to where it is played. */
export class Wave {
  readonly #canvas = byId("wave", HTMLCanvasElement);
  readonly #pen = this.#canvas.getContext("2d")!;
  #bars: Bar[] = [];
  #peak = 0;
  #filled = 0;
  #settled = 0;
  #whole: Float32Array | undefined;
  #share = 0;
  #planned = false;
  #drawnAt = 0;

  constructor() {
    new ResizeObserver(() => this.#plan()).observe(this.#canvas);
    onTheme(() => this.#plan());
  }

  /** Begin a live wave. */
  live(): void {
    this.#whole = undefined;
    this.#bars = [];
    this.#peak = this.#filled = this.#settled = 0;
    this.#plan();
  }

  /** So many seconds of sound, whose loudest sample is `peak`; where they stand in all that was sent, undefined: they
   * are not sent. */
  push(peak: number, seconds: number, atS: number | undefined): void {
    this.#peak = Math.max(this.#peak, peak);
    this.#filled += seconds;
    if (this.#filled < BAR_S - 1e-6) return;
    this.#filled -= BAR_S;
    this.#bars.push({ peak: this.#peak, atS });
    this.#peak = 0;
    if (this.#bars.length > 2_000) this.#bars.splice(0, 1_000);
    this.#plan();
  }

  /** The words of the sound before this second are settled. */
  settled(seconds: number): void {
    this.#settled = seconds;
    this.#plan();
  }

  /** Show a recording. `peaks` undefined: a plain line. */
  whole(peaks: Float32Array | undefined): void {
    this.#whole = peaks ?? new Float32Array(1);
    this.#share = 0;
    this.#plan();
  }

  /** The share of the recording that was played, 0..1. */
  played(share: number): void {
    this.#share = share;
    this.#plan();
  }

  #plan(): void {
    if (this.#planned) return;
    this.#planned = true;
    const draw = (): void => {
      this.#planned = false;
      this.#drawnAt = performance.now();
      this.#draw();
    };
    const wait = calm.matches ? STILL_MS - (performance.now() - this.#drawnAt) : 0;
    if (wait > 0) setTimeout(draw, wait);
    else requestAnimationFrame(draw);
  }

  #draw(): void {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = devicePixelRatio;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    this.#pen.scale(scale, scale);
    const { color, caretColor } = getComputedStyle(this.#canvas);
    const count = Math.floor(width / (BAR_PX + GAP_PX));
    for (let n = 0; n < count; n++) {
      const [peak, done] = this.#whole ? this.#part(n, count) : this.#bar(n, count);
      if (peak === undefined) continue;
      const tall = Math.max(BAR_PX, height * peak ** CURVE);
      this.#pen.fillStyle = done ? caretColor : color;
      this.#pen.globalAlpha = done ? 1 : 0.55;
      this.#pen.beginPath();
      this.#pen.roundRect(n * (BAR_PX + GAP_PX), (height - tall) / 2, BAR_PX, tall, BAR_PX / 2);
      this.#pen.fill();
    }
  }

  /** Of a live wave the newest bar is on the right. */
  #bar(n: number, count: number): [number | undefined, boolean] {
    const { peak, atS = Infinity } = this.#bars[this.#bars.length - count + n] ?? {};
    return [peak, atS < this.#settled];
  }

  #part(n: number, count: number): [number, boolean] {
    const whole = this.#whole!;
    const from = Math.floor((n * whole.length) / count);
    const to = Math.max(from + 1, Math.floor(((n + 1) * whole.length) / count));
    let peak = 0;
    for (let at = from; at < to; at++) peak = Math.max(peak, whole[at]!);
    return [peak, n / count < this.#share];
  }
}
