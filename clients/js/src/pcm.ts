import { SpeechError } from "./errors.js";

/** Audio as bytes of its own, which the caller may not change any more. Float32Array becomes s16le. */
export function toBytes(audio: ArrayBuffer | ArrayBufferView, encoding: string): Uint8Array<ArrayBuffer> {
  if (audio instanceof Float32Array) {
    if (encoding !== "s16le") throw new SpeechError("bad_audio", `Float32Array cannot be sent as ${encoding}.`);
    return new Uint8Array(toInt16(audio).buffer);
  }
  if (audio instanceof ArrayBuffer) return new Uint8Array(audio.slice(0));
  if (ArrayBuffer.isView(audio)) return new Uint8Array(new Uint8Array(audio.buffer, audio.byteOffset, audio.byteLength));
  throw new SpeechError("bad_audio", "Audio is an ArrayBuffer, a typed array or a DataView.");
}

/** -1..1 as 16-bit samples; what is louder is clipped. */
export function toInt16(pcm: Float32Array): Int16Array<ArrayBuffer> {
  const made = new Int16Array(pcm.length);
  for (let n = 0; n < pcm.length; n++) made[n] = Math.max(-32_768, Math.min(32_767, Math.round(pcm[n]! * 32_768)));
  return made;
}
