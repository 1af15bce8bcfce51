import type { Model } from "../page/api";
import { byId, make } from "../page/dom";
import { language } from "../page/words";
import type { Settings } from "./run";

/** Model and options of one side. */
export class SideSettings {
  readonly #model: HTMLSelectElement;
  readonly #language: HTMLSelectElement;
  readonly #hotwords: HTMLInputElement;
  readonly #temperature: HTMLInputElement;
  #known: readonly Model[] = [];
  /** The model that somebody has chosen. */
  #picked: string | undefined;

  constructor(private readonly side: "a" | "b") {
    this.#model = byId(`model-${side}`, HTMLSelectElement);
    this.#language = byId(`language-${side}`, HTMLSelectElement);
    this.#hotwords = byId(`hotwords-${side}`, HTMLInputElement);
    this.#temperature = byId(`temperature-${side}`, HTMLInputElement);
    this.#model.addEventListener("change", () => {
      this.#picked = this.#model.value;
      this.#offer();
    });
    this.#temperature.addEventListener("input", () => {
      byId(`temperature-${side}-told`).textContent = this.#temperature.value;
    });
  }

  get settings(): Settings {
    return {
      model: this.#model.value,
      language: this.#language.value,
      hotwords: this.#hotwords.disabled ? "" : this.#hotwords.value.trim(),
      temperature: this.#temperature.disabled ? 0 : Number(this.#temperature.value),
    };
  }

  /** Offer these models. `prefer`: number of the one that is chosen at first, among those that are ready. */
  know(models: readonly Model[], prefer: number): void {
    this.#known = models;
    const ready = models.filter(({ state }) => state === "ready");
    const chosen = this.#picked ?? (ready[prefer] ?? ready[0])?.id;
    this.#model.replaceChildren(
      ...models.map(({ id, state }) => {
        const option = make("option", { value: id }, state === "ready" ? id : `${id} (${state.replaceAll("_", " ")})`);
        option.disabled = state !== "ready";
        option.selected = id === chosen;
        return option;
      }),
    );
    this.#offer();
  }

  enable(on: boolean): void {
    byId(`side-${this.side}`, HTMLFieldSetElement).disabled = !on;
  }

  #offer(): void {
    const model = this.#known.find(({ id }) => id === this.#model.value);
    const codes = model?.languages ?? [];
    const chosen = this.#language.value;
    const options = codes.length > 1 ? ["", ...codes] : codes;
    this.#language.replaceChildren(
      ...options.map((code) => {
        const option = make("option", { value: code }, code ? language(code) : "As it is spoken");
        option.selected = code === chosen;
        return option;
      }),
    );
    this.#language.disabled = codes.length < 2;
    this.#hotwords.disabled = !model?.hotwords;
    this.#hotwords.placeholder = model && !model.hotwords ? "This model takes none" : "";
    this.#temperature.disabled = model?.lag_ms != null; // a streaming model has no decoder for it
  }
}
