import assert from "node:assert/strict";
import { test } from "node:test";
import { crc32 as reference } from "node:zlib";
import { answers, archivePaths } from "../src/batches/answers";
import { countsOf, customIds, inputLines, isOpen, shareOf, tookS, type Batch } from "../src/batches/batch";
import { crc32, zip } from "../src/page/zip";

const batch: Batch = {
  id: "batch_1",
  endpoint: "/v1/audio/transcriptions",
  errors: null,
  input_file_id: "file-1",
  status: "in_progress",
  output_file_id: null,
  error_file_id: null,
  created_at: 100,
  in_progress_at: 110,
  expires_at: 1_000,
  completed_at: null,
  failed_at: null,
  expired_at: null,
  cancelled_at: null,
  request_counts: { total: 4, completed: 1, failed: 1 },
  metadata: null,
};

test("how far a batch is", () => {
  assert.equal(shareOf(batch), 0.5);
  assert.equal(countsOf(batch), "2 of 4 recordings done, 1 failed");
  assert.equal(countsOf({ ...batch, request_counts: { total: 3, completed: 3, failed: 0 } }), "3 recordings");
  assert.equal(countsOf({ ...batch, request_counts: { total: 3, completed: 0, failed: 3 } }), "3 recordings, all failed");
  assert.equal(countsOf({ ...batch, request_counts: { total: 0, completed: 0, failed: 0 } }), "");
  assert.equal(shareOf({ ...batch, request_counts: { total: 0, completed: 0, failed: 0 } }), 0);
  assert.equal(tookS(batch, 150), 40);
  assert.equal(tookS({ ...batch, status: "completed", completed_at: 120 }, 150), 10);
  for (const status of ["validating", "in_progress", "finalizing", "cancelling"] as const) assert(isOpen({ ...batch, status }));
  for (const status of ["failed", "completed", "expired", "cancelled"] as const) assert(!isOpen({ ...batch, status }));
});

test("every recording has a name of its own", () => {
  assert.deepEqual(customIds(["a.wav", "b/a.wav", "a.wav", "a.wav"]), ["a.wav", "b/a.wav", "a.wav (2)", "a.wav (3)"]);
  const long = customIds(["x".repeat(600), "x".repeat(600)]);
  assert(long.every((id) => id.length <= 512));
  assert.notEqual(long[0], long[1]);
  assert.doesNotThrow(() => encodeURIComponent(customIds([`${"😀".repeat(600)}.wav`])[0]!)); // no half of a character
});

test("the input has what was chosen, and nothing else", () => {
  const lines = inputLines([{ id: 'a "1".wav', fileId: "file-1" }], { model: "", language: "en", format: "srt" });
  assert.deepEqual(JSON.parse(lines), {
    custom_id: 'a "1".wav',
    method: "POST",
    url: "/v1/audio/transcriptions",
    body: { language: "en", response_format: "srt", file: "file-1" },
  });
  assert(lines.endsWith("\n"));
});

test("answers are texts, sounds or words for what went wrong", () => {
  const line = (id: string, body: unknown): string => JSON.stringify({ custom_id: id, response: { status_code: 200, body }, error: null });
  const wrong = JSON.stringify({
    custom_id: "e",
    response: { status_code: 400, body: { error: { message: "the file is empty.", type: "x", code: "empty_audio" } } },
    error: null,
  });
  const never = JSON.stringify({ custom_id: "f", response: null, error: { message: "m", type: "x", code: "batch_expired" } });
  const speech = { file_id: "file-9", bytes: 44, content_type: "audio/mpeg", seconds: 1.5 };
  const jsonl = [
    line("a", { text: "One." }),
    line("b", "1\n00:00:00,000 --> 00:00:01,000\nOne.\n"),
    line("c", "WEBVTT\n\n"),
    line("d", speech),
    line("g", { text: "One.", segments: [{ id: 0, start: 0, end: 1, text: "One." }] }),
    wrong,
    never,
  ].join("\n");
  const found = answers(`${jsonl}\n`);
  const [srt, vtt] = ["1\n00:00:00,000 --> 00:00:01,000\nOne.\n", "WEBVTT\n\n"];
  assert.deepEqual(found.slice(0, 4), [
    { id: "a", text: "One.", suffix: ".txt", file: "One.\n" },
    { id: "b", text: srt, suffix: ".srt", file: srt },
    { id: "c", text: vtt, suffix: ".vtt", file: vtt },
    { id: "d", audio: { fileId: "file-9", bytes: 44, seconds: 1.5 }, suffix: ".mp3" },
  ]);
  const { file, ...segmented } = found[4] as { file: string };
  assert.deepEqual(segmented, { id: "g", text: "One.", suffix: ".json" });
  assert.deepEqual(JSON.parse(file), { text: "One.", segments: [{ id: 0, start: 0, end: 1, text: "One." }] }); // nothing is left out
  assert.deepEqual(found.slice(5), [
    { id: "e", wrong: "This file is empty." },
    { id: "f", wrong: "The batch ran out of time before this one." },
  ]);
});

test("paths in an archive are safe and differ", () => {
  const ids = ["a/b.wav", "../../etc/passwd", "A/B.mp3", "C:\\x\u0000y.wav", "", "..", ".wav"];
  assert.deepEqual(archivePaths(ids, ids.map(() => ".txt")), [
    "a/b.txt",
    "etc/passwd.txt",
    "A/B (2).txt",
    "C_/x_y.txt",
    "line-5.txt",
    "line-6.txt",
    ".wav.txt",
  ]);
});

test("checksums are those of zlib, and an archive has its signatures", async () => {
  for (const text of ["", "a", "It was the best of times.", "ä😀"]) {
    const data = new TextEncoder().encode(text);
    assert.equal(crc32(data), reference(data));
  }
  const made = new DataView(await zip([{ path: "ä.txt", text: "One." }], new Date(2026, 10, 27, 12, 0, 2)).arrayBuffer());
  assert.equal(made.getUint32(0, true), 0x04034b50);
  assert.equal(made.getUint32(made.byteLength - 22, true), 0x06054b50);
  assert.throws(() => zip(Array.from({ length: 70_000 }, () => ({ path: "a", text: "" })), new Date()), /too many/);
});
