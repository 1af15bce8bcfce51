import type { Comparison, SaidWord } from "./differences";
import { rate } from "./alignment";
import type { Result } from "./run";

/** What was compared, as files and figures have it. */
export interface Report {
  recording: string;
  reference: string;
  a: Result;
  b: Result;
  /** A to B: A is taken as right. */
  between: Comparison;
  /** The reference to each, where there is one. */
  versus?: { a: Comparison; b: Comparison };
}

/** File formats of a comparison, by suffix. */
export const FILES: Record<string, { type: string; made(report: Report): string }> = {
  json: { type: "application/json", made: json },
  tsv: { type: "text/tab-separated-values", made: tsv },
};

function json(report: Report): string {
  const side = (result: Result, versus: Comparison | undefined): object => ({
    model: result.model,
    settings: result.settings,
    language: result.language,
    seconds: round(result.seconds),
    real_time_factor: round(result.seconds / result.duration),
    text: textOf(result.words),
    words: result.words,
    ...(versus && { errors: versus.errors, word_error_rate: round(rate(versus.errors)) }),
  });
  const { recording, reference, a, b, between, versus } = report;
  const whole = {
    recording,
    duration: a.duration,
    ...(reference && { reference }),
    normalizer: "lower case, without brackets and punctuation, as Whisper's basic normalizer; characters in scripts without spaces",
    a: side(a, versus?.a),
    b: side(b, versus?.b),
    differences: between.errors,
    difference_rate: round(rate(between.errors)),
  };
  return `${JSON.stringify(whole, null, 2)}\n`;
}

/** A line for each word of A, then of B: side, start, end, word, mark, and the words of the other side there. */
function tsv({ a, b, between }: Report): string {
  const lines = [["side", "start", "end", "word", "mark", "other"].join("\t")];
  for (const [name, result, side] of [["A", a, between.a], ["B", b, between.b]] as const) {
    const line = (word: SaidWord | undefined, kind: string, other: string): void => {
      lines.push([name, word?.start ?? "", word?.end ?? "", word?.text ?? "", kind, other].map((cell) => String(cell).replace(/\s+/g, " ")).join("\t"));
    };
    for (let n = 0; n <= result.words.length; n++) {
      if (side.gaps.has(n)) line(undefined, "missing", side.gaps.get(n)!);
      const [word, mark] = [result.words[n], side.marks[n]];
      if (word && mark) line(word, mark.kind, mark.kind === "changed" ? mark.other : "");
    }
  }
  return `${lines.join("\n")}\n`;
}

export function textOf(words: readonly SaidWord[]): string {
  return words.map(({ text }) => text).join(" ");
}

function round(value: number | undefined): number | undefined {
  return value === undefined ? undefined : Math.round(1_000 * value) / 1_000;
}
