import type { Word } from "asr-serve";
import { byId } from "../page/dom";
import { about } from "./said";

/** So long a pointer rests on a word before the page tells about it. */
const REST_MS = 350;
const GAP_PX = 6;

interface Known {
  word: Word;
  /** Whether it can be played from there. */
  sounds: boolean;
}

/** Words somebody points at, or walks through by keyboard: what is known of each, and where it is in the sound. */
export class WordTip {
  readonly #room = byId("words");
  readonly #tip = byId("word-tip");
  #timer: ReturnType<typeof setTimeout> | undefined;
  /** The one that Tab comes to. */
  #stop: HTMLElement | undefined;

  constructor(
    private readonly known: (word: HTMLElement) => Known | undefined,
    private readonly play: (seconds: number) => void,
  ) {
    const room = this.#room;
    room.addEventListener("pointerover", ({ target, pointerType }) => {
      const word = wordOf(target);
      if (word && pointerType === "mouse") this.#soon(word);
    });
    room.addEventListener("pointerout", ({ target }) => {
      if (wordOf(target) && wordOf(document.activeElement) === undefined) this.hide();
      else clearTimeout(this.#timer);
    });
    room.addEventListener("focusin", ({ target }) => this.#focused(wordOf(target)));
    room.addEventListener("focusout", ({ target }) => {
      wordOf(target)?.removeAttribute("aria-label");
      this.hide();
    });
    room.addEventListener("scroll", () => this.hide(), { passive: true });
    room.addEventListener("click", ({ target }) => {
      const word = wordOf(target);
      if (word && getSelection()?.isCollapsed !== false) this.#chosen(word);
    });
    room.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("pointerdown", ({ target }) => {
      if (!wordOf(target)) this.hide();
    });
  }

  /** Words came, or went: Tab has to come to one of them. */
  settle(): void {
    if (this.#stop?.isConnected) return;
    this.hide();
    this.#stop = this.#room.querySelector<HTMLElement>(".word") ?? undefined;
    if (this.#stop) this.#reachable(this.#stop);
  }

  /** Escape. False: nothing was shown. */
  hide(): boolean {
    clearTimeout(this.#timer);
    const shown = !this.#tip.hidden;
    this.#tip.hidden = true;
    return shown;
  }

  #reachable(word: HTMLElement): void {
    word.tabIndex = 0;
    word.setAttribute("role", "button");
  }

  #focused(word: HTMLElement | undefined): void {
    const known = word && this.known(word);
    if (!word || !known) return;
    if (word !== this.#stop) {
      for (const name of ["tabindex", "role", "aria-disabled"]) this.#stop?.removeAttribute(name);
      this.#stop = word;
      this.#reachable(word);
    }
    if (known.sounds) word.removeAttribute("aria-disabled");
    else word.setAttribute("aria-disabled", "true");
    word.setAttribute("aria-label", `${word.textContent}, ${about(known.word)}`);
    word.scrollIntoView({ block: "nearest" });
    this.#show(word, known.word);
  }

  #chosen(word: HTMLElement): void {
    const known = this.known(word);
    if (!known) return;
    this.#show(word, known.word);
    if (known.sounds) this.play(known.word.start);
  }

  #soon(word: HTMLElement): void {
    clearTimeout(this.#timer);
    const known = this.known(word);
    if (known) this.#timer = setTimeout(() => this.#show(word, known.word), REST_MS);
  }

  #show(word: HTMLElement, known: Word): void {
    clearTimeout(this.#timer);
    const tip = this.#tip;
    tip.textContent = about(known);
    tip.hidden = false;
    const at = word.getClientRects()[0] ?? word.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = Math.min(Math.max(GAP_PX, at.left + at.width / 2 - width / 2), innerWidth - width - GAP_PX);
    const top = at.top - height - GAP_PX;
    tip.style.left = `${left}px`;
    tip.style.top = `${top >= GAP_PX ? top : at.bottom + GAP_PX}px`;
  }

  #key(event: KeyboardEvent): void {
    const word = wordOf(event.target);
    if (!word || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") this.#chosen(word);
    else if (event.key !== "Escape" || !this.hide()) {
      const next = this.#next(word, event.key);
      if (!next) return;
      next.tabIndex = -1;
      next.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  #next(word: HTMLElement, key: string): HTMLElement | undefined {
    const words = [...this.#room.querySelectorAll<HTMLElement>(".word")];
    const at = words.indexOf(word);
    const row = word.parentElement!;
    const first = words.findIndex((each) => each.parentElement === row);
    const behind = words.findIndex((each, n) => n > at && each.parentElement !== row);
    const last = behind < 0 ? words.length - 1 : behind - 1;
    const before = words.findIndex((each) => each.parentElement === words[first - 1]?.parentElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: first, End: last, ArrowDown: behind, ArrowUp: before }[key];
    return to === undefined ? undefined : (words[to] ?? word);
  }
}

function wordOf(target: EventTarget | null): HTMLElement | undefined {
  return target instanceof HTMLElement && target.classList.contains("word") ? target : undefined;
}
