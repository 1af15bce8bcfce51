import { allWords, clean, field, toMs, type Given } from "./given";

interface Interval {
  startMs: number;
  endMs: number;
  text: string;
}

/** Who spoke when: a line for each segment whose speaker is known. */
export function rttm({ key, transcript }: Given): string {
  return transcript.segments
    .filter(({ speaker, start, end }) => speaker && toMs(end) > toMs(start))
    .map(({ speaker, start, end }) => {
      const said = `${seconds(toMs(start))} ${seconds(toMs(end) - toMs(start))}`;
      return `SPEAKER ${field(key)} 1 ${said} <NA> <NA> ${field(speaker!)} <NA> <NA>\n`;
    })
    .join("");
}

/** When which word was said, and how sure the model was: a line for each. A word that is written with a space inside
 * is a line for each part, which share its time by their characters. */
export function ctm({ key, transcript }: Given): string {
  return allWords(transcript.segments)
    .flatMap(({ text, start, end, confidence }) => {
      const parts = text.split(/\s+/).filter(Boolean);
      const total = parts.join("").length;
      let passed = 0;
      return parts.map((part) => {
        const begins = toMs(start + ((end - start) * passed) / total);
        passed += part.length;
        const ends = toMs(start + ((end - start) * passed) / total);
        return `${field(key)} 1 ${seconds(begins)} ${seconds(ends - begins)} ${field(part)} ${confidence.toFixed(3)}\n`;
      });
    })
    .join("");
}

/** Praat's: tiers `words`, `segments` and `speakers`. */
export function textgrid({ transcript }: Given): string {
  const { segments, duration } = transcript;
  const interval = ({ start, end }: { start: number; end: number }, text: string): Interval => ({
    startMs: toMs(start),
    endMs: toMs(end),
    text,
  });
  const tiers = {
    words: allWords(segments).map((word) => interval(word, word.text)),
    segments: segments.map((segment) => interval(segment, segment.text)),
    speakers: segments.flatMap((segment) => (segment.speaker ? [interval(segment, segment.speaker)] : [])),
  };
  const ends = Object.values(tiers).flatMap((tier) => tier.map(({ endMs }) => endMs));
  const endMs = ends.reduce((most, end) => Math.max(most, end), Math.max(1, toMs(duration))); // Praat opens nothing of no length
  const lines = [
    'File type = "ooTextFile"',
    'Object class = "TextGrid"',
    "",
    "xmin = 0",
    `xmax = ${exact(endMs)}`,
    "tiers? <exists>",
    "size = 3",
    "item []:",
  ];
  Object.entries(tiers).forEach(([name, tier], n) => {
    const whole = filled(tier, endMs);
    lines.push(
      `    item [${n + 1}]:`,
      '        class = "IntervalTier"',
      `        name = "${name}"`,
      "        xmin = 0",
      `        xmax = ${exact(endMs)}`,
      `        intervals: size = ${whole.length}`,
    );
    whole.forEach(({ startMs, endMs, text }, m) => {
      lines.push(
        `        intervals [${m + 1}]:`,
        `            xmin = ${exact(startMs)}`,
        `            xmax = ${exact(endMs)}`,
        `            text = "${clean(text).replaceAll('"', '""')}"`,
      );
    });
  });
  return `${lines.join("\n")}\n`;
}

/** Without gaps, from 0 to the end: intervals of a tier meet. What has no length joins what comes next, or the one
 * before. */
function filled(tier: readonly Interval[], endMs: number): Interval[] {
  const found: Interval[] = [];
  let [atMs, held] = [0, ""];
  for (const each of tier) {
    const text = `${held} ${each.text}`.trim();
    const startMs = Math.max(atMs, each.startMs);
    if (each.endMs <= startMs) {
      held = text;
      continue;
    }
    if (startMs > atMs) found.push({ startMs: atMs, endMs: startMs, text: "" });
    found.push({ startMs, endMs: each.endMs, text });
    [atMs, held] = [each.endMs, ""];
  }
  if (atMs < endMs) found.push({ startMs: atMs, endMs, text: held });
  else if (held) found.at(-1)!.text += ` ${held}`;
  return found;
}

function seconds(ms: number): string {
  return `${Math.floor(ms / 1_000)}.${String(ms % 1_000).padStart(3, "0")}`;
}

/** Without needless zeros. */
function exact(ms: number): string {
  return String(ms / 1_000);
}
