import type { Segment } from "asr-serve";

/** Colours that there are: styles/rich.css. */
const COLOURS = 8;
const NUMBERED = /^(?:SPEAKER_|SPK)(\d+)$/;

/** What a take calls its speakers, by the server's names for them. */
export type Names = ReadonlyMap<string, string>;

/** One name for a speaker, whichever of the server's routes tells it: `SPK1` is `SPEAKER_01`. */
export function speakerId(told: string): string {
  const number = NUMBERED.exec(told)?.[1];
  return number === undefined ? told : `SPEAKER_${number.padStart(2, "0")}`;
}

/** What people read: the name somebody gave, or `Speaker 2`. */
export function speakerName(speaker: string, names: Names): string {
  const number = NUMBERED.exec(speaker)?.[1];
  return names.get(speaker) ?? (number === undefined ? speaker : `Speaker ${Number(number) + 1}`);
}

/** Which of the colours; from the ninth speaker on they come again, and names tell. */
export function speakerColour(speaker: string): number {
  const number = NUMBERED.exec(speaker)?.[1];
  const letters = [...speaker].reduce((sum, letter) => sum + letter.codePointAt(0)!, 0);
  return (number === undefined ? letters : Number(number)) % COLOURS;
}

/** Who speaks in these, by who comes first, and for how many seconds. */
export function speakersOf(segments: readonly Segment[]): Map<string, number> {
  const found = new Map<string, number>();
  for (const { speaker, start, end } of segments) {
    if (speaker) found.set(speaker, (found.get(speaker) ?? 0) + end - start);
  }
  return found;
}
