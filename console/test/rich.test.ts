/** The parts of the console that need no page. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { SpeechError, Transcript, type Segment, type Word } from "asr-serve";
import { failed } from "../src/page/api";
import { lacks, made, stem } from "../src/console/export";
import { identifiedOf, whyDefault } from "../src/console/identified";
import { hotwords, liveProblem, MOST_LIVE_BYTES, problem } from "../src/console/hotwords";
import { about, pieces, wordAt } from "../src/console/said";
import { facts, type Take } from "../src/console/take";
import { speakerColour, speakerId, speakerName, speakersOf } from "../src/console/voices";
import { FORMS, renamed } from "../src/forms/forms";

const word = (text: string, start: number, end: number, more: Partial<Word> = {}): Word => ({
  text,
  start,
  end,
  confidence: 0.75,
  ...more,
});

const SEGMENTS: Segment[] = [
  {
    index: 0,
    start: 0.5,
    end: 2,
    text: "Is it $20?",
    speaker: "SPEAKER_00",
    spoken: "Is it twenty dollars?",
    words: [word("Is", 0.5, 0.7), word("it", 0.7, 0.9), word("$20?", 1, 2, { spoken: "twenty dollars?" })],
  },
  {
    index: 1,
    start: 2.5,
    end: 4,
    text: 'She said "no".',
    speaker: "SPEAKER_01",
    words: [word("She", 2.5, 2.8), word("said", 2.8, 3), word('"no".', 3, 4, { confidence: 0.25 })],
  },
  { index: 2, start: 4, end: 5, text: "No.", speaker: "SPEAKER_01", words: [word("No.", 4, 5)] },
];

function take(segments: Segment[] = SEGMENTS, names: [string, string][] = []): Take {
  const transcript = Object.assign(new Transcript(), { segments, duration: 6, language: "en", model: "m" });
  return { kind: "talk", title: "Talk at 10:00", transcript, names: new Map(names), sound: undefined };
}

test("a text is cut at its words, and nothing of it is lost", () => {
  const cut = (text: string, ...words: string[]): unknown[] => {
    const found = pieces(text, words.map((each, n) => word(each, n, n + 1)));
    assert.equal(found.map((piece) => piece.text).join(""), text);
    return found.map((piece) => (piece.word === undefined ? piece.text : piece.word));
  };
  assert.deepEqual(cut("Yes, it is.", "Yes,", "it", "is."), [0, " ", 1, " ", 2]);
  assert.deepEqual(cut("你好吗", "你", "好", "吗"), [0, 1, 2]);
  assert.deepEqual(cut("it was it", "was"), ["it was it"], "a word behind another one that is none of them");
  assert.deepEqual(cut("a b a", "a", "x", "b", "a"), [0, " ", 2, " ", 3], "one that is spelled otherwise is left out");
  assert.deepEqual(cut("a b", "a", "", "b"), [0, " ", 2]);
  assert.deepEqual(cut("a b"), ["a b"]);
});

test("the word that is heard", () => {
  const words = [word("a", 1, 2), word("b", 2, 3), word("c", 5, 6)];
  const at = [0.9, 1, 1.99, 2, 3.2, 3.3, 4.9, 5, 6.2, 6.3].map((seconds) => wordAt(words, seconds));
  assert.deepEqual(at, [-1, 0, 0, 1, 1, -1, -1, 2, 2, -1]);
  assert.equal(wordAt([], 1), -1);
});

test("what is told about a word", () => {
  assert.equal(about(word("$20", 63.25, 64, { confidence: 0.618, spoken: "twenty dollars" })), "1:03.3 · 62 % sure · said: twenty dollars");
  assert.equal(about(word("a", 59.96, 61)), "1:00.0 · 75 % sure");
});

test("speakers have one name, whichever route tells it", () => {
  assert.deepEqual(["SPK0", "SPEAKER_00", "SPK12", "Ada"].map(speakerId), ["SPEAKER_00", "SPEAKER_00", "SPEAKER_12", "Ada"]);
  const names = new Map([["SPEAKER_01", "Nell"]]);
  assert.deepEqual(["SPEAKER_00", "SPEAKER_01", "agent"].map((id) => speakerName(id, names)), ["Speaker 1", "Nell", "agent"]);
  assert.deepEqual(["SPEAKER_00", "SPEAKER_07", "SPEAKER_08"].map(speakerColour), [0, 7, 0]);
  assert.deepEqual([...speakersOf(SEGMENTS)], [["SPEAKER_00", 1.5], ["SPEAKER_01", 2.5]]);
});

test("hotwords are one a line or between commas, and none twice", () => {
  assert.deepEqual(hotwords(" Ada  Lovelace\nBabbage:2,Ada Lovelace,\n\n，贝克特、"), ["Ada Lovelace", "Babbage:2", "贝克特"]);
  assert.deepEqual(hotwords(" \n, "), []);
  assert.equal(problem(["a".repeat(200)]), "");
  assert.match(problem(["a".repeat(201)]), /longer than 200/);
  const many = Array.from({ length: 10_001 }, (_, n) => `word${n}`);
  assert.match(problem(many), /10001 hotwords: at most 10,000/);
  assert.equal(problem(many.slice(1)), "");
  assert.match(liveProblem(many), /Too many to talk with/);
  assert.equal(liveProblem(["a".repeat(MOST_LIVE_BYTES)]), "");
  assert.notEqual(liveProblem([`${"a".repeat(MOST_LIVE_BYTES - 1)}é`]), "", "bytes as they are sent");
});

test("a refusal keeps what was refused", () => {
  const told = failed({ code: "option_error", type: "invalid_request_error", message: "m", param: "hotwords" });
  assert.ok(told instanceof SpeechError);
  assert.deepEqual([told.code, told.message, told.param], ["option_error", "m", "hotwords"]);
  assert.equal(failed({ code: null, type: "t", message: "m", param: null }).param, undefined);
});

test("what a take is about", () => {
  assert.equal(facts(take()), "0:06 · 3 segments · 2 speakers · English · m");
  assert.match(facts({ ...take(), automatic: true }), / · English · m, chosen automatically$/);
  assert.equal(facts({ ...take(), languageScore: 0.984 }), "0:06 · 3 segments · 2 speakers · English (98 %) · m");
  assert.equal(facts(take([])), "0:06 · English · m");
});

test("files that are made of a talk, with the names that were given", () => {
  const named = take(SEGMENTS, [["SPEAKER_01", "Nell & Co"]]);
  const file = (name: string): string => made(named, FORMS[name]!);
  assert.equal(file("txt"), 'Speaker 1: Is it $20?\nNell & Co: She said "no".\nNo.\n');
  assert.equal(
    file("rttm"),
    [
      "SPEAKER Talk_at_10:00 1 0.500 1.500 <NA> <NA> Speaker_1 <NA> <NA>\n",
      "SPEAKER Talk_at_10:00 1 2.500 1.500 <NA> <NA> Nell_&_Co <NA> <NA>\n",
      "SPEAKER Talk_at_10:00 1 4.000 1.000 <NA> <NA> Nell_&_Co <NA> <NA>\n",
    ].join(""),
  );
  assert.deepEqual(file("ctm").split("\n").slice(2, 5), [
    "Talk_at_10:00 1 1.000 1.000 $20? 0.750",
    "Talk_at_10:00 1 2.500 0.300 She 0.750",
    "Talk_at_10:00 1 2.800 0.200 said 0.750",
  ]);
  const [whole, line] = [JSON.parse(file("json")), JSON.parse(file("jsonl"))];
  assert.equal(file("jsonl").trim().includes("\n"), false);
  assert.deepEqual(whole, { ...line, model: "m" });
  assert.deepEqual(line.segments[0].words[2], { word: "$20?", start: 1, end: 2, confidence: 0.75, spoken: "twenty dollars?" });
  assert.deepEqual([line.segments[0].spoken, line.segments[1].speaker], ["Is it twenty dollars?", "Nell & Co"]);
  assert.match(file("vtt"), /^WEBVTT\n/);
  assert.match(file("vtt"), /<v Nell &amp; Co>She <00:00:02\.800>said <00:00:03\.000>"no"\./);
  assert.match(file("srt"), /Nell & Co: She said/);
  assert.equal(SEGMENTS[1]!.speaker, "SPEAKER_01", "the take itself is as it was");
});

test("intervals of a TextGrid meet, and none is lost", () => {
  const grid = made(take(), FORMS["textgrid"]!);
  const tiers = grid.split(/item \[\d\]:/).slice(1);
  assert.equal(tiers.length, 3);
  for (const tier of tiers) {
    const edges = [...tier.matchAll(/ {12}xm(?:in|ax) = (\S+)/g)].map(([, number]) => Number(number));
    assert.equal(edges[0], 0);
    assert.equal(edges.at(-1), 6);
    for (let n = 2; n < edges.length; n += 2) assert.equal(edges[n], edges[n - 1]);
    assert.equal(Number(/size = (\d+)/.exec(tier)![1]), edges.length / 2);
  }
  assert.match(grid, /text = """no""\."/);
  const still = [{ index: 0, start: 1, end: 1, text: "x", words: [word("x", 6, 6)] }];
  assert.equal(made(take(still), FORMS["textgrid"]!).match(/text = "x"/g)!.length, 2, "what has no length is kept");
});

test("names go into the server's files as these are written", () => {
  const names = new Map([["SPEAKER_00", 'A "B" <c>; d']]);
  const put = (text: string, form: string): string => renamed(text, names, FORMS[form]!.named);
  assert.equal(put("<v SPEAKER_00>x\n<v SPEAKER_01>y", "vtt"), '<v A "B" &lt;c&gt;; d>x\n<v SPEAKER_01>y');
  assert.equal(JSON.parse(put('{"speaker":"SPK0"}', "json")).speaker, 'A "B" <c>; d');
  assert.equal(put("SPEAKER a 1 0.000 1.000 <NA> <NA> SPEAKER_00 <NA> <NA>", "rttm").split(" ")[7], 'A_"B"_<c>_d');
  assert.equal(put('text = "SPEAKER_00 + SPEAKER_01"', "textgrid"), 'text = "A ""B"" <c>; d + SPEAKER_01"');
  assert.equal(put("SPEAKER_001 SPK10", "srt"), "SPEAKER_001 SPK10", "somebody else");
});

test("what a take has nothing for is said", () => {
  assert.equal(lacks(take(), FORMS["rttm"]!), "");
  const bare = take([{ index: 0, start: 0, end: 1, text: "x" }]);
  assert.match(lacks(bare, FORMS["rttm"]!), /speakers/);
  assert.match(lacks(bare, FORMS["ctm"]!), /words/);
  assert.equal(lacks(bare, FORMS["srt"]!), "");
  assert.deepEqual(["a.b.wav", "talk", ".wav"].map(stem), ["a.b", "talk", ".wav"]);
});

test("why the default model hears a recording", () => {
  assert.deepEqual(identifiedOf("de;outcome=identified;probability=0.973"), { language: "de", outcome: "identified" });
  assert.deepEqual(identifiedOf("und;outcome=unsure"), { language: "", outcome: "unsure" });
  for (const none of [null, "", "de"]) assert.equal(identifiedOf(none), undefined);
  const why = (language: string, outcome: string) => whyDefault({ language, outcome }, "tiny");
  for (const outcome of ["identified", "no_speech"]) assert.equal(why("de", outcome), "");
  assert.equal(why("", "unsure"), "The language is uncertain: tiny hears it");
  for (const outcome of ["timeout", "unavailable"]) assert.equal(why("", outcome), "The language could not be found out: tiny hears it");
  assert.equal(why("de", "refused"), "German was found, but its model cannot do what is switched on: tiny hears it");
});
