import { byId, make } from "../page/dom";
import type { Word } from "./request";

/** The sentence that is heard, and in it the word. */
export class Caption {
  readonly #box = byId("caption");
  #sentences: Word[][] = [];
  #shown: Word[] | undefined;

  clear(): void {
    this.#sentences = [];
    this.#shown = undefined;
    this.#box.replaceChildren();
  }

  add(words: Word[]): void {
    if (words.length) this.#sentences.push(words);
  }

  at(seconds: number): void {
    while (this.#sentences.length > 1 && this.#sentences[1]![0]!.start <= seconds) this.#sentences.shift();
    const sentence = this.#sentences[0];
    if (!sentence) return;
    if (sentence !== this.#shown) {
      this.#shown = sentence;
      this.#box.replaceChildren(...sentence.map(({ word }) => make("span", {}, word)));
    }
    const spans = this.#box.querySelectorAll("span");
    sentence.forEach(({ start, end }, n) => {
      const now = start <= seconds && seconds < end;
      if (now && !spans[n]!.hasAttribute("data-now")) spans[n]!.scrollIntoView({ block: "nearest", inline: "center" });
      spans[n]!.toggleAttribute("data-now", now);
    });
  }
}
