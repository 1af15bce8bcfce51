import { SpeechError } from "asr-serve";
import { request } from "../page/api";

export const RATE_HZ = 24_000;

export interface Ask {
  input: string;
  model: string;
  voice: string;
  speed: number;
  pitch: number;
  ssml: boolean;
}

export interface Word {
  word: string;
  /** Seconds since the first sample. */
  start: number;
  end: number;
}

/** What comes of the server: sound, or the words of the sentence whose sound comes next. */
export type Heard = { pcm: Int16Array<ArrayBuffer> } | { words: Word[] };

interface ServerSent {
  type: string;
  audio?: string;
  words?: Word[];
  error?: { code: string | null; type: string; message: string };
}

/** Have it spoken, and take it as it comes. Throws SpeechError; its code is `cancelled` after `signal`. */
export async function* spoken(asked: Ask, signal: AbortSignal): AsyncGenerator<Heard> {
  const more = { response_format: "pcm", sample_rate: RATE_HZ, stream_format: "sse", words: true };
  const answer = await post({ ...asked, ...more }, signal);
  let whole = false;
  for await (const event of sentEvents<ServerSent>(answer, signal)) {
    if (event.type === "speech.audio.delta") yield { pcm: samples(event.audio ?? "") };
    else if (event.type === "speech.audio.words") yield { words: event.words ?? [] };
    else if (event.type === "speech.audio.done") whole = true;
    else if (event.error) throw new SpeechError(event.error.code ?? event.error.type, event.error.message);
  }
  if (!whole) throw new SpeechError("connection_lost", "The answer broke off.");
}

/** All of it, as a file. Rejects with SpeechError; its code is `cancelled` after `signal`. */
export async function recorded(asked: Ask, format: string, signal: AbortSignal): Promise<Blob> {
  const answer = await post({ ...asked, response_format: format }, signal);
  try {
    return await answer.blob();
  } catch (cause) {
    throw signal.aborted ? cause : new SpeechError("connection_lost", "The answer broke off.", { cause });
  }
}

function post(body: object, signal: AbortSignal): Promise<Response> {
  const headers = { "Content-Type": "application/json" };
  return request("v1/audio/speech", { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Events of an answer, as they come. Throws SpeechError where it breaks off; its code is `cancelled` after `signal`. */
export async function* sentEvents<T>(answer: Response, signal?: AbortSignal): AsyncGenerator<T> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (left + value).split("\n\n");
      left = blocks.pop()!;
      for (const line of blocks.flatMap((block) => block.split("\n"))) {
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6)) as T;
      }
    }
  } catch (cause) {
    if (signal?.aborted || cause instanceof SpeechError) throw cause;
    throw new SpeechError("connection_lost", "The answer broke off.", { cause });
  } finally {
    void reader.cancel().catch(() => undefined); // of one that has failed there is nothing to cancel
  }
}

/** 16-bit samples, whole ones: the server cuts between them. */
function samples(base64: string): Int16Array<ArrayBuffer> {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Int16Array(bytes.buffer);
}
