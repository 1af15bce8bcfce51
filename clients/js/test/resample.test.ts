import assert from "node:assert/strict";
import { test } from "node:test";
import { Resampler } from "asr-serve";

const SECOND = 1;

function sine(hz: number, rateHz: number): Float32Array {
  return Float32Array.from({ length: rateHz * SECOND }, (_, n) => 0.5 * Math.sin((2 * Math.PI * hz * n) / rateHz));
}

/** Signal to noise in dB of `heard` against `meant`, without the ends. */
function snr(heard: Float32Array, meant: Float32Array): number {
  let [signal, noise] = [0, 0];
  for (let n = 200; n < heard.length - 200; n++) {
    signal += meant[n]! ** 2;
    noise += (heard[n]! - meant[n]!) ** 2;
  }
  return 10 * Math.log10(signal / noise);
}

function rms(pcm: Float32Array): number {
  return Math.sqrt(pcm.reduce((sum, sample) => sum + sample * sample, 0) / pcm.length);
}

for (const fromHz of [48_000, 44_100, 22_050, 96_000, 8_000]) {
  test(`${fromHz} Hz to 16 kHz: a sine stays that sine, in place`, () => {
    for (const hz of [100, 1_000, 3_000, ...(fromHz > 16_000 ? [6_500] : [])]) {
      const heard = new Resampler(fromHz, 16_000).push(sine(hz, fromHz));
      assert.ok(heard.length > 15_900 && heard.length <= 16_000, `${heard.length} samples`);
      const found = snr(heard, sine(hz, 16_000));
      assert.ok(found > 75, `${hz} Hz: ${found.toFixed(1)} dB`);
    }
  });
}

test("what 16 kHz cannot hold does not fold back", () => {
  for (const hz of [8_500, 10_000, 15_000, 20_000]) {
    const left = rms(new Resampler(48_000, 16_000).push(sine(hz, 48_000)).subarray(200));
    assert.ok(20 * Math.log10(left / 0.35) < -75, `${hz} Hz: ${(20 * Math.log10(left / 0.35)).toFixed(1)} dB`);
  }
});

test("how the audio is cut changes nothing", () => {
  const pcm = sine(440, 44_100);
  const whole = new Resampler(44_100, 16_000).push(pcm);
  const cut = new Resampler(44_100, 16_000);
  const pieces: number[] = [];
  for (let at = 0, n = 0; at < pcm.length; n++) {
    const length = [1, 128, 7, 882, 3_000][n % 5]!;
    pieces.push(...cut.push(pcm.subarray(at, at + length)));
    at += length;
  }
  assert.deepEqual(Float32Array.from(pieces), whole);
});

test("a constant stays what it is", () => {
  const heard = new Resampler(44_100, 16_000).push(new Float32Array(44_100).fill(0.25));
  for (const sample of heard.subarray(200)) assert.ok(Math.abs(sample - 0.25) < 1e-6);
});
