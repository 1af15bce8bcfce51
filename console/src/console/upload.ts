import { SpeechError, type Segment, type Word } from "asr-serve";
import { address, authorization, failed, refusal, type Told } from "../page/api";
import { identifiedOf, type Identified } from "./identified";
import { speakerId } from "./voices";

export interface Upload {
  /** Resolves when all of the recording is text. Rejects with SpeechError; its code is `cancelled` after `cancel`. */
  done: Promise<void>;
  cancel(): void;
}

export interface UploadEvents {
  /** The model that the server has chosen, or that was named. `identified`: the language that is spoken; undefined:
   * that was not asked. */
  model(name: string, identified: Identified | undefined): void;
  sent(bytes: number, total: number): void;
  segment(segment: Segment): void;
  /** What is known of the whole when all of it was heard. `score`: how sure the language is, 0..1. */
  language(code: string, score: number | undefined): void;
}

interface ServerSent {
  type: string;
  delta?: string;
  start?: number;
  end?: number;
  speaker?: string;
  spoken?: string;
  words?: ServerWord[];
  language?: string;
  language_probability?: number;
  error?: Told;
}

interface ServerWord {
  word: string;
  start: number;
  end: number;
  confidence?: number;
  speaker?: string;
  spoken?: string;
}

/** Send a recording to be transcribed; its segments come back as they are heard. */
export function upload(file: File, fields: Record<string, string>, events: UploadEvents): Upload {
  const request = new XMLHttpRequest(); // fetch tells nothing of how far an upload has come
  const form = new FormData();
  const all = { ...fields, stream: "true", response_format: "verbose_json" }; // the format with times
  for (const [name, value] of Object.entries(all)) form.append(name, value);
  form.append("file", file); // last, so that the server begins to listen with its first bytes
  let read = 0;
  let index = 0;
  let failure: SpeechError | undefined;
  let whole = false;

  const take = (event: ServerSent): void => {
    if (event.type === "transcript.text.delta") {
      events.segment(segmentOf(event, index++));
    } else if (event.type === "transcript.text.done") {
      whole = true;
      if (event.language) events.language(event.language, event.language_probability);
    } else if (event.type === "error" && event.error) {
      failure = failed(event.error);
    }
  };
  const readOn = (): void => {
    if (request.status !== 200) return;
    for (;;) {
      const end = request.responseText.indexOf("\n\n", read);
      if (end < 0) return;
      for (const line of request.responseText.slice(read, end).split("\n")) {
        if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)) as ServerSent);
      }
      read = end + 2;
    }
  };

  const done = new Promise<void>((resolve, reject) => {
    request.upload.addEventListener("progress", ({ loaded, total }) => events.sent(loaded, total));
    request.upload.addEventListener("load", ({ total }) => events.sent(total, total));
    request.addEventListener("readystatechange", () => {
      const model = request.readyState === XMLHttpRequest.HEADERS_RECEIVED && request.getResponseHeader("x-model");
      if (model) events.model(model, identifiedOf(request.getResponseHeader("x-identified-language")));
    });
    request.addEventListener("progress", readOn);
    request.addEventListener("load", () => {
      readOn();
      if (request.status !== 200) {
        reject(refusal(request.status, request.responseText, request.getResponseHeader("retry-after-ms")));
      } else if (failure || !whole) {
        reject(failure ?? new SpeechError("connection_lost", "The answer broke off."));
      } else {
        resolve();
      }
    });
    request.addEventListener("error", () => {
      const lost = read > 0 ? "connection_lost" : "connection_failed";
      reject(new SpeechError(lost, "The server does not answer."));
    });
    request.addEventListener("abort", () => reject(new SpeechError("cancelled", "Cancelled.")));
  });
  request.open("POST", address("v1/audio/transcriptions"));
  for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
  request.send(form);
  return { done, cancel: () => request.abort() };
}

function segmentOf({ delta = "", start = 0, end = 0, speaker, spoken, words }: ServerSent, index: number): Segment {
  return {
    index,
    start,
    end,
    text: delta.trim(),
    ...(speaker !== undefined && { speaker: speakerId(speaker) }),
    ...(spoken !== undefined && { spoken }),
    ...(words && { words: words.map(wordOf) }),
  };
}

function wordOf({ word, start, end, confidence = 1, speaker, spoken }: ServerWord): Word {
  return {
    text: word,
    start,
    end,
    confidence,
    ...(speaker !== undefined && { speaker: speakerId(speaker) }),
    ...(spoken !== undefined && { spoken }),
  };
}
