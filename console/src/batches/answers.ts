import { SpeechError } from "asr-serve";
import { words } from "../page/problems";

/** The answer to one line of a batch; `file`: what a file of it holds. */
export type Answer =
  | { id: string; text: string; suffix: string; file: string }
  | { id: string; audio: { fileId: string; bytes: number; seconds: number }; suffix: string }
  | { id: string; wrong: string };

interface Line {
  custom_id: string;
  response: { status_code: number; body: unknown } | null;
  error: { code: string | null; type: string; message: string } | null;
}

/** The lines of an output or of an error file. Throws where one is no JSON. */
export function answers(jsonl: string): Answer[] {
  return jsonl
    .split("\n")
    .filter(Boolean)
    .map((line) => answer(JSON.parse(line) as Line));
}

function answer({ custom_id: id, response, error }: Line): Answer {
  const body = response?.body;
  const told = error ?? (body as { error?: Line["error"] } | null)?.error;
  if (told) return { id, wrong: words(new SpeechError(told.code ?? told.type, told.message)) };
  if (typeof body === "string") return { id, text: body, suffix: suffixOf(body), file: ended(body) };
  const { text = "", file_id, bytes = 0, seconds = 0, content_type = "" } = body as Record<string, string & number>;
  if (file_id) return { id, audio: { fileId: file_id, bytes, seconds }, suffix: audioSuffix(content_type) };
  if ("segments" in (body as object)) return { id, text, suffix: ".json", file: ended(JSON.stringify(body, undefined, 2)) };
  return { id, text, suffix: ".txt", file: ended(text) };
}

function ended(text: string): string {
  return text.endsWith("\n") ? text : `${text}\n`;
}

/** Of the file that holds a text which the server wrote: its format is not told beside it. */
function suffixOf(text: string): string {
  if (text.startsWith("WEBVTT")) return ".vtt";
  if (/^1\r?\n\d\d:\d\d:\d\d,\d{3} --> /.test(text)) return ".srt";
  return ".txt";
}

function audioSuffix(type: string): string {
  const known = { "audio/mpeg": ".mp3", "audio/ogg": ".opus", "audio/opus": ".opus", "audio/flac": ".flac" };
  return known[type as keyof typeof known] ?? ".wav";
}

/** Paths of files in an archive, one for each: no path leads out of it, and none comes twice, whatever its letters'
 * case. */
export function archivePaths(ids: readonly string[], suffixes: readonly string[]): string[] {
  const taken = new Set<string>();
  return ids.map((id, n) => {
    const parts = id.split(/[\\/]+/).map((part) => part.replace(/[\p{Cc}<>:"|?*]/gu, "_").trim());
    const safe = parts.filter((part) => part && !/^\.+$/.test(part)).join("/") || `line-${n + 1}`;
    const suffix = suffixes[n]!;
    const stem = safe.replace(/\.\w{1,5}$/, "") || safe;
    let path = stem + suffix;
    for (let again = 2; taken.has(path.toLowerCase()); again++) path = `${stem} (${again})${suffix}`;
    taken.add(path.toLowerCase());
    return path;
  });
}
