import { SpeechError } from "asr-serve";
import { byId } from "../page/dom";
import { words } from "../page/problems";
import { fileName, save } from "../page/save";
import { toast } from "../page/toast";
import { asked, FORMS, lacks, made, stem } from "./export";
import type { Take } from "./take";

/** Copying and downloading of the take that is shown. */
export class Keeper {
  readonly #button = byId("download", HTMLButtonElement);
  readonly #menu = byId("formats");
  readonly #items = [...this.#menu.querySelectorAll("button")];
  #asking: AbortController | undefined;

  /** `busy`: the server is asked for something, or no more. */
  constructor(
    private readonly shown: () => Take | undefined,
    private readonly busy: (on: boolean) => void,
  ) {
    byId("copy").addEventListener("click", () => void this.copy());
    this.#button.addEventListener("click", () => this.#toggle(this.#menu.hidden !== false));
    this.#menu.addEventListener("keydown", (event) => this.#move(event));
    for (const item of this.#items) {
      item.addEventListener("click", () => {
        this.#toggle(false);
        this.#button.focus();
        void this.#download(item.dataset["format"]!);
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
    const take = this.shown();
    const text = take && made(take, FORMS["txt"]!);
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

  /** Do not wait for the server's file. False: nobody does. */
  cancel(): boolean {
    this.#asking?.abort();
    return this.#asking !== undefined;
  }

  async #download(format: string): Promise<void> {
    const take = this.shown();
    const form = FORMS[format];
    if (!take || !form) return;
    const wrong = lacks(take, form);
    if (wrong) return toast(wrong);
    let text: string;
    if (form.asked && take.source) {
      if (this.#asking) return toast("A file is on its way already. Escape cancels it.");
      this.#asking = new AbortController();
      this.busy(true);
      try {
        text = await asked(take, form, this.#asking.signal);
      } catch (failure) {
        if (failure instanceof SpeechError && failure.code === "cancelled") return toast("Cancelled");
        text = made(take, form);
        toast(`Made from what this page knows. ${words(failure)}`);
      } finally {
        this.#asking = undefined;
        this.busy(false);
      }
    } else {
      text = made(take, form);
    }
    save(`${fileName(stem(take.title)) || "transcript"}${form.suffix}`, new Blob([text], { type: form.type }));
  }

  #toggle(open: boolean): void {
    if (open === !this.#menu.hidden) return;
    const take = this.shown();
    for (const item of this.#items) {
      const wrong = take ? lacks(take, FORMS[item.dataset["format"]!]!) : "";
      item.setAttribute("aria-disabled", String(wrong !== ""));
    }
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
