import type { Segment } from "asr-serve";
import type { Given } from "./given";

/** All that is known, on many lines. */
export function json(given: Given): string {
  return `${JSON.stringify({ ...brief(given), model: given.transcript.model }, null, 2)}\n`;
}

/** The same without the model, on one line. */
export function jsonl(given: Given): string {
  return `${JSON.stringify(brief(given))}\n`;
}

/** As the server's `jsonl` has it: times in seconds; what is not known is left out. */
function brief({ key, transcript, languageScore }: Given): object {
  const { language, duration, segments } = transcript;
  return {
    key,
    text: segments.map(({ text }) => text).filter(Boolean).join(" "),
    language,
    duration,
    segments: segments.map(entry),
    ...(languageScore !== undefined && { language_probability: languageScore }),
  };
}

function entry({ start, end, text, speaker, spoken, words }: Segment): object {
  return {
    start,
    end,
    text,
    ...(speaker !== undefined && { speaker }),
    ...(spoken !== undefined && { spoken }),
    ...(words && { words: words.map(({ text: word, ...rest }) => ({ word, ...rest })) }),
  };
}
