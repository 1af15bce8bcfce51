import { align, errors, type Errors, type Step } from "./alignment";
import { tokensOf, withoutBrackets } from "./tokens";

/** Word as a transcript has it. Times in seconds since the beginning of the recording, where they are known. */
export interface SaidWord {
  text: string;
  start?: number;
  end?: number;
}

/** What a word of one side is to the other side. */
export type Mark =
  | { kind: "equal" }
  /** The other side has other words here. */
  | { kind: "changed"; other: string }
  /** The other side has nothing here. */
  | { kind: "only" };

/** One side of a comparison. */
export interface Side {
  marks: Mark[];
  /** Before the word of this number (or behind the last one), the other side alone has these words. */
  gaps: Map<number, string>;
}

export interface Comparison {
  a: Side;
  b: Side;
  /** Errors of the second side, where the first is right. */
  errors: Errors;
}

/** Words of a text that no model has timed. */
export function wordsOf(text: string): SaidWord[] {
  return text.split(/\s+/).filter(Boolean).map((word) => ({ text: word }));
}

/** How two transcripts of one recording differ. */
export function compare(a: readonly SaidWord[], b: readonly SaidWord[]): Comparison {
  const [left, right] = [tokenized(a), tokenized(b)];
  const steps = align(left.tokens, right.tokens);
  const found: Comparison = { a: equalSide(a), b: equalSide(b), errors: errors(steps) };
  let [placeA, placeB] = [0, 0]; // numbers of the words that come next
  for (let at = 0; at < steps.length; ) {
    let end = at;
    while (end < steps.length && steps[end]!.equal === steps[at]!.equal) end++;
    const run = steps.slice(at, end);
    const [ownA, ownB] = [owners(run, "a", left.owner), owners(run, "b", right.owner)];
    if (!steps[at]!.equal) {
      mark(found.a, ownA, ownB.map((n) => b[n]!.text).join(" "), placeA);
      mark(found.b, ownB, ownA.map((n) => a[n]!.text).join(" "), placeB);
    }
    if (ownA.length) placeA = ownA.at(-1)! + 1;
    if (ownB.length) placeB = ownB.at(-1)! + 1;
    at = end;
  }
  return found;
}

/** All tokens, and which word each is of. A bracket may hold several words. */
function tokenized(words: readonly SaidWord[]): { tokens: string[]; owner: number[] } {
  const [tokens, owner]: [string[], number[]] = [[], []];
  const text = withoutBrackets(words.map((word) => word.text).join(" "));
  let place = 0;
  words.forEach((word, n) => {
    for (const token of tokensOf(text.slice(place, place + word.text.length))) {
      tokens.push(token);
      owner.push(n);
    }
    place += word.text.length + 1;
  });
  return { tokens, owner };
}

/** A side that has no other, or one that agrees with it in every word. */
export function equalSide(words: readonly SaidWord[]): Side {
  return { marks: words.map(() => ({ kind: "equal" })), gaps: new Map() };
}

/** The words that the tokens of a side are of. */
function owners(run: readonly Step[], side: "a" | "b", owner: readonly number[]): number[] {
  return [...new Set(run.flatMap((step) => (step[side] === undefined ? [] : [owner[step[side]]!])))];
}

/** `words`: those of this side that differ; `there`: what the other has in their place. */
function mark(side: Side, words: readonly number[], there: string, place: number): void {
  if (!words.length) side.gaps.set(place, side.gaps.has(place) ? `${side.gaps.get(place)} ${there}` : there);
  for (const n of words) side.marks[n] = there ? { kind: "changed", other: there } : { kind: "only" };
}
