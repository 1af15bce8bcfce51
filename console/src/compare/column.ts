import { byId, make } from "../page/dom";
import type { SaidWord, Side } from "./differences";

/** Text of one side: its differences are marked, and each word plays from where it was said. One word takes part in the
 * order of Tab, and the arrow keys go from word to word. */
export class Column {
  readonly #box: HTMLElement;
  #words: readonly SaidWord[] = [];
  #shown: HTMLElement[] = [];
  #now = -1;

  /** `play`: from this second on. */
  constructor(
    id: string,
    private readonly play: (seconds: number) => void,
  ) {
    this.#box = byId(id);
    this.#box.addEventListener("click", ({ target }) => {
      const at = target instanceof Node ? this.#shown.findIndex((word) => word.contains(target)) : -1;
      if (at >= 0) this.#playFrom(at);
    });
    this.#box.addEventListener("keydown", (event) => this.#key(event));
  }

  /** `versus`: whose words those are that this side has not. */
  show(words: readonly SaidWord[], side: Side, versus: string): void {
    this.#words = words;
    this.#now = -1;
    const parts: (Node | string)[] = [];
    this.#shown = words.map((word, n) => {
      if (side.gaps.has(n)) parts.push(gap(side.gaps.get(n)!, versus), " ");
      const mark = side.marks[n]!;
      const made = make("span", { class: "said-word", role: "button", tabindex: n ? "-1" : "0", "data-kind": mark.kind }, word.text);
      if (mark.kind === "changed") {
        made.title = `${versus}: ${mark.other}`;
        made.append(make("span", { class: "unseen" }, `, differs, ${versus} has: ${mark.other}`));
      } else if (mark.kind === "only") {
        made.title = `Not in ${versus}`;
        made.append(make("span", { class: "unseen" }, `, not in ${versus}`));
      }
      parts.push(made, " ");
      return made;
    });
    if (side.gaps.has(words.length)) parts.push(gap(side.gaps.get(words.length)!, versus));
    if (!parts.length) parts.push(make("i", { class: "soft" }, "No speech was found."));
    this.#box.replaceChildren(...parts);
  }

  clear(text = ""): void {
    [this.#words, this.#shown, this.#now] = [[], [], -1];
    this.#box.replaceChildren(...(text ? [make("p", { class: "problem" }, text)] : []));
  }

  /** Mark the word that is heard now; undefined: none is. */
  at(seconds: number | undefined): void {
    const found = seconds === undefined ? -1 : this.#words.findLastIndex(({ start }) => start !== undefined && start <= seconds);
    if (found === this.#now) return;
    this.#shown[this.#now]?.removeAttribute("data-now");
    this.#shown[found]?.setAttribute("data-now", "");
    this.#now = found;
  }

  #playFrom(at: number): void {
    const { start } = this.#words[at]!;
    if (start !== undefined) this.play(start);
  }

  #key(event: KeyboardEvent): void {
    const at = this.#shown.indexOf(document.activeElement as HTMLElement);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") this.#playFrom(at);
    else {
      const last = this.#shown.length - 1;
      const to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      const next = this.#shown[Math.min(last, Math.max(0, to))]!;
      this.#shown[at]!.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Where the other side has words, and this one none. */
function gap(missing: string, versus: string): HTMLElement {
  return make(
    "span",
    { class: "gap", title: `${versus} has here: ${missing}` },
    make("span", { "aria-hidden": "true" }, "‸"),
    make("span", { class: "unseen" }, `nothing here, ${versus} has: ${missing},`),
  );
}
