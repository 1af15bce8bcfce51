import type { ServerEvent } from "./events.js";
import type { Socket, SocketConstructor } from "./options.js";

/** Close codes. After 1000 the server drops the session; after any other it waits for us. */
const HUNG_UP = 1000;
const DROPPED = 4000;
/** Going away, none, broken off, restarting: it was not about us. */
const ACCIDENTS = [1001, 1005, 1006, 1012];
/** A stream of audio that is sent for so long holds a second of audio, which the server owes an ack for. */
const SENDING_MS = 2_000;

export interface ConnectionEvents {
  event(event: ServerEvent): void;
  /** Called once, unless we end it: the connection is over. `deliberate`: the server closed it, for a reason. */
  lost(reason: string, deliberate: boolean): void;
}

/** One WebSocket, and whether it still lives. After `drop` or `hangUp` nothing comes from it any more. */
export class Connection {
  readonly #socket: Socket;
  #over = false;
  #sendingSince: number | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #buffered = 0;

  constructor(
    WebSocket: SocketConstructor,
    url: string,
    protocols: string[] | undefined,
    private readonly silenceMs: number,
    private readonly events: ConnectionEvents,
    first?: string,
  ) {
    this.#socket = protocols ? new WebSocket(url, protocols) : new WebSocket(url);
    this.#socket.binaryType = "arraybuffer";
    if (first !== undefined) this.#socket.addEventListener("open", () => this.#socket.send(first));
    this.#socket.addEventListener("message", ({ data }: { data: unknown }) => this.#message(data));
    this.#socket.addEventListener("error", () => {}); // a close follows; without a listener ws would throw
    this.#socket.addEventListener("close", ({ code }: { code: number }) => {
      this.#lost(`closed with code ${code}`, !ACCIDENTS.includes(code));
    });
    this.expectAnswer();
  }

  send(data: Uint8Array<ArrayBuffer> | string): void {
    this.#socket.send(data);
    if (typeof data === "string") return;
    const now = performance.now();
    this.#sendingSince ??= now;
    if (now - this.#sendingSince >= SENDING_MS) this.expectAnswer();
  }

  /** The server owes a message: after `silenceMs` without any the connection is given up. */
  expectAnswer(): void {
    if (this.#timer !== undefined || this.#over) return;
    this.#buffered = this.#socket.bufferedAmount;
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      if (this.#socket.bufferedAmount < this.#buffered) {
        this.expectAnswer(); // slow, and alive: what we sent is still going out
      } else {
        this.#lost(`silent for ${this.silenceMs} ms`);
      }
    }, this.silenceMs);
  }

  /** Give the connection up; the session waits for the next one. */
  drop(): void {
    this.#end(DROPPED);
  }

  /** We want nothing more of the session. */
  hangUp(): void {
    this.#end(HUNG_UP);
  }

  #end(code: number): void {
    if (this.#over) return;
    this.#over = true;
    clearTimeout(this.#timer);
    this.#socket.close(code);
  }

  #lost(reason: string, deliberate = false): void {
    if (this.#over) return;
    this.drop();
    this.events.lost(reason, deliberate);
  }

  #message(data: unknown): void {
    if (this.#over) return;
    clearTimeout(this.#timer);
    this.#timer = this.#sendingSince = undefined;
    let event: ServerEvent | undefined;
    try {
      event = JSON.parse(String(data)) as ServerEvent;
    } catch {
      return this.#lost("sent a message that is no JSON");
    }
    this.events.event(event);
  }
}
