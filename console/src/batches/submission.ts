import { SpeechError } from "asr-serve";
import { address, authorization, HttpError, refusal, request } from "../page/api";
import { askForKey, key } from "../page/key";
import { forEach } from "../page/pool";
import { customIds, inputLines, TRANSCRIPTIONS, type Batch, type Choice } from "./batch";
import type { Picked } from "./pick";

/** Uploads, or deletions, at once. */
const AT_ONCE = 3;
const DAY_S = 86_400;
/** The server answers what a cancellation asks in this time, or it counts as away. */
const ANSWER_MS = 10_000;
/** The server keeps a file no longer. */
const LONGEST_KEPT_S = 30 * DAY_S;

/** What is asked for. */
export interface Order {
  choice: Choice;
  /** As the server takes it: `24h`. */
  window: string;
  windowS: number;
  /** "": none. */
  name: string;
}

/** A file as the server tells it; times in seconds since 1970. */
interface FileObject {
  id: string;
  created_at: number;
  expires_at: number;
}

/** A file on the server. */
interface Uploaded {
  id: string;
  /** Milliseconds since 1970, by this machine's clock. */
  expiresMs: number;
}

/** A new batch, from the first upload on. What is uploaded is not sent again when something fails on the way. */
export class Submission {
  readonly #uploaded = new Map<Picked, Uploaded>();
  /** Ids of all files that were uploaded, inputs and replaced recordings among them. */
  readonly #ids = new Set<string>();
  #sentBytes = 0;
  readonly #stop = new AbortController();
  readonly #bytes: number;
  #order: Order | undefined;
  /** The same however often one order is sent. */
  #key = "";
  /** Id of the input that was uploaded for this order. */
  #input: string | undefined;
  /** The request that creates the batch, once it was sent, and what comes of it; `stop` aborts it. */
  #creation: { init: RequestInit; batch: Promise<Batch>; stop: AbortController } | undefined;
  /** The recording whose upload failed; "": none did. */
  about = "";

  /** `progress`: recordings that are uploaded, and the share of all bytes, 0..1. */
  constructor(
    private readonly recordings: readonly Picked[],
    private readonly progress: (recordings: number, share: number) => void,
  ) {
    this.#bytes = recordings.reduce((sum, { file }) => sum + file.size, 0);
  }

  get cancelled(): boolean {
    return this.#stop.signal.aborted;
  }

  /** Whether the server was asked for the batch. */
  get asked(): boolean {
    return this.#creation !== undefined;
  }

  /** Upload what is not uploaded yet, or would expire before the batch has run, and create the batch; may be called
   * again after a failure, with another order too: what the server may have of the one before is cancelled first.
   * Rejects with SpeechError; its code is `cancelled` after `cancel`. */
  async run(order: Order): Promise<Batch> {
    const { choice, window, windowS, name } = order;
    const leastMs = Date.now() + 1_000 * Math.min(windowS + DAY_S, LONGEST_KEPT_S - DAY_S);
    const expiring = this.recordings.filter((recording) => (this.#uploaded.get(recording)?.expiresMs ?? Infinity) < leastMs);
    for (const recording of expiring) {
      this.#uploaded.delete(recording);
      this.#sentBytes -= recording.file.size;
    }
    if (expiring.length || JSON.stringify(order) !== JSON.stringify(this.#order)) {
      await this.#cancelBatch(); // of the other order: its answer may have been lost, and there were two batches
      this.#creation = undefined;
      this.#order = order;
      this.#input = undefined;
      this.#key = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    }
    const keptS = Math.min(windowS + 2 * DAY_S, LONGEST_KEPT_S); // a day for the upload, and for another try
    this.about = "";
    const open = this.recordings.filter((recording) => !this.#uploaded.has(recording));
    await forEach(open, AT_ONCE, (recording) => this.#upload(recording, keptS));
    const ids = customIds(this.recordings.map(({ path }) => path));
    const lines = this.recordings.map((recording, n) => ({ id: ids[n]!, fileId: this.#uploaded.get(recording)!.id }));
    this.#input ??= (await this.#send(new File([inputLines(lines, choice)], "lines.jsonl"), keptS)).id;
    if (this.cancelled) throw new SpeechError("cancelled", "Cancelled.");
    const body = JSON.stringify({
      input_file_id: this.#input,
      endpoint: TRANSCRIPTIONS,
      completion_window: window,
      ...(name && { metadata: { name } }),
    });
    const headers = { "Content-Type": "application/json", "Idempotency-Key": this.#key };
    return this.#create({ method: "POST", headers, body });
  }

  /** Stop, cancel the batch where the server has it by then, and delete what was uploaded. Resolves to that batch, to
   * how many files there were, and how many of them could not be deleted. Rejects with SpeechError where a batch may go
   * on; may be called again then. */
  async cancel(): Promise<{ batch: Batch | undefined; files: number; left: number }> {
    this.#stop.abort();
    const batch = await this.#cancelBatch();
    if (batch) this.#ids.delete(batch.input_file_id); // the server keeps it with the batch
    const headers = authorization();
    let left = 0;
    await forEach([...this.#ids], AT_ONCE, async (id) => {
      const init = { method: "DELETE", headers, signal: AbortSignal.timeout(ANSWER_MS) };
      const answer = await fetch(address(`v1/files/${id}`), init).catch(() => undefined);
      if (!answer?.ok && answer?.status !== 404) left++; // 404: it has expired
    });
    return { batch, files: this.#ids.size, left };
  }

  /** Create the batch, or find the one that the same request has created before. `cancel` does not abort it at once,
   * since nobody could tell then whether there is a batch. */
  #create(init: RequestInit): Promise<Batch> {
    const stop = new AbortController();
    const batch = told("v1/batches", init, stop.signal);
    this.#creation = { init, batch, stop };
    return batch;
  }

  /** The batch that is being created, or was; asked for again, once, where the answer does not come or is lost. */
  async #created({ init, batch, stop }: { init: RequestInit; batch: Promise<Batch>; stop: AbortController }): Promise<Batch> {
    try {
      return await limited(batch, stop);
    } catch (failure) {
      if (isRefused(failure)) throw failure;
      const again = this.#create(init);
      return limited(again, this.#creation!.stop);
    }
  }

  /** Resolves to the batch, cancelled or ended; undefined: there is none. */
  async #cancelBatch(): Promise<Batch | undefined> {
    if (!this.#creation) return undefined;
    let id: string;
    try {
      ({ id } = await this.#created(this.#creation));
    } catch (failure) {
      if (isRefused(failure)) return undefined;
      throw failure;
    }
    try {
      return await told(`v1/batches/${id}/cancel`, { method: "POST" }, AbortSignal.timeout(ANSWER_MS));
    } catch (failure) {
      if (!(failure instanceof SpeechError && failure.code === "batch_ended")) throw failure;
      return told(`v1/batches/${id}`, {}, AbortSignal.timeout(ANSWER_MS));
    }
  }

  async #upload(recording: Picked, keptS: number): Promise<void> {
    let before = 0;
    const count = (bytes: number): void => {
      this.#sentBytes += bytes - before;
      before = bytes;
    };
    const tell = (bytes: number): void => {
      count(bytes);
      this.progress(this.#uploaded.size, this.#bytes ? this.#sentBytes / this.#bytes : 1);
    };
    try {
      this.#uploaded.set(recording, await this.#send(recording.file, keptS, tell));
      tell(recording.file.size);
    } catch (failure) {
      count(0);
      this.about ||= recording.path;
      throw failure;
    }
  }

  async #send(file: File, keptS: number, sent?: (bytes: number) => void): Promise<Uploaded> {
    for (;;) {
      try {
        const { id, created_at, expires_at } = await this.#sendOnce(file, keptS, sent);
        this.#ids.add(id);
        return { id, expiresMs: Date.now() + 1_000 * (expires_at - created_at) };
      } catch (failure) {
        const needsKey = failure instanceof SpeechError && failure.code === "invalid_api_key";
        if (!needsKey || (await askForKey(key() !== undefined)) === undefined) throw failure;
      }
    }
  }

  #sendOnce(file: File, keptS: number, sent?: (bytes: number) => void): Promise<FileObject> {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("expires_after[anchor]", "created_at");
    form.append("expires_after[seconds]", String(keptS));
    form.append("file", file);
    const { signal } = this.#stop;
    if (signal.aborted) return Promise.reject(new SpeechError("cancelled", "Cancelled."));
    return new Promise((resolve, reject) => {
      const upload = new XMLHttpRequest(); // fetch tells nothing of how far an upload has come
      const stop = (): void => upload.abort();
      signal.addEventListener("abort", stop);
      upload.upload.addEventListener("progress", ({ loaded, total }) => sent?.((file.size * loaded) / total));
      upload.addEventListener("load", () => {
        if (upload.status === 200) resolve(JSON.parse(upload.responseText) as FileObject);
        else reject(refusal(upload.status, upload.responseText, upload.getResponseHeader("retry-after-ms")));
      });
      upload.addEventListener("error", () => reject(new SpeechError("connection_failed", "The server does not answer.")));
      upload.addEventListener("abort", () => reject(new SpeechError("cancelled", "Cancelled.")));
      upload.addEventListener("loadend", () => signal.removeEventListener("abort", stop));
      upload.open("POST", address("v1/files"));
      for (const [name, value] of Object.entries(authorization())) upload.setRequestHeader(name, value);
      upload.send(form);
    });
  }
}

/** A batch as the server tells it. Rejects with SpeechError: `connection_failed` where the answer does not come, or not
 * whole, or the signal ends the wait. */
async function told(route: string, init: RequestInit, signal: AbortSignal): Promise<Batch> {
  try {
    return (await (await request(route, { ...init, signal })).json()) as Batch;
  } catch (failure) {
    if (failure instanceof SpeechError && failure.code !== "cancelled") throw failure;
    throw new SpeechError("connection_failed", "The server does not answer.", { cause: failure });
  }
}

/** What a request comes to, which `stop` aborts if that takes too long from now on. */
async function limited(batch: Promise<Batch>, stop: AbortController): Promise<Batch> {
  const timer = AbortSignal.timeout(ANSWER_MS);
  const end = (): void => stop.abort();
  timer.addEventListener("abort", end);
  try {
    return await batch;
  } finally {
    timer.removeEventListener("abort", end);
  }
}

/** Whether the server has read the request, and has not done it. After other failures, those of the server itself
 * among them, it may have done it. */
function isRefused(failure: unknown): boolean {
  return failure instanceof HttpError && failure.status < 500;
}
