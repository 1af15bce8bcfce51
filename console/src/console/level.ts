import { byId } from "../page/dom";

const FLOOR_DB = -60;
/** The bar falls by so much a second, as meters do, and leaps up at once. */
const FALL_DB = 30;
const TOLD_MS = 500;

/** The bar that says how loud it is. */
export class Meter {
  readonly #meter: HTMLElement;
  readonly #fill: HTMLElement;
  #db = FLOOR_DB;
  #at = 0;
  #toldAt = 0;

  constructor(id = "level") {
    [this.#meter, this.#fill] = [byId(id), byId(`${id}-fill`)];
  }

  /** `peak` of the last moment, 0..1. */
  level(peak: number): void {
    const now = performance.now();
    const fallen = this.#db - (FALL_DB * Math.min(1_000, now - this.#at)) / 1_000;
    this.#at = now;
    this.#db = Math.max(FLOOR_DB, fallen, peak > 0 ? 20 * Math.log10(peak) : FLOOR_DB);
    this.#fill.style.transform = `scaleX(${1 - this.#db / FLOOR_DB})`;
    this.#meter.toggleAttribute("data-clipped", peak >= 0.99);
    if (now - this.#toldAt < TOLD_MS) return;
    this.#toldAt = now;
    this.#meter.setAttribute("aria-valuenow", String(Math.round(this.#db)));
    this.#meter.setAttribute("aria-valuetext", this.#db <= -50 ? "silent" : `${Math.round(this.#db)} decibels`);
  }

  rest(): void {
    this.#db = FLOOR_DB;
    this.#toldAt = 0;
    this.level(0);
  }
}
