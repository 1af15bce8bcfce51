/** Normalized tokens of a text, by which transcripts are compared: what Whisper's basic normalizer makes of it, and each
 * character of a script without spaces as a token of its own. */

const BRACKETS = /[<[][^>\]]*[>\]]|\([^)]+?\)/g;
const MARKS_AND_SYMBOLS = /[\p{M}\p{S}\p{P}]/gu;
const WITHOUT_SPACES = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]/gu;

/** Text without what stands in brackets: as long as before, so that places in it stay. */
export function withoutBrackets(text: string): string {
  return text.replace(BRACKETS, (found) => " ".repeat(found.length));
}

/** Lower case, compatibility forms composed, marks, symbols and punctuation as blanks. */
export function tokensOf(text: string): string[] {
  return text
    .toLowerCase()
    .normalize("NFKC")
    .replace(MARKS_AND_SYMBOLS, " ")
    .toLowerCase()
    .replace(WITHOUT_SPACES, " $& ")
    .split(/\s+/)
    .filter(Boolean);
}
