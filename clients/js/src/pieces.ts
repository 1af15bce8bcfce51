/** What may stand on a line of subtitles: the smallest pieces of a segment, and when each is said. The server's rules:
 * `text/formats/subtitle_tokens.py` says why they are so. */

import type { Segment } from "./transcript.js";

/** Widest subtitle line. A wide character (Chinese, Japanese, Korean) takes two columns. */
export const LINE_COLUMNS = 42;
/** What may not begin a line. */
const NO_START = new Set("。、，．！？；：）」』】》〉〕］｝〗〙”’・ー々ゝゞぁぃぅぇぉっゃゅょァィゥェォッャュョ…,.!?;:)]}\"'%％°");
/** What may not end one. */
const NO_END = new Set("「『【《〈〔［｛〖〘（“‘([{");
/** Code points of East Asian width W or F, in coarse ranges. */
const WIDE =
  /[\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua960-\ua97c\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\uffe0-\uffe6\u{1f300}-\u{1f64f}\u{1f900}-\u{1f9ff}\u{20000}-\u{3fffd}]/u;
/** Wide, and with spaces between words. */
const HANGUL = /[\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff]/u;
const SPACE = /[\s\x1c-\x1f\x85]+/;

/** Text without spaces. `spaced`: on the same line as the one before, a space stands between them. */
export interface Piece {
  text: string;
  startMs: number;
  endMs: number;
  spaced: boolean;
  /** The times are those of a word, not a share of a segment's. */
  timed: boolean;
}

/** All of a segment, in order, each with who says it: as its words tell, where they spell its text. */
export function pieces(segment: Segment): { speaker: string; piece: Piece }[] {
  const { text, words = [], speaker = "" } = segment;
  const bare = (said: string): string => split(said).join("");
  if (words.length && words.map((word) => bare(word.text)).join("") === bare(text)) {
    const found: { speaker: string; piece: Piece }[] = [];
    let at = 0;
    for (const word of words) {
      const [begins] = split(word.text);
      const first = begins === undefined ? at : text.indexOf(begins, at);
      const between = text.slice(at, first);
      const spaced = !found.length || (between !== "" && !split(between).length);
      at = first + word.text.length;
      const cuts = cut(word.text, toMs(word.start), toMs(word.end), spaced, true);
      found.push(...cuts.map((piece) => ({ speaker: word.speaker ?? speaker, piece })));
    }
    return found;
  }
  return cut(text, toMs(segment.start), toMs(segment.end), true, false).map((piece) => ({ speaker, piece }));
}

/** `Ada Lovelace:`, before what she says. */
export function named(name: string, atMs: number): Piece[] {
  return cut(`${name}:`, atMs, atMs, true, false);
}

/** White space collapses, control characters go. */
export function clean(text: string): string {
  return split(text.replace(/(?![\s\x1c-\x1f\x85])\p{Cc}/gu, "")).join(" ");
}

/** How wide it is shown. */
export function columns(text: string): number {
  let sum = 0;
  for (const letter of text) sum += width(letter);
  return sum;
}

export function toMs(seconds: number): number {
  return Math.floor((Math.round(seconds * 16_000) + 8) / 16); // times are whole samples at 16 kHz
}

/** Clean text in pieces that fit a line. */
function splitPieces(text: string): { part: string; spaced: boolean }[] {
  const found: { part: string; spaced: boolean }[] = [];
  for (const chunk of split(text)) {
    let [part, wide, spaced, before] = ["", 0, true, ""];
    for (const letter of chunk) {
      wide += width(letter);
      if (part && (wide > LINE_COLUMNS || mayBreak(before, letter))) {
        found.push({ part, spaced });
        [part, wide, spaced] = ["", width(letter), false];
      }
      part += letter;
      before = letter;
    }
    found.push({ part, spaced });
  }
  return found;
}

function cut(text: string, startMs: number, endMs: number, spaced: boolean, timed: boolean): Piece[] {
  const parts = splitPieces(clean(text));
  const total = parts.reduce((sum, { part }) => sum + [...part].length, 0);
  const at = (passed: number): number => startMs + Math.floor(((endMs - startMs) * passed) / total);
  let passed = 0;
  return parts.map(({ part, spaced: gap }, number) => {
    const begins = at(passed);
    passed += [...part].length;
    return { text: part, startMs: begins, endMs: at(passed), spaced: number ? gap : spaced, timed };
  });
}

function split(text: string): string[] {
  return text.split(SPACE).filter(Boolean);
}

function width(letter: string): number {
  return WIDE.test(letter) ? 2 : 1;
}

function mayBreak(before: string, letter: string): boolean {
  return !NO_START.has(letter) && !NO_END.has(before) && (isUnspaced(letter) || isUnspaced(before));
}

function isUnspaced(letter: string): boolean {
  return WIDE.test(letter) && !HANGUL.test(letter);
}
