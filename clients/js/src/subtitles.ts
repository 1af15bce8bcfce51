/** Segments as SRT and WebVTT, by the same rules as the server's: see `response_format=srt`. */

import type { Segment } from "./transcript.js";

/** Widest subtitle line. A wide character (Chinese, Japanese, Korean) takes two columns. */
const LINE_COLUMNS = 42;
/** Most lines on screen at once. */
const CUE_LINES = 2;
/** Code points of East Asian width W or F, in coarse ranges. */
const WIDE =
  /[\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua960-\ua97c\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\uffe0-\uffe6\u{1f300}-\u{1f64f}\u{1f900}-\u{1f9ff}\u{20000}-\u{3fffd}]/u;

/** What is on screen from `startMs` to `endMs`: SRT and VTT know no finer time. */
export interface Cue {
  startMs: number;
  endMs: number;
  lines: string[];
}

/** Cues never overlap and each lasts 1 ms or more. Inside a segment time is shared out by characters. */
export function cues(segments: readonly Segment[]): Cue[] {
  const made: Cue[] = [];
  let freeMs = 0;
  for (const segment of segments) {
    const lines = splitLines(clean(segment.text));
    if (!lines.length) continue;
    const shown: string[][] = [];
    for (let at = 0; at < lines.length; at += CUE_LINES) shown.push(lines.slice(at, at + CUE_LINES));
    const startMs = Math.max(freeMs, toMs(segment.start));
    const endMs = Math.max(startMs + shown.length, toMs(segment.end));
    const weights = shown.map((each) => each.reduce((sum, line) => sum + [...line].length, 0));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    let [passed, edge] = [0, startMs];
    shown.forEach((each, n) => {
      passed += weights[n]!;
      const fair = startMs + Math.floor(((endMs - startMs) * passed) / total);
      const next = Math.min(Math.max(fair, edge + 1), endMs - (shown.length - 1 - n));
      made.push({ startMs: edge, endMs: next, lines: each });
      edge = next;
    });
    freeMs = edge;
  }
  return made;
}

/** SubRip. It has no escapes, so an arrow inside the text is written as one character. */
export function srt(cues: readonly Cue[]): string {
  return cues
    .map(({ startMs, endMs, lines }, n) => {
      const times = `${stamp(startMs, ",")} --> ${stamp(endMs, ",")}`;
      return `${n + 1}\n${times}\n${lines.map((line) => `${line.replaceAll("-->", "→")}\n`).join("")}`;
    })
    .join("\n");
}

/** WebVTT; `&`, `<` and `>` (and so `-->`) are escaped. */
export function vtt(cues: readonly Cue[]): string {
  const blocks = cues.map(({ startMs, endMs, lines }) => {
    const times = `${stamp(startMs, ".")} --> ${stamp(endMs, ".")}`;
    return `${times}\n${lines.map((line) => `${escaped(line)}\n`).join("")}`;
  });
  return ["WEBVTT\n", ...blocks].join("\n");
}

/** As few lines as 42 columns allow, then as even as they can be; a word too long for a line is cut. */
function splitLines(text: string): string[] {
  const pieces = text.split(" ").filter(Boolean).flatMap(cut);
  if (!pieces.length) return [];
  const fewest = fill(pieces, LINE_COLUMNS).length;
  let [low, high] = [Math.max(...pieces.map(columns)), LINE_COLUMNS];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (fill(pieces, middle).length === fewest) high = middle;
    else low = middle + 1;
  }
  return fill(pieces, high);
}

/** A word in pieces of at most 42 columns; text without spaces comes as one long word. */
function cut(word: string): string[] {
  const pieces = [""];
  let width = 0;
  for (const char of word) {
    width += columns(char);
    if (width > LINE_COLUMNS) {
      pieces.push("");
      width = columns(char);
    }
    pieces[pieces.length - 1] += char;
  }
  return pieces;
}

/** Pieces on lines, each line as full as it goes. */
function fill(pieces: readonly string[], limit: number): string[] {
  const lines: string[] = [];
  let width = limit;
  for (const piece of pieces) {
    const more = columns(piece);
    if (lines.length && width + 1 + more <= limit) {
      lines[lines.length - 1] += ` ${piece}`;
      width += 1 + more;
    } else {
      lines.push(piece);
      width = more;
    }
  }
  return lines;
}

function columns(text: string): number {
  let sum = 0;
  for (const char of text) sum += WIDE.test(char) ? 2 : 1;
  return sum;
}

function clean(text: string): string {
  return text
    .replace(/[\s\x1c-\x1f\x85]+/g, " ")
    .replace(/\p{Cc}/gu, "")
    .trim();
}

function escaped(line: string): string {
  return line.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** `01:02:03,004`; hours grow past two digits when they must. */
function stamp(ms: number, point: string): string {
  const two = (n: number): string => String(Math.floor(n)).padStart(2, "0");
  const [hours, minutes, seconds] = [ms / 3_600_000, (ms / 60_000) % 60, (ms / 1_000) % 60];
  return `${two(hours)}:${two(minutes)}:${two(seconds)}${point}${String(ms % 1_000).padStart(3, "0")}`;
}

function toMs(seconds: number): number {
  return Math.floor((Math.round(seconds * 16_000) + 8) / 16); // times are whole samples at 16 kHz
}
