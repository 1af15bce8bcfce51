import { SpeechError } from "asr-serve";
import type { Model } from "../page/api";
import { byId, keep, recall } from "../page/dom";
import { words as told } from "../page/problems";
import { language as languageName } from "../page/words";
import { hotwords, liveProblem, MOST, problem } from "./hotwords";

/** What a stream is asked for beside text. */
export interface RichOptions {
  words?: true;
  speakers?: true;
  itn?: true;
  hotwords?: string;
}

/** Switch -> whether it is on until somebody says otherwise. */
const SWITCHES = { words: true, speakers: false, itn: false, "speech-only": false } as const;
type Switch = keyof typeof SWITCHES;
/** The server's names, on all of its routes -> where on the page it is said that one was refused. */
const FIELDS: Record<string, Switch | "hotwords"> = {
  words: "words",
  "timestamp_granularities[]": "words",
  speakers: "speakers",
  spk: "speakers",
  num_speakers: "speakers",
  itn: "itn",
  speechOnly: "speech-only",
  hotwords: "hotwords",
  "keywords[]": "hotwords",
};

/** As many as the server tells apart. */
const MOST_SPEAKERS = 32;

/** What is to be found out beside the text: words' times, speakers, the written form; and words that may come.
 * The browser remembers it. */
export class Wanted {
  readonly #box = byId("hotwords", HTMLTextAreaElement);
  readonly #count = byId("hotwords-count");
  /** How many speak; empty: that is to be heard. */
  readonly #many = byId("num-speakers", HTMLInputElement);
  /** What the chosen model cannot be asked for. */
  readonly #cannot = new Set<Switch | "hotwords">();
  #idle = true;

  constructor() {
    for (const [name, on] of Object.entries(SWITCHES) as [Switch, boolean][]) {
      const field = this.#switch(name);
      field.checked = (recall(`want.${name}`) ?? (on ? "on" : "off")) === "on";
      field.addEventListener("change", () => {
        keep(`want.${name}`, field.checked ? "on" : "off");
        this.#say(name, "");
        this.enable(this.#idle);
      });
    }
    this.#many.value = recall("num-speakers") ?? "";
    this.#many.addEventListener("input", () => {
      keep("num-speakers", this.#many.value || undefined);
      this.#lookAtMany();
    });
    this.#lookAtMany();
    this.#box.value = recall("hotwords") ?? "";
    this.#box.addEventListener("input", () => {
      keep("hotwords", this.#box.value || undefined);
      this.#look();
    });
    this.#look();
  }

  /** Fields of a form for a recording. */
  fields(): Record<string, string> {
    const words = this.#hotwords();
    return {
      // Without it, words come: FunASR's clients read them.
      ...(!this.#on("words") && { "timestamp_granularities[]": "segment" }),
      ...(this.#on("speakers") && { spk: "true", ...(this.#many.value && { num_speakers: this.#many.value }) }),
      ...(this.#on("itn") && { itn: "true" }),
      ...(words.length && { hotwords: words.join(",") }),
    };
  }

  /** Options of a stream. Throws SpeechError. */
  options(): RichOptions {
    const words = this.#hotwords();
    const wrong = liveProblem(words);
    if (wrong) throw new SpeechError("option_error", wrong, { param: "hotwords" });
    return {
      ...(this.#on("words") && { words: true }),
      ...(this.#on("speakers") && { speakers: true }),
      ...(this.#on("itn") && { itn: true }),
      ...(words.length && { hotwords: words.join(",") }),
    };
  }

  /** Whether a talk sends speech, and silence as its length. */
  get speechOnly(): boolean {
    return this.#on("speech-only"); // not of a call
  }

  /** Say beside what was refused why; everything else is no longer wrong. */
  refused(failure?: unknown): void {
    for (const name of Object.keys(SWITCHES) as Switch[]) this.#say(name, "");
    this.#look();
    this.#lookAtMany();
    const param = failure instanceof SpeechError ? failure.param : undefined;
    const field = param === undefined ? undefined : FIELDS[param];
    if (field) this.#say(field, told(failure));
  }

  /** Not while somebody is heard with them. */
  enable(on: boolean): void {
    this.#idle = on;
    for (const name of Object.keys(SWITCHES) as Switch[]) {
      this.#switch(name).disabled = !on || this.#cannot.has(name);
    }
    this.#many.disabled = !on || !this.#on("speakers");
    this.#box.readOnly = !on;
  }

  /** Another model is chosen, or language ("": it is to hear which), or connection: say what there is not. */
  know(model: Model | undefined, language: string, calls: boolean): void {
    if (!model) return;
    const { words, speakers, hotwords, itn } = model;
    const hints: Record<Switch | "hotwords", string> = {
      words: words ? "" : "This model does not tell them.",
      speakers: speakers ? "" : "The models that this takes are not on the server.",
      itn: !itn.length ? "Not installed on the server." : "",
      hotwords: hotwords ? "" : "This model takes none.",
      "speech-only": calls ? "Over WebRTC the browser sends all sound." : "",
    };
    if (language && itn.length && !itn.includes(language)) hints.itn = `There is none for ${languageName(language)}.`;
    this.#cannot.clear();
    for (const [name, hint] of Object.entries(hints) as [Switch | "hotwords", string][]) {
      byId(`${name}-hint`).textContent = hint;
      if (hint) this.#cannot.add(name);
    }
    this.enable(this.#idle);
  }

  #on(name: Switch): boolean {
    return this.#switch(name).checked && !this.#cannot.has(name);
  }

  #hotwords(): string[] {
    return this.#cannot.has("hotwords") ? [] : hotwords(this.#box.value);
  }

  #switch(name: Switch): HTMLInputElement {
    return byId(`want-${name}`, HTMLInputElement);
  }

  #look(): void {
    const found = hotwords(this.#box.value);
    this.#count.textContent = `${found.length.toLocaleString("en")} of ${MOST.toLocaleString("en")}`;
    this.#say("hotwords", problem(found));
  }

  #lookAtMany(): void {
    const wrong = !this.#many.validity.valid;
    this.#say("speakers", wrong ? `A whole number from 1 to ${MOST_SPEAKERS}; or none, and they are counted.` : "");
    this.#switch("speakers").removeAttribute("aria-invalid");
    if (wrong) this.#many.setAttribute("aria-invalid", "true");
    else this.#many.removeAttribute("aria-invalid");
  }

  #say(name: Switch | "hotwords", text: string): void {
    byId(`${name}-problem`).textContent = text;
    const field = name === "hotwords" ? this.#box : this.#switch(name);
    if (text) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}
