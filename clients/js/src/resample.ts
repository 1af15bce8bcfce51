/** Zero crossings of the filter on each side; its flank is 1/ZEROS of the pass band wide. */
const ZEROS = 24;
/** Of the Kaiser window: 90 dB in the stop band. */
const BETA = 9;
/** Where the flank's middle lies, of the lower Nyquist frequency: what is left of the flank aliases into its top. */
const CUTOFF = 0.94;

/** Changes the rate of a stream with a windowed-sinc filter. Sample 0 of the output is sample 0 of the input;
 * the latest millisecond or two stay inside until more comes. */
export class Resampler {
  /** The output's position advances by `step / phases` input samples a sample. */
  readonly #step: number;
  readonly #phases: number;
  /** One row of `#taps` weights for each fraction of an input sample. */
  readonly #filter: Float32Array;
  readonly #taps: number;
  #kept: Float32Array;
  /** Next output, in 1/phases of an input sample from the start of `#kept`: where the filter's row begins. */
  #at = 0;

  constructor(fromHz: number, toHz: number) {
    const shared = gcd(fromHz, toHz);
    [this.#step, this.#phases] = [fromHz / shared, toHz / shared];
    const pass = CUTOFF * Math.min(1, toHz / fromHz);
    const half = Math.ceil(ZEROS / pass);
    this.#taps = 2 * half;
    this.#filter = filter(this.#phases, half, pass);
    this.#kept = new Float32Array(half - 1); // silence before the first sample
  }

  /** Samples in, those out that can be told by now. */
  push(pcm: Float32Array): Float32Array {
    const input = new Float32Array(this.#kept.length + pcm.length);
    input.set(this.#kept);
    input.set(pcm, this.#kept.length);
    const last = (input.length - this.#taps) * this.#phases; // the last place where a whole row fits
    const made = new Float32Array(last < this.#at ? 0 : Math.floor((last - this.#at) / this.#step) + 1);
    for (let n = 0; n < made.length; n++, this.#at += this.#step) {
      const from = Math.floor(this.#at / this.#phases);
      const row = (this.#at % this.#phases) * this.#taps;
      let sum = 0;
      for (let tap = 0; tap < this.#taps; tap++) sum += input[from + tap]! * this.#filter[row + tap]!;
      made[n] = sum;
    }
    const gone = Math.min(Math.floor(this.#at / this.#phases), input.length);
    this.#kept = input.slice(gone);
    this.#at -= gone * this.#phases;
    return made;
  }
}

/** Rows of 2·half weights. Row p is for an output p/phases behind the input sample under tap half-1. */
function filter(phases: number, half: number, pass: number): Float32Array {
  const rows = new Float32Array(phases * 2 * half);
  for (let phase = 0; phase < phases; phase++) {
    const row = rows.subarray(phase * 2 * half, (phase + 1) * 2 * half);
    let sum = 0;
    for (let tap = 0; tap < row.length; tap++) {
      const distance = tap - (half - 1) - phase / phases;
      const window = bessel(BETA * Math.sqrt(Math.max(0, 1 - (distance / half) ** 2))) / bessel(BETA);
      row[tap] = sinc(pass * distance) * window;
      sum += row[tap]!;
    }
    for (let tap = 0; tap < row.length; tap++) row[tap]! /= sum; // a constant stays what it is
  }
  return rows;
}

function sinc(x: number): number {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}

/** The modified Bessel function I0, as its series. */
function bessel(x: number): number {
  let [sum, term] = [1, 1];
  for (let k = 1; term > sum * 1e-12; k++) sum += term *= (x / (2 * k)) ** 2;
  return sum;
}

function gcd(a: number, b: number): number {
  return b ? gcd(b, a % b) : a;
}
