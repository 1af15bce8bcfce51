import type { Segment } from "asr-serve";
import { byId, make } from "../page/dom";
import { clock } from "../page/words";
import type { Take } from "./take";

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

  /** `play`: somebody chose a time of a recording. */
  constructor(private readonly play: (seconds: number) => void) {
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
    this.#list.replaceChildren(...take.transcript.segments.map((segment) => this.#row(segment)));
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
    const row = this.#row(segment);
    row.classList.add("new");
    this.#list.append(row);
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
    if (row === this.#playing) return;
    this.#playing?.classList.remove("playing");
    this.#playing = row instanceof HTMLElement ? row : undefined;
    this.#playing?.classList.add("playing");
    this.#playing?.scrollIntoView({ block: "nearest" });
  }

  #row(segment: Segment): HTMLElement {
    return make("li", { class: "segment" }, this.#time(segment), make("span", { class: "said" }, segment.text.trim()));
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
