import { SpeechError, type Segment } from "asr-serve";
import { address, authorization, refusal } from "../page/api";

export interface Upload {
  /** Resolves when all of the recording is text. Rejects with SpeechError; its code is `cancelled` after `cancel`. */
  done: Promise<void>;
  cancel(): void;
}

export interface UploadEvents {
  sent(bytes: number, total: number): void;
  segment(segment: Segment): void;
}

interface ServerSent {
  type: string;
  delta?: string;
  start?: number;
  end?: number;
  error?: { code: string | null; type: string; message: string };
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
      const { delta = "", start = 0, end = 0 } = event;
      events.segment({ index: index++, start, end, text: delta.trim() });
    } else if (event.type === "transcript.text.done") {
      whole = true;
    } else if (event.type === "error" && event.error) {
      failure = new SpeechError(event.error.code ?? event.error.type, event.error.message);
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
