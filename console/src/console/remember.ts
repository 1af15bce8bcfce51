import { Transcript } from "asr-serve";
import { find, keeps, put, setKeeps, watchKeeps, type Saved } from "../history/store";
import { byId } from "../page/dom";
import { toast } from "../page/toast";
import type { Take } from "./take";

const NOT_KEPT = "This browser keeps no history: it does not let the page store anything.";

/** The switch of the history, and what goes into it. */
export class Remember {
  readonly #switch = byId("keep-history", HTMLInputElement);
  readonly #ids = new WeakMap<Take, string>();
  /** Those that are in the history, or were until they were deleted there. */
  readonly #stored = new WeakSet<Take>();
  #told = false;

  /** `takes`: those of this tab, which are kept too when the history is switched on. */
  constructor(takes: () => readonly Take[]) {
    this.#switch.checked = keeps();
    this.#switch.addEventListener("change", () => {
      setKeeps(this.#switch.checked);
      this.#told = false;
      if (this.#switch.checked) for (const take of takes()) this.keep(take);
    });
    watchKeeps(() => (this.#switch.checked = keeps()));
  }

  /** A take is finished, or was changed since. */
  keep(take: Take): void {
    if (!keeps() || !take.transcript.segments.length) return;
    put(this.#saved(take), this.#stored.has(take)).then(
      (kept) => {
        if (kept) this.#stored.add(take);
        else toast("This transcript is too large for the history");
      },
      () => {
        if (!this.#told) toast(NOT_KEPT);
        this.#told = true;
      },
    );
  }

  /** A take of the history; undefined: it is not there any more. */
  async open(id: string): Promise<Take | undefined> {
    const saved = await find(id).catch(() => undefined);
    if (!saved) return undefined;
    const { kind, title, names, segments, languageScore } = saved;
    const transcript = Object.assign(new Transcript(), {
      segments,
      model: saved.model,
      language: saved.language,
      duration: saved.duration,
    });
    const take: Take = { kind, title, transcript, names: new Map(names), sound: undefined, savedMs: saved.savedMs };
    if (languageScore !== undefined) take.languageScore = languageScore;
    this.#ids.set(take, id);
    this.#stored.add(take);
    return take;
  }

  #saved(take: Take): Saved {
    const { kind, title, transcript, names, languageScore } = take;
    const { model, language, duration, segments } = transcript;
    const id = this.#ids.get(take) ?? [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("");
    this.#ids.set(take, id);
    take.savedMs ??= Date.now();
    return {
      id,
      savedMs: take.savedMs,
      kind,
      title,
      model,
      language,
      duration,
      ...(languageScore !== undefined && { languageScore }),
      names: [...names],
      segments,
    };
  }
}
