import assert from "node:assert/strict";
import { test } from "node:test";
import { hits, marked, terms } from "../src/history/search";
import type { Saved } from "../src/history/store";

const saved: Saved = {
  id: "1",
  savedMs: 0,
  kind: "file",
  title: "Café Noir.wav",
  model: "tiny",
  language: "en",
  duration: 9,
  names: [],
  segments: ["Ever tried.", "Ever failed, İstanbul.", "No matter."].map((text, index) => ({ index, start: index, end: index + 1, text })),
};

test("all words have to be somewhere, whatever their case and accents", () => {
  assert.deepEqual(terms("  Ever  EVER café "), ["ever", "cafe"]);
  assert.deepEqual(hits(saved, terms("ever")), [0, 1]);
  assert.deepEqual(hits(saved, terms("failed MATTER")), [1, 2]);
  assert.deepEqual(hits(saved, terms("cafe matter")), [2]); // one in the title
  assert.deepEqual(hits(saved, terms("cafe")), []);
  assert.deepEqual(hits(saved, terms("ever istanbul")), [1, 0]); // the one with both comes first
  assert.equal(hits(saved, terms("ever nothing")), undefined);
});

test("hits are marked in the text as it is written", () => {
  const shown = (text: string, query: string): string => marked(text, terms(query)).map(({ text: part, hit }) => (hit ? `[${part}]` : part)).join("");
  assert.equal(shown("Ever tried.", "ever"), "[Ever] tried.");
  assert.equal(shown("A Cafe\u0301 and café", "cafe"), "A [Cafe\u0301] and [café]");
  assert.equal(shown("İstanbul, ISTANBUL", "istanbul"), "[İstanbul], [ISTANBUL]");
  assert.equal(shown("aaa", "aa"), "[aa]a");
  assert.equal(shown("naïve 😀 smile", "😀 naive"), "[naïve] [😀] smile");
  assert.equal(shown("ﬁne", "f"), "[ﬁ]ne"); // a ligature is marked whole
  assert.equal(shown("", "x"), "");
  for (const text of ["Ever tried.", "é́́", "\u0301x"]) assert.equal(marked(text, ["x"]).map((part) => part.text).join(""), text);
});
