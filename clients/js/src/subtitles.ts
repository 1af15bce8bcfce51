/** Segments as SRT and WebVTT, by the same rules as the server's: see `response_format=srt`. */

import { cues, joined } from "./cues.js";
import { clean } from "./pieces.js";
import type { Segment } from "./transcript.js";

/** SubRip. It has no escapes, so an arrow inside the text is written as one character; and no voices, so a name stands
 * where the speaker changes. */
export function srt(segments: readonly Segment[], endMs: number): string {
  return cues(segments, endMs, true)
    .map(({ startMs, endMs, rows }, n) => {
      const times = `${stamp(startMs, ",")} --> ${stamp(endMs, ",")}`;
      return `${n + 1}\n${times}\n${rows.map((row) => `${joined(row).replaceAll("-->", "→")}\n`).join("")}`;
    })
    .join("\n");
}

/** WebVTT; `&`, `<` and `>` (and so `-->`) are escaped. Who speaks is a voice. */
export function vtt(segments: readonly Segment[], endMs: number): string {
  const blocks = cues(segments, endMs).map(({ startMs, endMs, rows, speaker }) => {
    const times = `${stamp(startMs, ".")} --> ${stamp(endMs, ".")}`;
    const name = escaped(clean(speaker));
    return `${times}\n${name && `<v ${name}>`}${rows.map((row) => `${escaped(joined(row))}\n`).join("")}`;
  });
  return ["WEBVTT\n", ...blocks].join("\n");
}

function escaped(line: string): string {
  return line.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** `01:02:03,004`; hours grow past two digits when they must. */
function stamp(ms: number, point: string): string {
  const two = (n: number): string => String(Math.floor(n)).padStart(2, "0");
  const [hours, minutes, seconds] = [ms / 3_600_000, (ms / 60_000) % 60, (ms / 1_000) % 60];
  return `${two(hours)}:${two(minutes)}:${two(seconds)}${point}${String(ms % 1_000).padStart(3, "0")}`;
}
