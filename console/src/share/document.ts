import type { Segment } from "asr-serve";
import { speakerColour, speakerName, type Names } from "../console/voices";
import { clock } from "../page/words";
import style from "./page.css?raw";
import script from "./player.js?raw";

/** What the file is made of. */
export interface Shared {
  title: string;
  /** `0:44 · 5 segments · English` */
  facts: string;
  /** As a BCP 47 tag; "": it is not known. */
  language: string;
  names: Names;
  segments: readonly Segment[];
  /** Address of the recording inside the file, `data:audio/...`; undefined: it is not in it. */
  audio: string | undefined;
  /** When it was made: `27 November 2026`. */
  made: string;
}

/** A page that needs nothing but itself: no server, no network. Its policy lets nothing else in, and none of its text
 * is markup. */
export function sharedPage({ title, facts, language, names, segments, audio, made }: Shared, nonce: string): string {
  const policy = [
    "default-src 'none'",
    `style-src 'nonce-${nonce}'`,
    ...(audio ? [`script-src 'nonce-${nonce}'`, "media-src data:"] : []),
    "base-uri 'none'",
    "form-action 'none'",
  ].join("; ");
  const rows = segments.map((segment, n) => {
    const { start, end, text, speaker } = segment;
    const time = clock(start);
    const who = speaker && speaker !== segments[n - 1]?.speaker ? `<b class="who v${speakerColour(speaker)}">${escaped(speakerName(speaker, names))}</b>` : "";
    const stamp = audio ? `<button class="time" type="button" aria-label="Play from ${time}">${time}</button>` : `<time class="time">${time}</time>`;
    const tag = language ? ` lang="${escaped(language)}"` : "";
    return `<li data-start="${start}" data-end="${end}">${who}${stamp}<span class="said"${tag}>${escaped(text.trim())}</span></li>`;
  });
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>${escaped(title)}</title>
<style nonce="${nonce}">
${style.trim()}
</style>
</head>
<body>
<main>
<h1>${escaped(title)}</h1>
<p class="facts">${escaped(facts)}</p>
${audio ? `<audio controls preload="metadata" src="${escaped(audio)}"></audio>\n` : ""}<ol aria-label="Transcript">
${rows.join("\n")}
</ol>
</main>
<footer>Transcribed with asr-serve, ${escaped(made)}</footer>
${audio ? `<script nonce="${nonce}">\n${script.trim()}\n</script>\n` : ""}</body>
</html>
`;
}

const ENTITIES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

function escaped(text: string): string {
  return text.replace(/\p{Cc}/gu, " ").replace(/[&<>"']/g, (character) => ENTITIES[character]!);
}
