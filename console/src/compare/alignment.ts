/** Step of an alignment: which token of each side; undefined on the side that has none. */
export interface Step {
  a: number | undefined;
  b: number | undefined;
  equal: boolean;
}

export interface Errors {
  substitutions: number;
  deletions: number;
  insertions: number;
  /** Tokens of the reference. */
  reference: number;
}

/** A bit more than one: of alignments with as few errors, that with most equal tokens is taken. */
const SUBSTITUTION = 1 + 2 ** -20;
/** Cells of a table of distances that are looked at whole; larger ones are cut in two. */
const MOST_CELLS = 1_000_000;

/** The alignment of two lists with the fewest substitutions, deletions and insertions. Time is the product of both
 * lengths; memory is their sum.
 *
 * Source  Hirschberg 1975, A linear space algorithm for computing maximal common subsequences */
export function align(a: readonly string[], b: readonly string[]): Step[] {
  const steps: Step[] = [];
  fill(steps, a, 0, a.length, b, 0, b.length);
  return steps;
}

/** Errors of `b`, where `a` is right. */
export function errors(steps: readonly Step[]): Errors {
  const found = { substitutions: 0, deletions: 0, insertions: 0, reference: 0 };
  for (const { a, b, equal } of steps) {
    if (a !== undefined) found.reference++;
    if (a === undefined) found.insertions++;
    else if (b === undefined) found.deletions++;
    else if (!equal) found.substitutions++;
  }
  return found;
}

/** Errors of each 100 tokens of the reference; undefined where that has none. */
export function rate({ substitutions, deletions, insertions, reference }: Errors): number | undefined {
  return reference ? (100 * (substitutions + deletions + insertions)) / reference : undefined;
}

type List = readonly string[];

function fill(steps: Step[], a: List, fromA: number, toA: number, b: List, fromB: number, toB: number): void {
  for (; fromA < toA && fromB < toB && a[fromA] === b[fromB]; fromA++, fromB++) steps.push({ a: fromA, b: fromB, equal: true });
  let same = 0;
  while (fromA < toA - same && fromB < toB - same && a[toA - same - 1] === b[toB - same - 1]) same++;
  const [endA, endB] = [toA - same, toB - same];
  if (fromA === endA) for (let at = fromB; at < endB; at++) steps.push({ a: undefined, b: at, equal: false });
  else if (fromB === endB) for (let at = fromA; at < endA; at++) steps.push({ a: at, b: undefined, equal: false });
  else if ((endA - fromA + 1) * (endB - fromB + 1) <= MOST_CELLS || endA - fromA === 1) whole(steps, a, fromA, endA, b, fromB, endB);
  else {
    const middle = (fromA + endA) >> 1;
    const before = lastRow(a, fromA, middle, b, fromB, endB, 1);
    const after = lastRow(a, middle, endA, b, fromB, endB, -1);
    let cut = 0;
    for (let at = 1; at < before.length; at++) if (before[at]! + after[at]! < before[cut]! + after[cut]!) cut = at;
    fill(steps, a, fromA, middle, b, fromB, fromB + cut);
    fill(steps, a, middle, endA, b, fromB + cut, endB);
  }
  for (let at = 0; at < same; at++) steps.push({ a: endA + at, b: endB + at, equal: true });
}

/** Distances of all of a part of `a` to each beginning of a part of `b`; `way` -1: to each end of it. */
function lastRow(a: List, fromA: number, toA: number, b: List, fromB: number, toB: number, way: 1 | -1): Float64Array {
  const width = toB - fromB;
  let row = Float64Array.from({ length: width + 1 }, (_, at) => at);
  for (let n = 0; n < toA - fromA; n++) {
    const token = way === 1 ? a[fromA + n] : a[toA - 1 - n];
    const next = new Float64Array(width + 1);
    next[0] = n + 1;
    for (let at = 1; at <= width; at++) {
      const other = way === 1 ? b[fromB + at - 1] : b[toB - at];
      next[at] = Math.min(row[at - 1]! + (token === other ? 0 : SUBSTITUTION), row[at]! + 1, next[at - 1]! + 1);
    }
    row = next;
  }
  return way === 1 ? row : row.reverse();
}

function whole(steps: Step[], a: List, fromA: number, toA: number, b: List, fromB: number, toB: number): void {
  const [height, width] = [toA - fromA + 1, toB - fromB + 1];
  const costs = new Float64Array(height * width);
  for (let at = 1; at < width; at++) costs[at] = at;
  for (let n = 1; n < height; n++) {
    costs[n * width] = n;
    for (let at = 1; at < width; at++) {
      const cell = n * width + at;
      const other = a[fromA + n - 1] === b[fromB + at - 1] ? 0 : SUBSTITUTION;
      costs[cell] = Math.min(costs[cell - width - 1]! + other, costs[cell - width]! + 1, costs[cell - 1]! + 1);
    }
  }
  const found: Step[] = [];
  for (let n = height - 1, at = width - 1; n > 0 || at > 0; ) {
    const cell = n * width + at;
    const equal = n > 0 && at > 0 && a[fromA + n - 1] === b[fromB + at - 1];
    if (n > 0 && at > 0 && costs[cell] === costs[cell - width - 1]! + (equal ? 0 : SUBSTITUTION)) {
      found.push({ a: fromA + --n, b: fromB + --at, equal });
    } else if (n > 0 && costs[cell] === costs[cell - width]! + 1) found.push({ a: fromA + --n, b: undefined, equal: false });
    else found.push({ a: undefined, b: fromB + --at, equal: false });
  }
  steps.push(...found.reverse());
}
