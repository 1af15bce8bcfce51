import assert from "node:assert/strict";
import { test } from "node:test";
import { chromium, inPage } from "./browser.js";
import { clip, readWav, skip } from "./speech.js";

const noBrowser = chromium ? false : "there is no Chromium: install one, or name it in CHROMIUM";
const FAKE = [
  "--use-fake-device-for-media-stream",
  "--use-fake-ui-for-media-stream",
];
const SECONDS = 3;
/** As Firefox does. */
const OWN_RATE_ONLY = `
  const connect = AudioContext.prototype.createMediaStreamSource;
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    if (this.sampleRate === 16000) throw new DOMException("different sample-rate", "NotSupportedError");
    return connect.call(this, stream);
  };
`;
const LISTEN = `
  import { microphone } from "/dist/index.js";
  const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  let asked;
  navigator.mediaDevices.getUserMedia = (wanted) => ask((asked = wanted));
  const mic = await microphone({ autoGainControl: true });
  const pcm = [], lengths = new Set(), levels = [];
  mic.on("level", ({ rms, peak }) => levels.push([rms, peak]));
  mic.on("frame", (frame) => {
    lengths.add(frame.length);
    pcm.push(...frame);
    if (pcm.length >= 16000 * ${SECONDS}) void done();
  });
  async function done() {
    await mic.stop();
    tell({ asked, rate: mic.rate, label: mic.label, lengths: [...lengths], levels, pcm });
  }
`;

interface Heard {
  asked: MediaStreamConstraints;
  rate: number;
  label: string;
  lengths: number[];
  levels: [number, number][];
  pcm: number[];
}

/** Loudness of each 50 ms from sample `from` on: what can be compared whatever the delay and the resampler. */
function envelope(pcm: ArrayLike<number>, rate: number, from = 0): number[] {
  const length = rate / 20;
  return Array.from({ length: Math.floor((pcm.length - from) / length) }, (_, n) => {
    let power = 0;
    for (let at = from + n * length; at < from + (n + 1) * length; at++) power += (pcm[at]! / 32_768) ** 2;
    return Math.sqrt(power / length);
  });
}

/** Of `found`, wherever in `pcm` it fits best: 0.999 for the recording, 0.66 for the same backwards. */
function likeness(found: number[], pcm: ArrayLike<number>, rate: number): number {
  let best = -1;
  for (let part = 0; part < 10; part++) {
    const meant = envelope(pcm, rate, (part * rate) / 200);
    for (let at = 0; at + found.length <= meant.length; at++) {
      best = Math.max(best, correlation(found, meant.slice(at, at + found.length)));
    }
  }
  return best;
}

function correlation(a: number[], b: number[]): number {
  const mean = (x: number[]): number => x.reduce((sum, y) => sum + y, 0) / x.length;
  const [ma, mb] = [mean(a), mean(b)];
  let [ab, aa, bb] = [0, 0, 0];
  a.forEach((x, n) => {
    ab += (x - ma) * (b[n]! - mb);
    aa += (x - ma) ** 2;
    bb += (b[n]! - mb) ** 2;
  });
  return ab / Math.sqrt(aa * bb);
}

for (const [where, before] of [["where the browser resamples", ""], ["where it does not", OWN_RATE_ONLY]] as const) {
  test(`frames of 100 ms at 16 kHz, and levels, ${where}`, { skip: noBrowser || skip }, async () => {
    const heard = (await inPage(before + LISTEN, [...FAKE, `--use-file-for-fake-audio-capture=${clip}`])) as Heard;
    const plain = { echoCancellation: false, noiseSuppression: false };
    assert.deepEqual(heard.asked, { audio: { ...plain, autoGainControl: true } });
    assert.deepEqual([heard.rate, heard.lengths], [16_000, [1_600]]);
    assert.ok(heard.label);
    assert.ok(heard.levels.length >= SECONDS * 45, `${heard.levels.length} levels`);
    assert.ok(heard.levels.every(([rms, peak]) => 0 <= rms && rms <= peak && peak <= 1.01));
    const { pcm, rate } = readWav(clip);
    const best = likeness(envelope(heard.pcm, 16_000), new Int16Array(pcm.buffer), rate);
    assert.ok(best > 0.95, `like the recording: ${best.toFixed(3)}`);
  });
}

const SPEECH_ONLY = `
  import { microphone } from "/dist/index.js";
  const mic = await microphone({ speechOnly: { module: "/dist/vad.wasm", preRollMs: 64, hangoverMs: 64 } });
  const pcm = [], told = [];
  let over = false;
  mic.on("silence", (samples) => { told.push(samples); pcm.push(...new Array(samples).fill(0)); void look(); });
  mic.on("frame", (frame) => { told.push(-frame.length); pcm.push(...frame); });
  async function look() {  // in silence, where the gate holds audio back; in speech it may hold none
    if (over || pcm.length < 16000 * 12) return;
    over = true;
    const before = pcm.length;
    await mic.stop();
    tell({ told, before, pcm });
  }
`;

test("speech only: what is silence is told as a count, on the audio thread", { skip: noBrowser || skip }, async () => {
  const flags = [...FAKE, `--use-file-for-fake-audio-capture=${clip}`];
  const { told, before, pcm } = (await inPage(SPEECH_ONLY, flags)) as { told: number[]; before: number; pcm: number[] };
  const silent = told.filter((count) => count > 0).reduce((sum, count) => sum + count, 0);
  assert.ok(silent > 8_000 && silent < 0.9 * pcm.length, `${silent} of ${pcm.length}`);
  assert.ok(pcm.length > before, "what was held back comes at the end");
  const recorded = readWav(clip);
  const best = likeness(envelope(pcm.slice(0, 3 * 16_000), 16_000), new Int16Array(recorded.pcm.buffer), recorded.rate);
  assert.ok(best > 0.95, `like the recording: ${best.toFixed(3)}`);
});

const NO_MODULE = `
  import { microphone } from "/dist/index.js";
  microphone({ speechOnly: { module: "/dist/vad.wasm" } }).then(() => tell("given"), (error) => tell(error.code));
`;

test("a browser that records at a rate of its own says so", { skip: noBrowser }, async () => {
  assert.equal(await inPage(OWN_RATE_ONLY + NO_MODULE, FAKE), "no-voice-activity");
});

const REFUSED = `
  import { microphone } from "/dist/index.js";
  microphone().then(() => tell("given"), (error) => tell([error.name, error.code]));
`;

test("refusals have a code each", { skip: noBrowser }, async () => {
  const permitted = ["--use-fake-ui-for-media-stream"];
  const denied = ["--use-fake-device-for-media-stream", "--deny-permission-prompts"];
  assert.deepEqual(await inPage(REFUSED, permitted), ["SpeechError", "no-microphone"]);
  assert.deepEqual(await inPage(REFUSED, denied), ["SpeechError", "no-permission"]);
  assert.deepEqual(await inPage(REFUSED, FAKE, "elsewhere.test"), ["SpeechError", "insecure-context"]);
});
