import { byId } from "../page/dom";

const BARS = 64;

/** What is heard right now, as bars. */
export class Bars {
  readonly #canvas = byId("wave", HTMLCanvasElement);
  readonly #pen = this.#canvas.getContext("2d")!;

  draw(analyser: AnalyserNode): void {
    const { clientWidth, clientHeight } = this.#canvas;
    const scale = devicePixelRatio;
    this.#canvas.width = clientWidth * scale;
    this.#canvas.height = clientHeight * scale;
    const levels = new Uint8Array(analyser.frequencyBinCount);
    analyser.getByteFrequencyData(levels);
    const each = Math.floor((levels.length * 0.7) / BARS); // above is little of a voice
    const step = this.#canvas.width / BARS;
    this.#pen.fillStyle = getComputedStyle(this.#canvas).caretColor;
    for (let bar = 0; bar < BARS; bar++) {
      const loudest = Math.max(...levels.subarray(bar * each, (bar + 1) * each)) / 255;
      const height = Math.max(scale, loudest * this.#canvas.height * 0.9);
      this.#pen.globalAlpha = 0.25;
      this.#pen.fillRect(bar * step + step * 0.2, (this.#canvas.height - height) / 2, step * 0.6, height);
    }
  }

  clear(): void {
    this.#pen.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
  }
}
