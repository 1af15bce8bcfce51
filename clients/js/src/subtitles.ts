/** Segments as SRT and WebVTT, by the same rules as the server's: see `response_format=srt`. */

import { cues, joined, type Cue } from "./cues.js";
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

/** WebVTT; `&`, `<` and `>` (and so `-->`) are escaped. Who speaks is a voice. `karaoke`: a time stands before each word
 * whose time is known, so that a player can show it as it is said. */
export function vtt(segments: readonly Segment[], endMs: number, karaoke = false): string {
  const blocks = cues(segments, endMs).map((cue) => {
    const times = `${stamp(cue.startMs, ".")} --> ${stamp(cue.endMs, ".")}`;
    const name = escaped(clean(cue.speaker));
    const lines = karaoke ? lit(cue) : cue.rows.map((row) => escaped(joined(row)));
    return `${times}\n${name && `<v ${name}>`}${lines.map((line) => `${line}\n`).join("")}`;
  });
  return ["WEBVTT\n", ...blocks].join("\n");
}

/** Times inside a cue lie between its own and grow. */
function lit({ startMs, endMs, rows }: Cue): string[] {
  let lastMs = startMs;
  return rows.map((row) =>
    row
      .map((piece, n) => {
        const space = n && piece.spaced ? " " : "";
        if (!piece.timed || piece.startMs <= lastMs || piece.startMs >= endMs) return space + escaped(piece.text);
        lastMs = piece.startMs;
        return `${space}<${stamp(lastMs, ".")}>${escaped(piece.text)}`;
      })
      .join(""),
  );
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
