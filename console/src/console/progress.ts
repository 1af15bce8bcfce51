import { byId } from "../page/dom";
import { clock, size } from "../page/words";

/** How far a recording is: sent, then heard. */
export class Progress {
  readonly #room = byId("progress");
  readonly #what = byId("progress-what");
  readonly #part = byId("progress-part");
  readonly #bar = byId("progress-bar");
  readonly #fill = byId("progress-fill");
  #whole = false;
  #durationS: number | undefined;
  #heardS = 0;
  #late = false;
  #sinceMs = 0;
  #timer: ReturnType<typeof setInterval> | undefined;

  /** `late`: text comes when all was heard, and not before. */
  begin(bytes: number, late: boolean): void {
    this.#late = late;
    this.#whole = false;
    this.#durationS = undefined;
    this.#heardS = 0;
    this.#room.hidden = false;
    this.sent(0, bytes);
  }

  /** Of the upload. */
  sent(bytes: number, total: number): void {
    this.#whole = bytes >= total;
    if (this.#whole) return this.#begun();
    this.#what.textContent = `Uploading, ${size(bytes)} of ${size(total)}`;
    this.#show(total ? bytes / total : 0);
  }

  /** Text is there up to this second. */
  heard(seconds: number): void {
    this.#heardS = seconds;
    if (this.#whole) this.#listen();
  }

  /** How long the recording is. */
  lasts(seconds: number): void {
    this.#durationS = seconds;
    if (this.#whole) this.#listen();
  }

  end(): void {
    clearInterval(this.#timer);
    this.#timer = undefined;
    this.#room.hidden = true;
  }

  #begun(): void {
    if (this.#late && this.#timer === undefined) {
      this.#sinceMs = performance.now();
      this.#timer = setInterval(() => this.#listen(), 1_000);
    }
    this.#listen();
  }

  #listen(): void {
    if (this.#late && !this.#heardS) {
      this.#what.textContent = "Listening for who speaks: the text comes when all is heard";
      this.#show(undefined);
      this.#part.textContent = clock((performance.now() - this.#sinceMs) / 1_000); // something moves, with a number
      return;
    }
    const until = this.#heardS ? `, text up to ${clock(this.#heardS)}` : "";
    this.#what.textContent = `Listening${until}`;
    this.#show(this.#durationS && this.#heardS ? Math.min(1, this.#heardS / this.#durationS) : undefined);
  }

  #show(share: number | undefined): void {
    this.#bar.setAttribute("aria-label", this.#what.textContent);
    if (share === undefined) {
      this.#bar.dataset["kind"] = "unknown";
      this.#bar.removeAttribute("aria-valuenow");
      this.#fill.style.transform = "";
      this.#part.textContent = "";
      return;
    }
    const percent = Math.floor(100 * share);
    delete this.#bar.dataset["kind"];
    this.#bar.setAttribute("aria-valuenow", String(percent));
    this.#fill.style.transform = `scaleX(${share})`;
    this.#part.textContent = `${percent} %`;
  }
}
