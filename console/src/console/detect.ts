import { SpeechError } from "asr-serve";
import { address, authorization, refusal } from "../page/api";

/** The language is heard in the first half minute: of a large recording no more than this is sent for it. */
const HEAD_BYTES = 16e6;

export interface Detected {
  language: string;
  /** How sure the model is, 0..1. */
  score: number;
}

/** Which language somebody speaks in a recording. Rejects with SpeechError; its code is `cancelled` after `signal`. */
export async function detect(file: File, signal: AbortSignal): Promise<Detected> {
  const form = new FormData();
  form.append("audio_file", file.size > HEAD_BYTES ? file.slice(0, HEAD_BYTES, file.type) : file, file.name);
  try {
    const answer = await fetch(address("detect-language"), { method: "POST", headers: authorization(), body: form, signal });
    if (!answer.ok) throw refusal(answer.status, await answer.text(), answer.headers.get("retry-after-ms"));
    const { language_code, confidence } = (await answer.json()) as { language_code: string; confidence: number };
    return { language: language_code, score: confidence };
  } catch (failure) {
    if (failure instanceof SpeechError) throw failure;
    throw new SpeechError(signal.aborted ? "cancelled" : "connection_failed", "The server does not answer.", { cause: failure });
  }
}
