import { SpeechError } from "asr-serve";
import { byId, keep, recall } from "../page/dom";
import { words as told } from "../page/problems";
import { hotwords, liveProblem, MOST, problem } from "./hotwords";

/** What a stream is asked for beside text. */
export interface RichOptions {
  words?: true;
  speakers?: true;
  itn?: true;
  hotwords?: string;
}

/** Switch -> whether it is on until somebody says otherwise. */
const SWITCHES = { words: true, speakers: false, itn: false } as const;
type Switch = keyof typeof SWITCHES;
/** The server's names, on all of its routes -> where on the page it is said that one was refused. */
const FIELDS: Record<string, Switch | "hotwords"> = {
  words: "words",
  "timestamp_granularities[]": "words",
  speakers: "speakers",
  spk: "speakers",
  itn: "itn",
  hotwords: "hotwords",
  "keywords[]": "hotwords",
};

/** What is to be found out beside the text: words' times, speakers, the written form; and words that may come.
 * The browser remembers it. */
export class Wanted {
  readonly #box = byId("hotwords", HTMLTextAreaElement);
  readonly #count = byId("hotwords-count");

  constructor() {
    for (const [name, on] of Object.entries(SWITCHES) as [Switch, boolean][]) {
      const field = this.#switch(name);
      field.checked = (recall(`want.${name}`) ?? (on ? "on" : "off")) === "on";
      field.addEventListener("change", () => {
        keep(`want.${name}`, field.checked ? "on" : "off");
        this.#say(name, "");
      });
    }
    this.#box.value = recall("hotwords") ?? "";
    this.#box.addEventListener("input", () => {
      keep("hotwords", this.#box.value || undefined);
      this.#look();
    });
    this.#look();
  }

  /** Fields of a form for a recording. */
  fields(): Record<string, string> {
    const words = hotwords(this.#box.value);
    return {
      // Without it, words come: FunASR's clients read them.
      ...(!this.#on("words") && { "timestamp_granularities[]": "segment" }),
      ...(this.#on("speakers") && { spk: "true" }),
      ...(this.#on("itn") && { itn: "true" }),
      ...(words.length && { hotwords: words.join(",") }),
    };
  }

  /** Options of a stream. Throws SpeechError. */
  options(): RichOptions {
    const words = hotwords(this.#box.value);
    const wrong = liveProblem(words);
    if (wrong) throw new SpeechError("option_error", wrong, { param: "hotwords" });
    return {
      ...(this.#on("words") && { words: true }),
      ...(this.#on("speakers") && { speakers: true }),
      ...(this.#on("itn") && { itn: true }),
      ...(words.length && { hotwords: words.join(",") }),
    };
  }

  /** Say beside what was refused why; everything else is no longer wrong. */
  refused(failure?: unknown): void {
    for (const name of Object.keys(SWITCHES) as Switch[]) this.#say(name, "");
    this.#look();
    const param = failure instanceof SpeechError ? failure.param : undefined;
    const field = param === undefined ? undefined : FIELDS[param];
    if (field) this.#say(field, told(failure));
  }

  /** Not while somebody is heard with them. */
  enable(on: boolean): void {
    for (const name of Object.keys(SWITCHES) as Switch[]) this.#switch(name).disabled = !on;
    this.#box.readOnly = !on;
  }

  #on(name: Switch): boolean {
    return this.#switch(name).checked;
  }

  #switch(name: Switch): HTMLInputElement {
    return byId(`want-${name}`, HTMLInputElement);
  }

  #look(): void {
    const found = hotwords(this.#box.value);
    this.#count.textContent = `${found.length.toLocaleString("en")} of ${MOST.toLocaleString("en")}`;
    this.#say("hotwords", problem(found));
  }

  #say(name: Switch | "hotwords", text: string): void {
    byId(`${name}-problem`).textContent = text;
    const field = name === "hotwords" ? this.#box : this.#switch(name);
    if (text) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}
