import type { Segment, Transcript, Word } from "asr-serve";

/** What a file is made of. */
export interface Given {
  /** Names the recording, without folder and suffix. */
  key: string;
  transcript: Transcript;
  languageScore: number | undefined;
}

export function allWords(segments: readonly Segment[]): Word[] {
  return segments.flatMap(({ words }) => words ?? []);
}

/** White space collapses, control characters go. */
export function clean(text: string): string {
  return text
    .replace(/[\s\x1c-\x1f\x85]+/g, " ")
    .replace(/\p{Cc}/gu, "")
    .trim();
}

/** What may stand in one column of a table. */
export function field(text: string): string {
  return clean(text).replace(/[\s;]+/g, "_") || "_";
}

/** Whole milliseconds. */
export function toMs(seconds: number): number {
  return Math.round(seconds * 1_000);
}
