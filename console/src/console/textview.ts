import type { Segment, Word } from "asr-serve";
import { byId, make } from "../page/dom";
import { clock } from "../page/words";
import type { Legend } from "./legend";
import { said, wordAt } from "./said";
import type { Take } from "./take";
import { speakerColour } from "./voices";
import { WordTip } from "./wordtip";

/** From the end of the text: nearer than that, the newest words are kept in view. */
const NEAR_PX = 96;

/** The page of text: final segments, and below them the words of the open one. */
export class TextView {
  readonly #room = byId("words");
  readonly #log = byId("log");
  readonly #list = byId("segments");
  readonly #open = byId("open");
  readonly #stamp = byId("open-stamp");
  readonly #locked = byId("locked");
  readonly #partial = byId("partial");
  readonly #latest = byId("latest", HTMLButtonElement);
  readonly #empty = byId("empty");
  readonly #waiting = byId("waiting");
  #take: Take | undefined;
  #follows = true;
  #playing: HTMLElement | undefined;
  #word: Element | undefined;
  readonly #tip: WordTip;

  /** `play`: somebody chose a time of a recording. */
  constructor(
    private readonly play: (seconds: number) => void,
    private readonly legend: Legend,
  ) {
    this.#tip = new WordTip((word) => this.#known(word), play);
    this.#room.addEventListener("scroll", () => this.#look(), { passive: true });
    this.#latest.addEventListener("click", () => {
      this.#follows = true;
      this.#follow();
      this.#room.focus();
    });
  }

  /** Show this take from its beginning; screen readers are not told the text again. */
  show(take: Take): void {
    this.#take = take;
    this.#follows = take.kind === "talk"; // a recording is read from its beginning
    this.#playing = undefined;
    if (this.#empty.contains(document.activeElement)) byId("primary").focus();
    this.#empty.hidden = true;
    this.#log.setAttribute("aria-live", "off");
    this.#room.scrollTop = 0;
    const { segments } = take.transcript;
    this.#list.replaceChildren(...segments.map((segment, n) => this.#row(segment, segments[n - 1])));
    this.#tip.settle();
    this.open();
    requestAnimationFrame(() => this.#log.setAttribute("aria-live", "polite"));
  }

  /** Nothing said yet. */
  clear(): void {
    this.#take = undefined;
    this.#list.replaceChildren();
    this.#open.hidden = this.#latest.hidden = true;
    this.#empty.hidden = false;
  }

  /** A segment has become final. */
  segment(segment: Segment): void {
    const row = this.#row(segment, this.#take!.transcript.segments[this.#list.childElementCount - 1]);
    row.classList.add("new");
    this.#list.append(row);
    this.#tip.settle();
    this.open();
  }

  /** Show the open segment as it is now. */
  open(): void {
    const { transcript } = this.#take!;
    const text = transcript.locked + transcript.partial;
    this.#open.hidden = !text.trim();
    this.waiting("");
    this.#locked.textContent = transcript.locked;
    this.#partial.textContent = transcript.partial;
    this.#stamp.textContent = clock(transcript.open.start);
    this.#follow();
  }

  /** What is said while there is no text yet. */
  waiting(text: string): void {
    const none = !this.#list.childElementCount && this.#open.hidden;
    this.#waiting.textContent = text;
    this.#waiting.hidden = !none || !text;
  }

  /** Show what was said at this time, and put the focus there. */
  reveal(seconds: number): void {
    const at = this.#take?.transcript.segments.findIndex(({ end }) => seconds < end) ?? -1;
    const row = this.#list.children[at];
    if (!(row instanceof HTMLElement)) return;
    row.tabIndex = -1;
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
    row.focus({ preventScroll: true });
  }

  /** Times became something to play from, or not. */
  refresh(): void {
    const take = this.#take;
    if (!take) return;
    for (const [n, segment] of take.transcript.segments.entries()) {
      this.#list.children[n]?.firstElementChild?.replaceWith(this.#time(segment));
    }
  }

  /** Mark the segment that is played. */
  at(seconds: number | undefined): void {
    const segments = this.#take?.transcript.segments ?? [];
    const now =
      seconds === undefined ? -1 : segments.findIndex(({ start, end }) => start <= seconds && seconds < end);
    const row = this.#list.children[now];
    this.#sound(row, segments[now], seconds ?? 0);
    if (row === this.#playing) return;
    this.#playing?.classList.remove("playing");
    this.#playing = row instanceof HTMLElement ? row : undefined;
    this.#playing?.classList.add("playing");
    this.#playing?.scrollIntoView({ block: "nearest" });
  }

  /** Speakers have other names, or have said other segments. */
  voices(): void {
    const segments = this.#take?.transcript.segments ?? [];
    for (const [n, segment] of segments.entries()) {
      const row = this.#list.children[n];
      if (row instanceof HTMLElement) this.#voice(row, segment, segments[n - 1]);
    }
  }

  /** Escape: what is told about a word goes. False: nothing was. */
  hush(): boolean {
    return this.#tip.hide();
  }

  #row(segment: Segment, before: Segment | undefined): HTMLElement {
    const row = make("li", { class: "segment" }, this.#time(segment), said(segment));
    this.#voice(row, segment, before);
    return row;
  }

  /** Who says it, where that is somebody else than before. */
  #voice(row: HTMLElement, { speaker }: Segment, before: Segment | undefined): void {
    row.querySelector(".voice, .rename")?.remove();
    if (!speaker) return void delete row.dataset["voice"];
    row.dataset["voice"] = String(speakerColour(speaker));
    if (speaker !== before?.speaker) row.firstElementChild!.after(this.legend.button(this.#take!, speaker));
  }

  /** Mark the word that is heard. */
  #sound(row: Element | undefined, segment: Segment | undefined, seconds: number): void {
    const at = segment?.words ? wordAt(segment.words, seconds) : -1;
    const word = at < 0 ? undefined : (row?.querySelector(`.word[data-n="${at}"]`) ?? undefined);
    if (word === this.#word) return;
    this.#word?.classList.remove("now");
    this.#word = word;
    word?.classList.add("now");
    if (row && row.clientHeight > this.#room.clientHeight) word?.scrollIntoView({ block: "nearest" });
  }

  #known(word: HTMLElement): { word: Word; sounds: boolean } | undefined {
    const row = word.closest("li");
    const at = row ? [...this.#list.children].indexOf(row) : -1;
    const found = this.#take?.transcript.segments[at]?.words?.[Number(word.dataset["n"])];
    return found && { word: found, sounds: this.#take!.sound !== undefined };
  }

  #time({ start }: Segment): HTMLElement {
    const time = clock(start);
    if (!this.#take?.sound) return make("time", { class: "stamp num" }, time);
    const button = make("button", { class: "stamp num", type: "button", "aria-label": `Play from ${time}` }, time);
    button.addEventListener("click", () => this.play(start));
    return button;
  }

  #look(): void {
    const room = this.#room;
    if (this.#take?.kind !== "talk") return;
    this.#follows = room.scrollHeight - room.scrollTop - room.clientHeight < NEAR_PX;
    if (this.#follows) this.#latest.hidden = true;
  }

  #follow(): void {
    const room = this.#room;
    if (this.#follows) room.scrollTop = room.scrollHeight;
    this.#latest.hidden = this.#follows || this.#take?.kind !== "talk" || room.scrollHeight <= room.clientHeight;
  }
}
