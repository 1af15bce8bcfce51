import type { Sound } from "./take";

/** Pieces the picture of a recording is made of. */
const PIECES = 1_200;
/** Decoding takes all of a recording into memory: longer ones, or larger, are played without a picture. */
const LONGEST_S = 20 * 60;
const LARGEST_BYTES = 40e6;

/** A recording as this browser plays it; undefined where it cannot. */
export async function open(file: File): Promise<Sound | undefined> {
  const url = URL.createObjectURL(file);
  const duration = await length(url);
  if (duration === undefined) {
    URL.revokeObjectURL(url);
    return undefined;
  }
  const small = file.size <= LARGEST_BYTES && duration <= LONGEST_S;
  return { url, duration, peaks: small ? await peaks(file) : undefined };
}

function length(url: string): Promise<number | undefined> {
  return new Promise((resolve) => {
    const audio = new Audio();
    audio.preload = "metadata";
    audio.addEventListener("loadedmetadata", () => {
      resolve(Number.isFinite(audio.duration) ? audio.duration : undefined);
      letGo(audio);
    });
    audio.addEventListener("error", () => resolve(undefined));
    audio.src = url;
  });
}

/** It reads no more: a browser complains when an address is revoked that something still reads from. */
export function letGo(audio: HTMLAudioElement): void {
  audio.removeAttribute("src");
  audio.load();
}

async function peaks(file: File): Promise<Float32Array | undefined> {
  try {
    const decoded = await new OfflineAudioContext(1, 1, 8_000).decodeAudioData(await file.arrayBuffer());
    const samples = decoded.getChannelData(0);
    const found = new Float32Array(PIECES);
    for (let at = 0; at < samples.length; at++) {
      const piece = Math.floor((at * PIECES) / samples.length);
      found[piece] = Math.max(found[piece]!, Math.abs(samples[at]!));
    }
    const most = Math.max(...found, 1e-3); // a quiet recording is drawn as tall as a loud one
    return found.map((peak) => peak / most);
  } catch {
    return undefined; // played, and not decoded: a video in some browsers
  }
}
