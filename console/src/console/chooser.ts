import { models, type Model } from "../page/api";
import { byId, keep, make, recall } from "../page/dom";
import { language } from "../page/words";

const LOOK_AGAIN_MS = 3_000;
/** Value of the choice that names no model: the server has one for each recording. */
const AUTOMATIC = "";
/** Name by which the server chooses the model of the language that is spoken in a recording. */
const BY_LANGUAGE = "auto";

/** What to be heard with: model, language, microphone. */
export class Chooser {
  readonly #model = byId("model", HTMLSelectElement);
  readonly #language = byId("language", HTMLSelectElement);
  readonly #device = byId("device", HTMLSelectElement);
  readonly #transport = byId("transport", HTMLSelectElement);
  #known: Model[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** `changed`: another model, or language. */
  constructor(private readonly changed: () => void) {
    this.#model.addEventListener("change", () => {
      keep("model", this.#model.value);
      this.#languages();
    });
    this.#language.addEventListener("change", () => {
      keep("language", this.#language.value);
      this.changed();
    });
    this.#device.addEventListener("change", () => keep("device", this.#device.value));
    this.#transport.value = recall("transport") === "webrtc" ? "webrtc" : "websocket";
    this.#hint();
    this.#transport.addEventListener("change", () => {
      keep("transport", this.#transport.value);
      this.#hint();
      this.changed();
    });
    navigator.mediaDevices?.addEventListener("devicechange", () => void this.devices());
  }

  /** "": the server chooses. */
  get model(): string {
    return this.#model.value;
  }

  /** "": the model is to hear which. */
  get language(): string {
    return this.#language.value;
  }

  /** The model that a recording names; "": none. */
  get fileModel(): string {
    return this.#substitute && !this.model && !this.language ? BY_LANGUAGE : this.model;
  }

  /** The model that a talk names, and no one chooses for it: that of the language. */
  get liveModel(): string {
    return this.entry?.id ?? this.model;
  }

  /** Whether the sound goes over WebRTC: a call, and no WebSocket. */
  get calls(): boolean {
    return this.#transport.value === "webrtc";
  }

  /** The chosen model, as the server tells it; where the server chooses, the one that it takes for this language. */
  get entry(): Model | undefined {
    if (this.model) return this.#known.find(({ id }) => id === this.model);
    const usual = this.#known.find((model) => model.default);
    return !this.language || usual?.languages.includes(this.language) ? usual : (this.#substitute ?? usual);
  }

  /** The model that the server takes where the default one does not speak a language. */
  get #substitute(): Model | undefined {
    return this.#known.find((model) => model.auto);
  }

  /** undefined: the browser's choice. */
  get deviceId(): string | undefined {
    return this.#device.value || undefined;
  }

  /** Whether the server has told what it has. */
  get known(): boolean {
    return this.#known.length > 0;
  }

  /** Ask the server what it has, and again while a model loads. Rejects with SpeechError. */
  async load(): Promise<void> {
    clearTimeout(this.#timer);
    this.#known = await models();
    const chosen = this.#model.value || recall("model"); // without either the browser takes the first that is ready
    const automatic = this.#substitute ? [make("option", { value: AUTOMATIC }, "Automatic")] : [];
    const options = this.#known.map(({ id, state }) => {
      const option = make("option", { value: id }, state === "ready" ? id : `${id} (${state.replaceAll("_", " ")})`);
      option.disabled = state !== "ready";
      option.selected = state === "ready" && id === chosen;
      return option;
    });
    this.#model.replaceChildren(...automatic, ...options);
    this.#languages();
    const settled = this.#known.every(({ state }) => state === "ready" || state === "not_loaded");
    if (!settled || !this.#model.selectedOptions.length) this.#timer = setTimeout(() => void this.load().catch(() => {}), LOOK_AGAIN_MS);
  }

  /** Their names are told once a microphone was allowed. */
  async devices(): Promise<void> {
    const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
    const named = found.filter(({ kind, deviceId, label }) => kind === "audioinput" && deviceId && label);
    const chosen = this.#device.value || recall("device");
    const options = named
      .filter(({ deviceId }) => deviceId !== "default" && deviceId !== "communications")
      .map(({ deviceId, label }) => {
        const option = make("option", { value: deviceId }, label);
        option.selected = deviceId === chosen;
        return option;
      });
    this.#device.replaceChildren(make("option", { value: "" }, "The browser's choice"), ...options);
    if (options.some((option) => option.selected)) this.#device.value = chosen!;
  }

  /** Not while somebody is heard with them. */
  enable(on: boolean): void {
    this.#model.disabled = this.#device.disabled = this.#transport.disabled = !on;
    this.#language.disabled = !on || this.#language.options.length < 2;
  }

  #hint(): void {
    byId("transport-hint").textContent = this.calls ? "A lost packet delays nothing. A lost connection does not come back." : "";
  }

  #languages(): void {
    const substitute = this.model ? undefined : this.#substitute;
    const usual = substitute ? this.#known.find((model) => model.default) : this.entry;
    const codes = [...new Set([...(usual?.languages ?? []), ...(substitute?.languages ?? [])])];
    byId("model-hint").textContent = substitute
      ? `${usual?.id}. Recordings in other languages: ${substitute.id}${substitute.state === "ready" ? "" : ", loaded for the first one"}.`
      : "";
    const chosen = recall("language");
    const options = codes.length > 1 ? ["", ...codes] : codes;
    this.#language.replaceChildren(
      ...options.map((code) => {
        const option = make("option", { value: code }, code ? language(code) : "As it is spoken");
        option.selected = code === chosen;
        return option;
      }),
    );
    this.#language.disabled = codes.length < 2;
    this.changed();
  }
}
