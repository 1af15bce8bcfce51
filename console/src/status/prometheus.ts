/** One series at one time. */
export interface Sample {
  labels: Record<string, string>;
  value: number;
}

/** Metric -> its samples. Histograms are their `_bucket`, `_sum` and `_count`. */
export type Page = Map<string, Sample[]>;

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES: Record<string, string> = { n: "\n" };

/** Prometheus text. Comments, and what is no sample, are passed over. */
export function parse(text: string): Page {
  const page: Page = new Map();
  for (const line of text.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name!] = value!.replace(/\\(.)/g, (_, c: string) => ESCAPES[c] ?? c);
    }
    const samples = page.get(found[1]!) ?? [];
    page.set(found[1]!, samples);
    samples.push({ labels, value: number(found[3]!) });
  }
  return page;
}

function number(text: string): number {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

export type Where = (labels: Record<string, string>) => boolean;

const ALL: Where = () => true;

/** Sum over series; undefined where there is none. */
export function total(page: Page, name: string, where: Where = ALL): number | undefined {
  const found = (page.get(name) ?? []).filter(({ labels }) => where(labels));
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : undefined;
}

/** The values that a label takes. */
export function values(page: Page, name: string, label: string): string[] {
  const found = (page.get(name) ?? []).map(({ labels }) => labels[label]);
  return [...new Set(found)].filter((value) => value !== undefined);
}

/** How much a counter grew. One that was started anew, with its process, grew by what it shows. */
export function growth(before: Page, after: Page, name: string, where: Where = ALL): number | undefined {
  const now = total(after, name, where);
  if (now === undefined) return undefined;
  const was = total(before, name, where) ?? 0;
  return now < was ? now : now - was;
}

/** Mean of what a histogram observed between two pages; undefined: nothing. */
export function mean(before: Page, after: Page, name: string, where: Where = ALL): number | undefined {
  const count = growth(before, after, `${name}_count`, where);
  return count ? growth(before, after, `${name}_sum`, where)! / count : undefined;
}

/** The share-quantile of what a histogram observed between two pages, even inside a bucket; undefined: nothing.
 * What lies above the last bound is told as that bound. */
export function quantile(
  before: Page,
  after: Page,
  name: string,
  share: number,
  where: Where = ALL,
): number | undefined {
  const bounds = values(after, `${name}_bucket`, "le").sort((a, b) => number(a) - number(b));
  const counts = bounds.map((le) => growth(before, after, `${name}_bucket`, (labels) => labels["le"] === le && where(labels))!);
  const wanted = share * (counts.at(-1) ?? 0);
  if (!wanted) return undefined;
  const at = counts.findIndex((count) => count >= wanted);
  const [low, high] = [at ? number(bounds[at - 1]!) : 0, number(bounds[at]!)];
  if (high === Infinity) return low;
  const below = at ? counts[at - 1]! : 0;
  return low + ((high - low) * (wanted - below)) / (counts[at]! - below);
}
