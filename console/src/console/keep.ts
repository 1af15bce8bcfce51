import type { Transcript } from "asr-serve";
import { byId, make } from "../page/dom";
import { toast } from "../page/toast";
import type { Take } from "./take";

const FORMATS: Record<string, { type: string; text: (transcript: Transcript) => string }> = {
  txt: { type: "text/plain", text: (transcript) => transcript.toTxt() },
  srt: { type: "application/x-subrip", text: (transcript) => transcript.toSrt() },
  vtt: { type: "text/vtt", text: (transcript) => transcript.toVtt() },
  json: { type: "application/json", text: (transcript) => transcript.toJson() },
};

/** Copying and downloading of the take that is shown. */
export class Keeper {
  readonly #button = byId("download", HTMLButtonElement);
  readonly #menu = byId("formats");
  readonly #items = [...this.#menu.querySelectorAll("button")];

  constructor(private readonly shown: () => Take | undefined) {
    byId("copy").addEventListener("click", () => void this.copy());
    this.#button.addEventListener("click", () => this.#toggle(this.#menu.hidden !== false));
    this.#menu.addEventListener("keydown", (event) => this.#move(event));
    for (const item of this.#items) {
      item.addEventListener("click", () => {
        this.#toggle(false);
        this.#button.focus();
        this.#download(item.dataset["format"]!);
      });
    }
    document.addEventListener("pointerdown", ({ target }) => {
      if (target instanceof Node && !this.#menu.parentElement!.contains(target)) this.#toggle(false);
    });
    this.#menu.parentElement!.addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget instanceof Node && !this.#menu.parentElement!.contains(relatedTarget)) this.#toggle(false);
    });
  }

  async copy(): Promise<void> {
    const text = this.shown()?.transcript.toTxt();
    if (!text) return;
    try {
      await navigator.clipboard.writeText(text);
      toast("Copied");
    } catch {
      toast("The browser does not let this page copy. Download the text instead.");
    }
  }

  /** Open the list of formats. */
  choose(): void {
    if (this.shown()?.transcript.segments.length) this.#toggle(true);
  }

  #download(format: string): void {
    const take = this.shown();
    const form = FORMATS[format];
    if (!take || !form) return;
    const url = URL.createObjectURL(new Blob([form.text(take.transcript)], { type: form.type }));
    const name = take.title.replace(/\.\w{1,5}$/, "").replace(/[^\p{L}\p{N}._-]+/gu, "-");
    make("a", { href: url, download: `${name || "transcript"}.${format}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  #toggle(open: boolean): void {
    if (open === !this.#menu.hidden) return;
    this.#menu.hidden = !open;
    this.#button.setAttribute("aria-expanded", String(open));
    if (open) this.#items[0]!.focus();
  }

  #move(event: KeyboardEvent): void {
    const at = this.#items.findIndex((item) => item === document.activeElement);
    const last = this.#items.length - 1;
    const to = { ArrowDown: at === last ? 0 : at + 1, ArrowUp: at <= 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      this.#items[to]!.focus();
      event.preventDefault();
      event.stopPropagation();
    } else if (event.key === "Escape") {
      this.#toggle(false);
      this.#button.focus();
      event.stopPropagation();
    }
  }
}
