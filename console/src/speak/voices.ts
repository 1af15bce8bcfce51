import { get } from "../page/api";
import { byId, keep, make, recall } from "../page/dom";

interface Voice {
  id: string;
  name: string;
  model: string;
  default: boolean;
}

/** Which model speaks, with which of its voices. */
export class Voices {
  readonly #model = byId("model", HTMLSelectElement);
  readonly #voice = byId("voice", HTMLSelectElement);
  #all: Voice[] = [];

  constructor() {
    this.#model.addEventListener("change", () => this.#offer());
    this.#voice.addEventListener("change", () => keep("voice", this.voice));
  }

  get model(): string {
    return this.#model.value;
  }

  get voice(): string {
    return this.#voice.value;
  }

  get known(): boolean {
    return this.#all.length > 0;
  }

  /** Ask the server. Rejects with SpeechError. */
  async load(): Promise<void> {
    this.#all = ((await (await get("v1/audio/voices")).json()) as { voices: Voice[] }).voices;
    const models = [...new Set(this.#all.map((voice) => voice.model))];
    this.#model.replaceChildren(...models.map((name) => make("option", { value: name }, name)));
    this.#model.disabled = models.length < 2;
    this.#offer();
  }

  #offer(): void {
    const own = this.#all.filter((voice) => voice.model === this.model);
    this.#voice.replaceChildren(...own.map(({ id, name }) => make("option", { value: id }, name)));
    this.#voice.disabled = own.length < 2;
    const wanted = own.find(({ id }) => id === recall("voice")) ?? own.find((voice) => voice.default) ?? own[0];
    if (wanted) this.#voice.value = wanted.id;
  }
}
