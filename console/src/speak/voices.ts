import { get } from "../page/api";
import { byId, keep, make, recall, setIcon } from "../page/dom";

export interface Voice {
  id: string;
  name: string;
  model: string;
  default: boolean;
  cloned: boolean;
}

export interface VoiceActs {
  /** Play a sample, or stop it. */
  sample(voice: Voice): void;
  remove(voice: Voice): void;
}

const SVG = "http://www.w3.org/2000/svg";

/** Which model speaks, with which of its voices. */
export class Voices {
  readonly #model = byId("model", HTMLSelectElement);
  readonly #list = byId("voice-list");
  #all: Voice[] = [];
  #chosen: Voice | undefined;
  #sampled: Voice | undefined;

  constructor(private readonly acts: VoiceActs) {
    this.#model.addEventListener("change", () => this.#offer());
  }

  get model(): string {
    return this.#model.value;
  }

  get voice(): string {
    return this.#chosen?.id ?? "";
  }

  get known(): boolean {
    return this.#all.length > 0;
  }

  /** Ask the server. `prefer`: the voice to choose. Rejects with SpeechError. */
  async load(prefer?: string): Promise<void> {
    if (prefer !== undefined) keep("voice", prefer);
    this.#all = ((await (await get("v1/audio/voices")).json()) as { voices: Voice[] }).voices;
    const models = [...new Set(this.#all.map((voice) => voice.model))];
    const model = this.#all.find(({ id }) => id === prefer)?.model ?? this.model;
    this.#model.replaceChildren(...models.map((name) => make("option", { value: name }, name)));
    if (models.includes(model)) this.#model.value = model;
    this.#model.disabled = models.length < 2;
    this.#offer();
  }

  /** Show whose sample is heard; undefined: no one's. */
  sampling(voice: Voice | undefined): void {
    this.#sampled = voice;
    for (const button of this.#list.querySelectorAll<HTMLElement>("[data-sample]")) {
      const on = button.dataset["sample"] === voice?.id;
      setIcon(button.querySelector("use")!, on ? "stop" : "play");
      button.setAttribute("aria-pressed", String(on));
    }
  }

  #offer(): void {
    const own = this.#all.filter((voice) => voice.model === this.model);
    const last = recall("voice");
    this.#chosen = own.find(({ id }) => id === last) ?? own.find((voice) => voice.default) ?? own[0];
    this.#list.replaceChildren(make("legend", {}, "Voice"), make("ul", { class: "voice-rows" }, ...own.map((voice) => this.#row(voice))));
    this.#reach();
    this.#list.querySelector(":checked")?.scrollIntoView({ block: "nearest" });
    this.sampling(this.#sampled);
  }

  /** Tab comes to the buttons of the chosen voice, and not to those of all others before it leaves the list. */
  #reach(): void {
    for (const row of this.#list.querySelectorAll("li")) {
      const chosen = row.querySelector("input")!.checked;
      for (const button of row.querySelectorAll("button")) button.tabIndex = chosen ? 0 : -1;
    }
  }

  #row(voice: Voice): HTMLElement {
    const radio = make("input", { type: "radio", name: "voice", value: voice.id });
    radio.checked = voice === this.#chosen;
    radio.addEventListener("change", () => {
      this.#chosen = voice;
      keep("voice", voice.id);
      this.#reach();
    });
    const badge = voice.cloned ? [make("span", { class: "badge" }, "cloned")] : [];
    const row = make("li", {}, make("label", {}, radio, " ", make("span", {}, voice.name), ...badge));
    const play = iconButton("play", `Sample of ${voice.name}`);
    play.dataset["sample"] = voice.id;
    play.setAttribute("aria-pressed", "false");
    play.addEventListener("click", () => this.acts.sample(voice));
    if (voice.cloned) {
      const remove = iconButton("bin", `Delete the voice ${voice.name}`);
      remove.addEventListener("click", () => this.acts.remove(voice));
      row.append(remove);
    }
    row.append(play);
    return row;
  }
}

function iconButton(symbol: string, label: string): HTMLButtonElement {
  const icon = document.createElementNS(SVG, "svg");
  icon.setAttribute("class", "icon");
  icon.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  setIcon(use, symbol);
  icon.append(use);
  return make("button", { class: "quiet small", type: "button", "aria-label": label, title: label }, icon);
}
