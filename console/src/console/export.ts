import { SpeechError } from "asr-serve";
import { address, authorization, refusal } from "../page/api";
import { FORMS, renamed, withNames, type Form } from "../forms/forms";
import { speakersOf } from "./voices";
import type { Source, Take } from "./take";

/** Formats that have a place for words, and need not have them. `verbose_json` has them unless it is told not to. */
const OF_CHOICE = new Set(["srt", "vtt", "jsonl"]);

/** Why a file of this form says nothing of this take; "": it does. */
export function lacks({ transcript }: Take, { needs }: Form): string {
  if (needs === "words" && !transcript.segments.some(({ words }) => words?.length)) {
    return "This needs words with times: switch them on, and hear it again.";
  }
  if (needs === "speakers" && !speakersOf(transcript.segments).size) {
    return "This needs speakers: switch them on, and hear it again.";
  }
  return "";
}

/** From what the page knows. */
export function made({ transcript, names, title, languageScore }: Take, form: Form): string {
  return form.made({ key: stem(title), transcript: withNames(transcript, names), languageScore });
}

/** As the server makes it of the recording, which is heard once more. Rejects with SpeechError. */
export async function asked({ source, names, transcript }: Take, form: Form, signal: AbortSignal): Promise<string> {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields(source!, form, transcript.model))) body.append(name, value);
  body.append("file", source!.file);
  let answer: Response;
  try {
    answer = await fetch(address("v1/audio/transcriptions"), { method: "POST", headers: authorization(), body, signal });
    const text = await answer.text();
    if (!answer.ok) throw refusal(answer.status, text, answer.headers.get("retry-after-ms"));
    return renamed(text, names, form.named);
  } catch (failure) {
    if (failure instanceof SpeechError) throw failure;
    const code = signal.aborted ? "cancelled" : "connection_failed";
    throw new SpeechError(code, "The server does not answer.", { cause: failure });
  }
}

/** `talk.mp4` -> `talk`. */
export function stem(title: string): string {
  return title.replace(/\.\w{1,5}$/, "") || title;
}

export { FORMS };

/** What was asked before, for another answer. */
function fields({ fields }: Source, { asked }: Form, model: string): Record<string, string> {
  const { "timestamp_granularities[]": given, ...rest } = fields;
  const granularity = OF_CHOICE.has(asked!) ? (given ?? "word") : asked === "verbose_json" ? given : undefined;
  return {
    ...rest,
    ...(model && { model }),
    response_format: asked!,
    ...(granularity && { "timestamp_granularities[]": granularity }),
  };
}
