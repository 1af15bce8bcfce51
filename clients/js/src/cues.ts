/** Segments to cues: what is on screen, from when to when. Cut as the server cuts; `text/formats/cues.py` says why. */

import { clean, columns, LINE_COLUMNS, named, pieces, type Piece } from "./pieces.js";
import type { Segment } from "./transcript.js";

/** Most lines on screen at once. */
const CUE_LINES = 2;
/** Characters a second, as fast as most people read. */
const READ_CHARACTERS = 17;
const [LEAST_MS, MOST_MS] = [833, 7_000];
const [PAUSE_MS, LONG_PAUSE_MS] = [300, 1_000];
const SENTENCE_MARKS = new Set(".!?。！？…．");
const CLAUSE_MARKS = new Set(",;:、，；：—–");
const MARKS = new Set([...SENTENCE_MARKS, ...CLAUSE_MARKS]);
/** They may stand behind a mark that ends something. */
const BEHIND_MARKS = /["'”’)\]}」』】》）]+$/u;
const [CUE, WITHIN, CLAUSE, BROKEN, TORN] = [40, 15, 12, 60, 80];
const [STILL, SHORT, LONG, FEW, FEW_COLUMNS, HURRIED_MOST] = [200, 60, 100, 30, 10, 100];

/** What is on screen from `startMs` to `endMs`: SRT and VTT know no finer time. */
export interface Cue {
  startMs: number;
  endMs: number;
  rows: Piece[][];
  speaker: string;
}

/** Cues in order, never overlapping; each lasts 1 ms or more. `endMs`: of the recording. `names`: where the speaker
 * changes the text begins with a name. */
export function cues(segments: readonly Segment[], endMs: number, names = false): Cue[] {
  const made = cut(segments, names);
  let freeMs = 0;
  return made.map((cue, n) => {
    const next = made[n + 1];
    const shown = timed(cue, freeMs, next ? next.startMs : Math.max(endMs, cue.endMs, freeMs), !next);
    freeMs = shown.endMs;
    return shown;
  });
}

/** A line as it is shown. */
export function joined(row: readonly Piece[]): string {
  return row.map(({ text, spaced }, number) => (number && spaced ? ` ${text}` : text)).join("");
}

function endsWith(text: string, marks: Set<string>): boolean {
  return marks.has([...text.replace(BEHIND_MARKS, "")].at(-1) ?? "");
}

/** With the times of what they say. */
function cut(segments: readonly Segment[], names: boolean): Cue[] {
  const made: Cue[] = [];
  let told = "";
  for (const segment of segments) {
    for (const { speaker, said } of turns(segment)) {
      const all = names && speaker && speaker !== told ? [...named(clean(speaker), said[0]!.startMs), ...said] : said;
      told = speaker;
      for (const part of cheapest(all)) {
        made.push({ startMs: part[0]!.startMs, endMs: part.at(-1)!.endMs, rows: rows(part), speaker });
      }
    }
  }
  return made;
}

/** What each of its speakers says without a break. */
function turns(segment: Segment): { speaker: string; said: Piece[] }[] {
  const found: { speaker: string; said: Piece[] }[] = [];
  for (const { speaker, piece } of pieces(segment)) {
    const last = found.at(-1);
    if (last?.speaker === speaker) last.said.push(piece);
    else found.push({ speaker, said: [piece] });
  }
  return found;
}

/** Cuts what one speaker says in a segment, so that the whole costs least. */
function cheapest(said: Piece[]): Piece[][] {
  const best: number[] = [0];
  const origin: number[] = [0];
  const ends = said.map((_, at) => costBehind(said, at));
  const inside = said.map((_, at) => costWithin(said, at));
  const wide = said.map((piece) => columns(piece.text));
  for (let first = 0; first < said.length; first++) {
    let [within, lines, width, total] = [0, 0, 0, 0];
    for (let last = first; last < said.length; last++) {
      const gap = said[last]!.spaced && last > first ? 1 : 0;
      total += wide[last]! + gap;
      if (last > first && width + gap + wide[last]! <= LINE_COLUMNS) {
        width += gap + wide[last]!;
      } else {
        lines += 1;
        width = wide[last]!;
      }
      if (lines > CUE_LINES) break;
      const cost = best[first]! + CUE + within + ends[last]! + costOfTime(said, first, last, total);
      const known = best[last + 1];
      if (known === undefined || cost < known) {
        best[last + 1] = cost;
        origin[last + 1] = first;
      }
      within += inside[last]!;
    }
  }
  const found: Piece[][] = [];
  for (let behind = said.length; behind; behind = origin[behind]!) found.unshift(said.slice(origin[behind], behind));
  return found;
}

/** In ms, where it is known. */
function pauseBehind(said: readonly Piece[], at: number): number {
  const [piece, next] = [said[at]!, said[at + 1]];
  return next && piece.timed && next.timed ? next.startMs - piece.endMs : 0;
}

/** Of a cue that ends with this piece. */
function costBehind(said: readonly Piece[], at: number): number {
  const next = said[at + 1];
  if (!next || endsWith(said[at]!.text, SENTENCE_MARKS)) return 0;
  if (endsWith(said[at]!.text, CLAUSE_MARKS) || pauseBehind(said, at) >= PAUSE_MS) return CLAUSE;
  return next.spaced ? BROKEN : TORN;
}

/** Of a cue that goes on behind this piece. */
function costWithin(said: readonly Piece[], at: number): number {
  const pause = pauseBehind(said, at);
  if (pause >= LONG_PAUSE_MS) return STILL;
  return WITHIN * (Number(pause >= PAUSE_MS) + Number(endsWith(said[at]!.text, SENTENCE_MARKS)));
}

function costOfTime(said: readonly Piece[], first: number, last: number, width: number): number {
  const [start, end] = [said[first]!.startMs, said[last]!.endMs];
  const free = said[last + 1]?.startMs ?? end;
  let cost = width <= FEW_COLUMNS ? FEW : 0;
  if (free - start < LEAST_MS) cost += SHORT;
  if (end - start > MOST_MS) cost += LONG + Math.floor((end - start - MOST_MS) / 50);
  const hurried = Math.floor((width * 1_000) / READ_CHARACTERS) - (free - start);
  return cost + Math.max(0, Math.min(HURRIED_MOST, Math.floor(hurried / 20)));
}

/** One line if it fits, else two: as even as may be, the upper rather the shorter, better behind a mark. */
function rows(part: Piece[]): Piece[][] {
  if (columns(joined(part)) <= LINE_COLUMNS) return [part];
  let best: { cost: number; at: number } | undefined;
  for (let at = 1; at < part.length; at++) {
    const [upper, lower] = [columns(joined(part.slice(0, at))), columns(joined(part.slice(at)))];
    if (Math.max(upper, lower) > LINE_COLUMNS) continue;
    const marked = endsWith(part[at - 1]!.text, MARKS);
    const cost = Math.abs(upper - lower) + (marked ? 0 : 12) + (upper > lower ? 4 : 0) + (part[at]!.spaced ? 0 : 12);
    if (!best || cost < best.cost) best = { cost, at };
  }
  return [part.slice(0, best!.at), part.slice(best!.at)]; // what two lines hold can be cut into two
}

/** On screen until it can have been read, as far as there is room before the next. */
function timed(cue: Cue, freeMs: number, nextMs: number, isLast: boolean): Cue {
  const start = Math.max(cue.startMs, freeMs);
  const limit = Math.max(nextMs, start + 1);
  let end = Math.min(Math.max(cue.endMs, start + 1), limit);
  const width = cue.rows.reduce((sum, row) => sum + columns(joined(row)), 0);
  const needed = Math.min(MOST_MS, Math.max(LEAST_MS, Math.ceil((width * 1_000) / READ_CHARACTERS)));
  end = Math.max(end, Math.min(start + needed, limit));
  if (!isLast && limit - end < PAUSE_MS && limit - start <= MOST_MS) end = limit;
  return { ...cue, startMs: start, endMs: end };
}
