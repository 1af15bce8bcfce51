import type { Segment, Word } from "asr-serve";
import { make } from "../page/dom";

/** Below it a word is more likely wrong than right. */
const UNSURE = 0.5;

/** A piece of a segment's text; `word`: which of its words, undefined of what lies between them. */
export interface Piece {
  text: string;
  word: number | undefined;
}

/** All of the text, in order. A word that is not in it as it is spelled has no piece of its own. */
export function pieces(text: string, words: readonly Word[]): Piece[] {
  const found: Piece[] = [];
  let at = 0;
  words.forEach(({ text: word }, n) => {
    const start = word ? text.indexOf(word, at) : -1;
    // Nothing but spaces is between words: what is found farther on is the same letters elsewhere.
    if (start < 0 || text.slice(at, start).trim()) return;
    if (start > at) found.push({ text: text.slice(at, start), word: undefined });
    found.push({ text: word, word: n });
    at = start + word.length;
  });
  if (at < text.length) found.push({ text: text.slice(at), word: undefined });
  return found;
}

/** A segment's text as the page shows it: each word can be pointed at. */
export function said({ text, words }: Segment): HTMLElement {
  const made = make("span", { class: "said" });
  if (!words?.length) {
    made.textContent = text.trim();
    return made;
  }
  for (const { text: part, word } of pieces(text.trim(), words)) {
    if (word === undefined) made.append(part);
    else {
      const unsure = words[word]!.confidence < UNSURE;
      made.append(make("span", { class: unsure ? "word unsure" : "word", "data-n": String(word) }, part));
    }
  }
  return made;
}

/** The word that is heard at this time, or was just now; -1: none. */
export function wordAt(words: readonly Word[], seconds: number): number {
  const LINGERS_S = 0.25; // a mark that goes out between two words flickers
  const at = words.findLastIndex(({ start }) => start <= seconds);
  return at >= 0 && seconds < words[at]!.end + LINGERS_S ? at : -1;
}

/** `0:03.2 · 62 % sure · said: twenty dollars` */
export function about({ start, confidence, spoken }: Word): string {
  const tenths = Math.round(10 * start);
  const time = `${Math.floor(tenths / 600)}:${String(Math.floor(tenths / 10) % 60).padStart(2, "0")}.${tenths % 10}`;
  return [time, `${Math.round(100 * confidence)} % sure`, spoken && `said: ${spoken}`].filter(Boolean).join(" · ");
}
