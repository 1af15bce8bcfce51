import assert from "node:assert/strict";
import { test } from "node:test";
import { Transcript } from "asr-serve";

function heard(): Transcript {
  const made = new Transcript();
  made.apply({ type: "segment", seq: 1, index: 0, start_s: 0.5, end_s: 1.25, text: "It was the best of times." });
  made.apply({ type: "segment", seq: 2, index: 1, start_s: 2, end_s: 3.0000625, text: "a < b --> c & d" });
  return made;
}

test("what is shown is segments, then locked, then partial; nothing twice", () => {
  const made = heard();
  made.apply({ type: "partial", start_s: 3.5, end_s: 4, text: "it was the" });
  assert.equal(made.text, "It was the best of times. a < b --> c & d it was the");
  made.apply({ type: "locked", seq: 3, start_s: 3.5, end_s: 4, text: "it was" });
  assert.deepEqual([made.locked, made.partial], ["it was", " the"]);
  made.apply({ type: "partial", start_s: 4, end_s: 4.2, text: " the worst" });
  made.apply({ type: "locked", seq: 4, start_s: 4, end_s: 4.2, text: " the age" });
  assert.deepEqual([made.locked, made.partial], ["it was the age", ""], "a partial of other words is out of date");
  made.apply({ type: "segment", seq: 5, index: 2, start_s: 3.5, end_s: 5, text: "it was the age" });
  assert.deepEqual([made.locked, made.partial, made.segments.length], ["", "", 3]);
});

test("words and speakers come with segments, and speakers may be corrected", () => {
  const made = new Transcript();
  const words = [{ text: "$20.", start_s: 0.5, end_s: 1, confidence: 0.75, spoken: "Twenty dollars." }];
  const said = { start_s: 0.5, end_s: 1.25, text: "$20.", spoken: "Twenty dollars.", speaker: "SPEAKER_00" };
  made.apply({ type: "segment", seq: 1, index: 0, ...said, words });
  made.apply({ type: "segment", seq: 2, index: 1, start_s: 2, end_s: 3, text: "So.", speaker: "SPEAKER_01" });
  assert.deepEqual(made.segments[0], {
    index: 0,
    start: 0.5,
    end: 1.25,
    text: "$20.",
    spoken: "Twenty dollars.",
    speaker: "SPEAKER_00",
    words: [{ text: "$20.", start: 0.5, end: 1, confidence: 0.75, spoken: "Twenty dollars." }],
  });
  made.apply({ type: "speakers", seq: 3, segments: [{ index: 1, speaker: "SPEAKER_00" }] });
  assert.deepEqual(made.segments.map((each) => each.speaker), ["SPEAKER_00", "SPEAKER_00"]);
});

test("where the speaker changes, what was locked begins all of the segments together", () => {
  const made = new Transcript();
  made.apply({ type: "locked", seq: 1, start_s: 0.5, end_s: 3, text: "You were in pain? Not now. Do you" });
  made.apply({ type: "segment", seq: 2, index: 0, start_s: 0.5, end_s: 1, text: "You were in pain?" });
  assert.deepEqual([made.locked, made.open], ["Not now. Do you", { start: 1, end: 3 }]);
  made.apply({ type: "segment", seq: 3, index: 1, start_s: 1, end_s: 2, text: "Not 1.", spoken: "Not now." });
  assert.equal(made.text, "You were in pain? Not 1. Do you");
  made.apply({ type: "segment", seq: 4, index: 2, start_s: 2, end_s: 4, text: "Do you remember?" });
  assert.equal(made.text, "You were in pain? Not 1. Do you remember?");
});

test("exports hold what is final", () => {
  const made = heard();
  made.apply({ type: "partial", start_s: 3.5, end_s: 4, text: "not yet" });
  assert.equal(made.toTxt(), "It was the best of times.\na < b --> c & d\n");
  assert.equal(
    made.toSrt(),
    "1\n00:00:00,500 --> 00:00:02,000\nIt was the best of times.\n\n2\n00:00:02,000 --> 00:00:03,000\na < b → c & d\n",
  );
  assert.ok(made.toVtt().startsWith("WEBVTT\n\n00:00:00.500 --> 00:00:02.000\n"));
  assert.ok(made.toVtt().endsWith("a &lt; b --&gt; c &amp; d\n"));
  made.apply({ type: "end", seq: 3, duration_s: 4.5, segments: 2 });
  const read = JSON.parse(made.toJson());
  assert.equal(read.duration, 4.5);
  assert.deepEqual(read.segments[0], { start: 0.5, end: 1.25, text: "It was the best of times." });
});
