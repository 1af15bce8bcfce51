import type { Saved } from "./store";

/** A part of a text: `hit`, or what lies between hits. */
export interface Part {
  text: string;
  hit: boolean;
}

/** Words that all have to be somewhere in a transcript; case and accents do not matter. */
export function terms(query: string): string[] {
  return [...new Set(fold(query).text.split(/\s+/).filter(Boolean))];
}

/** Numbers of the segments that hold any of the terms, those with most of them first; undefined: a term is nowhere in
 * the title or the text. */
export function hits({ title, segments }: Saved, wanted: readonly string[]): number[] | undefined {
  const texts = segments.map(({ text }) => fold(text).text);
  const heading = fold(title).text;
  if (!wanted.every((term) => heading.includes(term) || texts.some((text) => text.includes(term)))) return undefined;
  return texts
    .map((text, n) => ({ n, found: wanted.filter((term) => text.includes(term)).length }))
    .filter(({ found }) => found)
    .sort((a, b) => b.found - a.found)
    .map(({ n }) => n);
}

/** All of a text, cut where hits begin and end. */
export function marked(text: string, wanted: readonly string[]): Part[] {
  const folded = fold(text);
  const inHit = new Array<boolean>(text.length).fill(false);
  for (const term of wanted) {
    for (let at = folded.text.indexOf(term); at >= 0; at = folded.text.indexOf(term, at + term.length)) {
      inHit.fill(true, folded.from[at]!, folded.to[at + term.length - 1]!);
    }
  }
  const parts: Part[] = [];
  for (let at = 0; at < text.length; at++) {
    const last = parts.at(-1);
    if (last && last.hit === inHit[at]) last.text += text[at];
    else parts.push({ text: text[at]!, hit: inHit[at]! });
  }
  return parts;
}

/** Without case and accents; `from`, `to`: where each of its characters comes from. */
function fold(text: string): { text: string; from: number[]; to: number[] } {
  const folded = { text: "", from: [] as number[], to: [] as number[] };
  let at = 0;
  for (const character of text) {
    const plain = character.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
    const end = at + character.length;
    for (let n = 0; n < plain.length; n++) {
      folded.from.push(at);
      folded.to.push(end);
    }
    if (!plain && folded.to.length) folded.to[folded.to.length - 1] = end; // an accent belongs to the letter before it
    folded.text += plain;
    at = end;
  }
  return folded;
}
