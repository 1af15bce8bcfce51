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
const [CUE, WITHIN, CLAUSE, BROKEN, TORN, NAMED] = [40, 15, 12, 60, 80, 2_000];
const [STILL, SHORT, LONG, FEW, FEW_COLUMNS, HURRIED_MOST] = [200, 60, 100, 30, 10, 100];

/** What is on screen from `startMs` to `endMs`: SRT and VTT know no finer time. */
export interface Cue {
  startMs: number;
  endMs: number;
  rows: Piece[][];
  speaker: string;
}

/** Cues in order of time; each lasts 1 ms or more, and one is shown at a time, but for those of speakers who talk at
 * once. `endMs`: of the recording. `names`: where the speaker changes the text begins with a name. */
export function cues(segments: readonly Segment[], endMs: number, names = false): Cue[] {
  const all = groups(segments, names);
  let freeMs = 0;
  return all.flatMap((group, n) => {
    const next = all[n + 1];
    const last = group.reduce((latest, cue) => Math.max(latest, cue.endMs), Math.max(endMs, freeMs));
    const shown = timedGroup(group, freeMs, next ? next[0]!.startMs : last, !next);
    freeMs = Math.max(...shown.map((cue) => cue.endMs));
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

/** Cues with the times of what they say, not yet shown for longer: one alone, or those of segments that overlap. */
function groups(segments: readonly Segment[], names: boolean): Cue[][] {
  const made: Cue[][] = [];
  let told = "";
  for (const group of overlapping(segments)) {
    const found = cut(group, told, names);
    told = found.at(-1)?.speaker ?? told;
    if (group.length === 1) made.push(...found.map((cue) => [cue]));
    else if (found.length) made.push(found);
  }
  return made;
}

/** Segments one by one, those of different speakers that overlap in time together. */
function overlapping(segments: readonly Segment[]): Segment[][] {
  const made: Segment[][] = [];
  let end = -1;
  for (const segment of segments) {
    if (segment.start < end) made.at(-1)!.push(segment);
    else made.push([segment]);
    end = segment.speaker ? Math.max(end, segment.end) : -1; // one without a speaker no other can overlap
  }
  return made;
}

/** Cues of segments in order of time; those of one segment stay in its order. */
function cut(segments: readonly Segment[], before: string, names: boolean): Cue[] {
  const waiting = segments
    .map((segment) => turns(segment).flatMap(({ speaker, said }) => cheapest(said).map((part) => ({ speaker, part }))))
    .filter((parts) => parts.length)
    .map((parts) => ({ parts, begun: false }));
  const made: Cue[] = [];
  let told = before;
  while (waiting.length) {
    // At equal starts a segment goes on before another begins: a name may fill a cue, whose text has to follow it.
    const next = waiting.reduce((first, each) => {
      const later = each.parts[0]!.part[0]!.startMs - first.parts[0]!.part[0]!.startMs;
      return later < 0 || (!later && each.begun && !first.begun) ? each : first;
    });
    const { parts } = next;
    const { speaker } = parts[0]!;
    if (names && speaker && speaker !== told) {
      const other = parts.findIndex((each) => each.speaker !== speaker);
      const said = parts.splice(0, other < 0 ? parts.length : other).flatMap(({ part }) => part);
      const label = named(clean(speaker), said[0]!.startMs);
      parts.unshift(...cheapest([...label, ...said], label.length).map((part) => ({ speaker, part })));
    }
    told = speaker;
    const { part } = parts.shift()!;
    made.push({ startMs: part[0]!.startMs, endMs: part.at(-1)!.endMs, rows: rows(part), speaker });
    next.begun = true;
    if (!parts.length) waiting.splice(waiting.indexOf(next), 1);
  }
  return made;
}

/** On screen in order; those of one speaker do not overlap. */
function timedGroup(group: readonly Cue[], freeMs: number, nextMs: number, isLast: boolean): Cue[] {
  const limits = group.map((cue, n) => group.slice(n + 1).find(({ speaker }) => speaker === cue.speaker)?.startMs);
  const shownMs = new Map<string, number>();
  const shown = group.map((cue, n) => {
    const limit = limits[n];
    const made = timed(cue, shownMs.get(cue.speaker) ?? freeMs, limit ?? nextMs, isLast && limit === undefined);
    shownMs.set(cue.speaker, made.endMs);
    return made;
  });
  return shown.sort((a, b) => a.startMs - b.startMs);
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

/** Cuts what one speaker says in a segment, so that the whole costs least. `labelPieces`: how many are the name. */
function cheapest(said: Piece[], labelPieces = 0): Piece[][] {
  const best: number[] = [0];
  const origin: number[] = [0];
  const ends = said.map((_, at) => (at < labelPieces ? NAMED : costBehind(said, at)));
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
