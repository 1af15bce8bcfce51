// Runs on the browser's audio thread: all channels of the microphone to one, in blocks, to the page; and, where the
// page asks for speech only, the speech gate with vad.wasm.
// A file of its own, and JavaScript: a page whose policy allows no inline script can load it as it is.

const WINDOW = 512;
/** Silence is told in pieces of about this many samples. */
const SILENCE_PIECE = 1_600;

/** vad.wasm for one caller at 16 kHz. `module`: its bytes. */
export class VoiceActivity {
  constructor(module) {
    const { exports } = new WebAssembly.Instance(new WebAssembly.Module(module));
    this.step = exports.step;
    this.window = new Int16Array(exports.memory.buffer, exports.input_pointer(), WINDOW);
    this.answer = new Float32Array(exports.memory.buffer, exports.probabilities_pointer(), 1);
    new Uint32Array(exports.memory.buffer, exports.slots_pointer(), 1)[0] = 0;
    exports.reset(0);
  }

  /** Probability of speech in the next window (512 samples, int16). */
  probability(window) {
    this.window.set(window);
    if (this.step(1) !== 0) throw new Error("vad.wasm refused a window");
    return this.answer[0];
  }
}

/** Lets speech through and tells silence as its length: the gate of the server's edge, sample for sample.
 *
 * `forward` is called with `{ speech }`, an Int16Array, or `{ silence }`, a count of samples. Each sample comes once, in
 * order. */
export class SpeechGate {
  constructor(voice, forward, options = {}) {
    const { threshold = 0.3, negThreshold = 0.2, preRollMs = 640, hangoverMs = 960, leadMs = 512 } = options;
    this.voice = voice;
    this.forward = forward;
    this.threshold = threshold;
    this.negThreshold = negThreshold;
    this.preRoll = 16 * preRollMs;
    this.hangover = 16 * hangoverMs;
    this.lead = 16 * leadMs;
    this.held = new Int16Array(2 * (this.preRoll + WINDOW) + 4 * WINDOW);
    this.start = this.end = this.scored = this.emitted = this.speechUntil = 0;
    this.speaking = false;
    this.silence = 0;
  }

  /** Samples (int16) at 16 kHz, any number. */
  feed(pcm) {
    for (let from = 0; from < pcm.length; ) {
      const piece = pcm.subarray(from, from + WINDOW - (this.end - this.scored));
      from += piece.length;
      if (this.end - this.start + piece.length > this.held.length) {
        const oldest = Math.min(this.emitted, this.scored);
        this.held.copyWithin(0, oldest - this.start, this.end - this.start);
        this.start = oldest;
      }
      this.held.set(piece, this.end - this.start);
      this.end += piece.length;
      if (this.end - this.scored === WINDOW) this.score(this.slice(this.scored, this.end));
    }
  }

  /** Give out everything that is held, as sound: the audio goes on. */
  flush() {
    this.speech(this.end);
    this.tell();
  }

  /** No more sound: give out the rest. */
  finish() {
    if (this.end > this.scored) {
      const padded = new Int16Array(WINDOW);
      padded.set(this.slice(this.scored, this.end));
      this.score(padded);
    }
    this.silent(this.end);
    this.tell();
  }

  score(window) {
    const probability = this.voice.probability(window);
    this.scored = this.end;
    if (probability >= (this.speaking ? this.negThreshold : this.threshold)) {
      this.speaking = true;
      this.speechUntil = this.end + this.hangover;
      this.speech(this.end);
    } else {
      this.speech(Math.min(this.end, Math.max(this.speechUntil, this.lead)));
      this.speaking = 0 < this.end && this.end <= this.speechUntil;
      this.silent(this.end - this.preRoll);
    }
  }

  slice(from, to) {
    return this.held.subarray(from - this.start, to - this.start);
  }

  speech(to) {
    if (to <= this.emitted) return;
    this.tell();
    this.forward({ speech: this.slice(this.emitted, to).slice() });
    this.emitted = to;
  }

  silent(to) {
    if (to <= this.emitted) return;
    this.silence += to - this.emitted;
    this.emitted = to;
    if (this.silence >= SILENCE_PIECE) this.tell();
  }

  tell() {
    if (this.silence) this.forward({ silence: this.silence });
    this.silence = 0;
  }
}

// Outside an audio thread, in tests, there is nothing to register.
const Processor = globalThis.AudioWorkletProcessor ?? class {};

class Capture extends Processor {
  constructor({ processorOptions }) {
    super();
    this.block = new Float32Array(processorOptions.blockFrames);
    this.filled = 0;
    const { voiceActivity, gate } = processorOptions;
    if (voiceActivity) {
      this.gate = new SpeechGate(
        new VoiceActivity(voiceActivity),
        (found) => this.port.postMessage(found, found.speech ? [found.speech.buffer] : []),
        gate,
      );
    }
    // The page lets go of the device.
    this.port.onmessage = ({ data }) => {
      if (data !== "finish") return;
      if (this.gate) {
        if (this.filled) this.gate.feed(toInt16(this.block.subarray(0, this.filled)));
        this.gate.finish();
      }
      this.gate = undefined;
      this.finished = true;
      this.port.postMessage({ finished: true });
    };
  }

  process([channels]) {
    if (this.finished) return false;
    const frames = channels[0]?.length ?? 0; // no channels: the microphone is gone, or not there yet
    for (let n = 0; n < frames; n++) {
      let sum = 0;
      for (const channel of channels) sum += channel[n];
      this.block[this.filled++] = sum / channels.length;
      if (this.filled === this.block.length) {
        if (this.gate) this.gate.feed(toInt16(this.block));
        this.port.postMessage(this.block, [this.block.buffer]);
        this.block = new Float32Array(this.filled);
        this.filled = 0;
      }
    }
    return true;
  }
}

/** As pcm.ts has it. */
function toInt16(pcm) {
  const made = new Int16Array(pcm.length);
  for (let n = 0; n < pcm.length; n++) made[n] = Math.max(-32_768, Math.min(32_767, Math.round(pcm[n] * 32_768)));
  return made;
}

if (globalThis.registerProcessor) globalThis.registerProcessor("asr-serve-capture", Capture);
