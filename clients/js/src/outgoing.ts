/** Most that may be on its way unacknowledged. Acks come every second of audio, so the next one always makes room. */
const WINDOW_BYTES = 256 * 1024;
/** Audio that may be cut goes out in messages of at most this. */
const MESSAGE_BYTES = 32 * 1024;

/** A command, and the byte of audio it stands before. */
export interface Command {
  at: number;
  json: string;
  /** Sent on a connection that was lost afterwards: the server may have it already. */
  again: boolean;
}

/** Silence, which is told as its length: it stands for so many bytes of audio. */
interface Silence {
  at: number;
  silentBytes: number;
  /** It sounds like the audio before it. */
  noise: boolean;
}

type Item = { at: number; bytes: Uint8Array<ArrayBuffer> } | Silence | Command;

/** Bytes of audio that an item is, or stands for; undefined for a command. */
function bytesOf(item: Item): number | undefined {
  if ("bytes" in item) return item.bytes.length;
  return "silentBytes" in item ? item.silentBytes : undefined;
}

/** What goes to the server, in order: audio until it is acknowledged, commands until they are answered. */
export class Outgoing {
  /** Bytes of audio ever put in. */
  written = 0;
  /** Of these, how many the server has. */
  received = 0;
  /** Bytes of audio before which nothing is kept. */
  dropped = 0;
  #items: Item[] = [];
  /** What one server has, and no other one could continue from: the store of its sessions is away. */
  #undurable: Item[] = [];
  /** Items before it have been sent on this connection. */
  #next = 0;
  #sent = 0;

  /** `sampleBytes`: of a sample, where all have as many. `maxBytes`: most audio that is kept beyond what the server
   * does not have. */
  constructor(
    private readonly cuttable: boolean,
    private readonly sampleBytes = 1,
    private readonly maxBytes = Infinity,
  ) {}

  /** Bytes of audio that are kept. */
  get bytes(): number {
    return this.written - this.received;
  }

  /** No more may be sent before the server acknowledges. */
  get full(): boolean {
    return this.#sent - this.received >= WINDOW_BYTES;
  }

  /** `audio` is kept as it is: nobody else may write to it. */
  put(audio: Uint8Array<ArrayBuffer>): void {
    const step = this.cuttable ? MESSAGE_BYTES : audio.length;
    for (let from = 0; from < audio.length; from += step) {
      const bytes = audio.subarray(from, from + step);
      this.#items.push({ at: this.written, bytes });
      this.written += bytes.length;
    }
  }

  /** So many samples of silence, after whole samples; `noise`: it sounds like the audio before it. */
  silence(samples: number, noise = false): void {
    const step = Math.floor(MESSAGE_BYTES / this.sampleBytes);
    for (let left = samples; left > 0; left -= step) {
      const silentBytes = Math.min(left, step) * this.sampleBytes;
      this.#items.push({ at: this.written, silentBytes, noise });
      this.written += silentBytes;
    }
  }

  command(body: object): Command {
    const command = { at: this.written, json: JSON.stringify(body), again: false };
    this.#items.push(command);
    return command;
  }

  /** The next thing to send on this connection; undefined: nothing now. */
  take(): Uint8Array<ArrayBuffer> | string | undefined {
    const item = this.#items[this.#next];
    if (!item || (this.full && !("json" in item))) return undefined;
    this.#next++;
    if ("json" in item) return item.json;
    this.#sent = item.at + bytesOf(item)!;
    if ("bytes" in item) return item.bytes;
    const samples = item.silentBytes / this.sampleBytes;
    return JSON.stringify(item.noise ? { type: "silence", samples, noise: true } : { type: "silence", samples });
  }

  /** The command has been answered. */
  drop(command: Command): void {
    this.#undurable = this.#undurable.filter((item) => item !== command);
    const at = this.#items.indexOf(command);
    if (at < 0) return;
    this.#items.splice(at, 1);
    if (at < this.#next) this.#next--;
  }

  /** The server has so many bytes, and so every command that stood before the last of them. `durable`: another server
   * could go on from there. False: it cannot have them. */
  acknowledge(received: number, durable = true): boolean {
    if (received < this.received || received > this.written) return false;
    this.received = received;
    let gone = 0;
    for (const item of this.#items) {
      const length = bytesOf(item);
      if (length === undefined ? item.at >= received : item.at + length > received) break;
      gone++;
    }
    this.#undurable.push(...this.#items.splice(0, gone));
    this.#next = Math.max(0, this.#next - gone);
    const first = this.#items.find((item) => !("json" in item));
    if (first && !("json" in first) && first.at < received) {
      const size = received - first.at;
      if ("bytes" in first) {
        this.#undurable.push({ at: first.at, bytes: first.bytes.subarray(0, size) });
        first.bytes = first.bytes.subarray(size);
      } else {
        this.#undurable.push({ at: first.at, silentBytes: size, noise: first.noise });
        first.silentBytes -= size;
      }
      first.at = received;
    }
    const keep = durable ? received : this.written - this.maxBytes;
    const kept = this.#undurable.findIndex((item) => item.at + (bytesOf(item) ?? 0) > keep);
    this.#undurable.splice(0, kept < 0 ? this.#undurable.length : kept);
    this.dropped = this.#undurable[0]?.at ?? received;
    return true;
  }

  /** A new connection, to a server that has so many bytes: everything after them goes out, also what another server has
   * acknowledged that is gone. False: it cannot have them, or they are kept no more. */
  resume(received: number, durable = true): boolean {
    if (received < this.dropped || received > this.written) return false;
    for (const item of [...this.#undurable, ...this.#items.slice(0, this.#next)]) if ("json" in item) item.again = true;
    this.#items.unshift(...this.#undurable);
    this.#undurable = [];
    this.#next = 0;
    this.#sent = this.received = received;
    return this.acknowledge(received, durable);
  }

  /** A new session, which has nothing of all this: what is kept goes out from its beginning, and before it those
   * commands that the other left without an answer. A sample of `sampleBytes` that is torn apart begins with zeros. */
  renew(unanswered: Command[], sampleBytes: number): void {
    const torn = this.received % sampleBytes;
    if (torn) this.#items.unshift({ at: (this.received -= torn), bytes: new Uint8Array(torn) });
    const gone = unanswered.filter((command) => !this.#items.includes(command));
    for (const command of gone) command.at = this.received;
    this.#items.unshift(...gone);
    for (const command of unanswered) command.again = false;
    this.#undurable = [];
    this.dropped = this.received;
    this.#next = 0;
  }
}
