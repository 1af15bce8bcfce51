import { language } from "../page/words";

/** What came of identifying the language of a recording, as the header `x-identified-language` tells it. */
export interface Identified {
  /** "": unknown. */
  language: string;
  /** `identified`, `no_speech`, `unsure`, `timeout`, `unavailable` or `refused`. */
  outcome: string;
}

/** `de;outcome=identified;probability=0.973`; undefined: the server was not asked to. */
export function identifiedOf(header: string | null): Identified | undefined {
  const found = header?.match(/^([\w-]+);outcome=(\w+)/);
  return found ? { language: found[1] === "und" ? "" : found[1]!, outcome: found[2]! } : undefined;
}

/** Why `model`, the default one, hears a recording whose language was to choose the model; "": it was chosen so, or
 * there is nothing to hear. */
export function whyDefault({ language: code, outcome }: Identified, model: string): string {
  switch (outcome) {
    case "identified":
    case "no_speech":
      return "";
    case "unsure":
      return `The language is uncertain: ${model} hears it`;
    case "refused":
      return `${code ? language(code) : "The language"} was found, but its model cannot do what is switched on: ${model} hears it`;
    default:
      return `The language could not be found out: ${model} hears it`;
  }
}
