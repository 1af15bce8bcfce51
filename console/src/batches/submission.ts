import { SpeechError } from "asr-serve";
import { address, authorization, refusal, request } from "../page/api";
import { askForKey, key } from "../page/key";
import { customIds, inputLines, TRANSCRIPTIONS, type Batch, type Choice } from "./batch";
import type { Picked } from "./pick";

/** Uploads at once. */
const AT_ONCE = 3;
/** The server deletes recordings so long after the batch has ended at the latest. */
const KEPT_S = 86_400;
const LONGEST_KEPT_S = 30 * 86_400;

/** What is asked for. */
export interface Order {
  choice: Choice;
  /** As the server takes it: `24h`. */
  window: string;
  windowS: number;
  /** "": none. */
  name: string;
}

/** A new batch, from the first upload on. What is uploaded is not sent again when something fails on the way. */
export class Submission {
  readonly #fileIds = new Map<Picked, string>();
  readonly #sentBytes = new Map<Picked, number>();
  readonly #stop = new AbortController();
  readonly #bytes: number;
  #order: Order | undefined;
  /** The same however often one order is sent. */
  #key = "";
  /** Ids of the inputs that were uploaded: one for each order. */
  readonly #inputs: string[] = [];
  #input: string | undefined;
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

  /** Upload what is not uploaded yet, and create the batch; may be called again after a failure, with another order
   * too. Rejects with SpeechError; its code is `cancelled` after `cancel`. */
  async run(order: Order): Promise<Batch> {
    const { choice, window, windowS, name } = order;
    if (JSON.stringify(order) !== JSON.stringify(this.#order)) {
      this.#order = order;
      this.#input = undefined;
      this.#key = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    }
    const keptS = Math.min(LONGEST_KEPT_S, windowS + KEPT_S);
    this.about = "";
    const open = this.recordings.filter((recording) => !this.#fileIds.has(recording));
    const uploadSome = async (): Promise<void> => {
      for (let next = open.shift(); next; next = open.shift()) await this.#upload(next, keptS, () => (open.length = 0));
    };
    const ends = await Promise.allSettled(Array.from({ length: AT_ONCE }, uploadSome));
    for (const end of ends) if (end.status === "rejected") throw end.reason;
    const ids = customIds(this.recordings.map(({ path }) => path));
    const lines = this.recordings.map((recording, n) => ({ id: ids[n]!, fileId: this.#fileIds.get(recording)! }));
    if (!this.#input) {
      this.#input = await this.#send(new File([inputLines(lines, choice)], "lines.jsonl"), keptS);
      this.#inputs.push(this.#input);
    }
    const body = JSON.stringify({
      input_file_id: this.#input,
      endpoint: TRANSCRIPTIONS,
      completion_window: window,
      ...(name && { metadata: { name } }),
    });
    const headers = { "Content-Type": "application/json", "Idempotency-Key": this.#key };
    const answer = await request("v1/batches", { method: "POST", headers, body, signal: this.#stop.signal });
    return (await answer.json()) as Batch;
  }

  /** Stop, and delete what was uploaded, as far as the server can be reached. */
  async cancel(): Promise<void> {
    this.#stop.abort();
    const ids = [...this.#fileIds.values(), ...this.#inputs];
    const headers = authorization();
    await Promise.allSettled(ids.map((id) => fetch(address(`v1/files/${id}`), { method: "DELETE", headers })));
  }

  async #upload(recording: Picked, keptS: number, failed: () => void): Promise<void> {
    const tell = (bytes: number): void => {
      this.#sentBytes.set(recording, bytes);
      const sent = [...this.#sentBytes.values()].reduce((sum, each) => sum + each, 0);
      this.progress(this.#fileIds.size, this.#bytes ? sent / this.#bytes : 1);
    };
    try {
      this.#fileIds.set(recording, await this.#send(recording.file, keptS, tell));
      tell(recording.file.size);
    } catch (failure) {
      this.#sentBytes.delete(recording);
      this.about ||= recording.path;
      failed();
      throw failure;
    }
  }

  /** Returns the id of the uploaded file. */
  async #send(file: File, keptS: number, sent?: (bytes: number) => void): Promise<string> {
    for (;;) {
      try {
        return await this.#sendOnce(file, keptS, sent);
      } catch (failure) {
        const needsKey = failure instanceof SpeechError && failure.code === "invalid_api_key";
        if (!needsKey || (await askForKey(key() !== undefined)) === undefined) throw failure;
      }
    }
  }

  #sendOnce(file: File, keptS: number, sent?: (bytes: number) => void): Promise<string> {
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
        if (upload.status === 200) resolve((JSON.parse(upload.responseText) as { id: string }).id);
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
