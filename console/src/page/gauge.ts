import { make } from "./dom";

/** A bar. `progress`: of work that goes on; `meter`: of how much is used. */
export class Gauge {
  readonly element: HTMLElement;
  readonly #fill = make("i");

  constructor(kind: "progressbar" | "meter", label: string) {
    const values = { "aria-valuemin": "0", "aria-valuemax": "100" };
    this.element = make("div", { class: "track", role: kind, "aria-label": label, ...values }, this.#fill);
  }

  /** `share`: 0..1. `text`: the same in words, for screen readers. */
  set(share: number, text: string): void {
    const whole = Math.min(1, Math.max(0, share));
    this.element.setAttribute("aria-valuenow", String(Math.floor(100 * whole)));
    this.element.setAttribute("aria-valuetext", text);
    this.#fill.style.transform = `scaleX(${whole})`;
  }
}
