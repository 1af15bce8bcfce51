// Runs on the browser's audio thread: all channels of the microphone to one, in blocks, to the page.
// A file of its own, and JavaScript: a page whose policy allows no inline script can load it as it is.

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.block = new Float32Array(processorOptions.blockFrames);
    this.filled = 0;
  }

  process([channels]) {
    const frames = channels[0]?.length ?? 0; // no channels: the microphone is gone, or not there yet
    for (let n = 0; n < frames; n++) {
      let sum = 0;
      for (const channel of channels) sum += channel[n];
      this.block[this.filled++] = sum / channels.length;
      if (this.filled === this.block.length) {
        this.port.postMessage(this.block, [this.block.buffer]);
        this.block = new Float32Array(this.filled);
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("asr-serve-capture", Capture);
