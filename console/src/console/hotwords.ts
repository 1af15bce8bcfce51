import { count } from "../page/words";

/** The server's limits: it says so itself, and here it is seen before anything is sent. */
export const MOST = 10_000;
const LONGEST = 200;
/** While somebody talks they go in the stream's address, which has room for so many bytes. */
export const MOST_LIVE_BYTES = 60_000;

/** Those of a box: one a line, or between commas, and none twice. `Babbage:2` weighs twice as much. */
export function hotwords(text: string): string[] {
  const found = text.split(/[\n,，、]/).map((word) => word.trim().replace(/\s+/g, " "));
  return [...new Set(found.filter(Boolean))];
}

/** What the server will not take; "": nothing. */
export function problem(words: readonly string[]): string {
  if (words.length > MOST) return `${count(words.length, "hotword")}: at most ${MOST.toLocaleString("en")}.`;
  const long = words.find((word) => [...word].length > LONGEST);
  if (long) return `“${[...long].slice(0, 24).join("")}…” is longer than ${LONGEST} characters.`;
  return "";
}

/** Of those that are to be listened for while somebody talks. */
export function liveProblem(words: readonly string[]): string {
  const bytes = encodeURIComponent(words.join(",")).length;
  if (bytes <= MOST_LIVE_BYTES) return "";
  return `Too many to talk with: they take ${bytes.toLocaleString("en")} bytes of at most ${MOST_LIVE_BYTES.toLocaleString("en")}. A recording takes them all.`;
}
