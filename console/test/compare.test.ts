/** Alignments and marks of the page that compares. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { align, errors, type Step } from "../src/compare/alignment";
import { compare, wordsOf } from "../src/compare/differences";
import { tokensOf } from "../src/compare/tokens";

const split = (text: string): string[] => text.split(" ").filter(Boolean);

/** By the definition: the fewest changes from one list to the other. */
function distance(a: string[], b: string[]): number {
  let row = b.map((_, at) => at + 1);
  row.unshift(0);
  a.forEach((token, n) => {
    const next = [n + 1];
    b.forEach((other, at) => next.push(Math.min(row[at]! + (token === other ? 0 : 1), row[at + 1]! + 1, next[at]! + 1)));
    row = next;
  });
  return row.at(-1)!;
}

function expectAlignment(steps: Step[], a: string[], b: string[]): void {
  assert.deepEqual(steps.flatMap((step) => step.a ?? []), a.map((_, n) => n), "all of the first, in order");
  assert.deepEqual(steps.flatMap((step) => step.b ?? []), b.map((_, n) => n), "all of the second, in order");
  for (const step of steps) assert.equal(step.equal, step.a !== undefined && step.b !== undefined && a[step.a] === b[step.b]);
  const { substitutions, deletions, insertions, reference } = errors(steps);
  assert.equal(reference, a.length);
  assert.equal(substitutions + deletions + insertions, distance(a, b));
}

test("alignments have the fewest errors, and every token once", () => {
  for (const [a, b] of [["", ""], ["a", ""], ["", "a b"], ["a b c", "a c"], ["a b c d", "b x d e"], ["x y", "y x"]]) {
    expectAlignment(align(split(a!), split(b!)), split(a!), split(b!));
  }
  let seed = 1;
  const random = (most: number): number => (seed = (seed * 48_271) % 2_147_483_647) % most;
  const list = (length: number): string[] => Array.from({ length }, () => "abc"[random(3)]!);
  for (let n = 0; n < 200; n++) {
    const [a, b] = [list(random(12)), list(random(12))];
    expectAlignment(align(a, b), a, b);
  }
  const [long, other] = [list(1_500), list(1_400)]; // more cells than one table has
  expectAlignment(align(long, other), long, other);
});

test("tokens are without case, punctuation and brackets", () => {
  assert.deepEqual(tokensOf("Don't  STOP – it’s $20!"), ["don", "t", "stop", "it", "s", "20"]);
  assert.deepEqual(tokensOf("ﬁne １２"), ["fine", "12"]);
  assert.deepEqual(tokensOf("你好 ok"), ["你", "好", "ok"]);
  assert.deepEqual(compare(wordsOf("well (he coughs) yes"), wordsOf("Well, yes.")).errors, {
    substitutions: 0,
    deletions: 0,
    insertions: 0,
    reference: 2,
  });
});

test("words are marked by what the other side has", () => {
  const found = compare(wordsOf("It was the best of times"), wordsOf("it is the very best times, now"));
  assert.deepEqual(found.a.marks.map(({ kind }) => kind), ["equal", "changed", "equal", "equal", "only", "equal"]);
  assert.deepEqual(found.a.marks[1], { kind: "changed", other: "is" });
  assert.deepEqual([...found.a.gaps], [[3, "very"], [6, "now"]]);
  assert.deepEqual([...found.b.gaps], [[5, "of"]]);
  assert.deepEqual(found.b.marks.map(({ kind }) => kind), ["equal", "changed", "equal", "only", "equal", "equal", "only"]);
  const joined = compare(wordsOf("ice cream"), wordsOf("icecream"));
  assert.deepEqual(joined.a.marks, [{ kind: "changed", other: "icecream" }, { kind: "changed", other: "icecream" }]);
  assert.deepEqual(joined.b.marks, [{ kind: "changed", other: "ice cream" }]);
  assert.deepEqual([...compare([], wordsOf("all of it")).a.gaps], [[0, "all of it"]]);
});
