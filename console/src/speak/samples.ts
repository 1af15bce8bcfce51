import { spoken, type Ask, type Heard } from "./request";

const SAMPLE = "I read whatever you write. Shall we begin?";
/** Samples that are kept: 0.2 MB each. */
const MOST = 64;

const kept = new Map<string, Heard[]>();

/** What a voice sounds like, as the server sends it; heard before, from the page's memory. Throws as `spoken` does. */
export async function* sampled(model: string, voice: string, signal: AbortSignal): AsyncGenerator<Heard> {
  const key = `${model}\n${voice}`;
  const known = kept.get(key);
  if (known) return void (yield* known);
  const asked: Ask = { input: SAMPLE, model, voice, speed: 1, pitch: 0, ssml: false };
  const pieces: Heard[] = [];
  for await (const piece of spoken(asked, signal)) {
    pieces.push(piece);
    yield piece;
  }
  if (kept.size >= MOST) kept.delete(kept.keys().next().value!);
  kept.set(key, pieces);
}

/** Another voice may have this name now. */
export function forget(model: string, voice: string): void {
  kept.delete(`${model}\n${voice}`);
}
