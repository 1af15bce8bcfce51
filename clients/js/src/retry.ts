const FIRST_DELAY_MS = 250;
const MAX_DELAY_MS = 5_000;
/** A connection that has lived for so long was a good one. */
const GOOD_MS = 5_000;

/** When to connect again: soon at first, then less and less often, each time at random within a half. A browser
 * that comes back online, or a page that is looked at again, does not wait. */
export class Retry {
  #attempts = 0;
  #lostAt = 0;
  #connectedAt: number | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;
  readonly #online = (): void => this.#run();
  readonly #looked = (): void => {
    if (this.#timer !== undefined && document.visibilityState === "visible") this.#run();
  };

  constructor(
    private readonly maxDelayMs = MAX_DELAY_MS,
    private readonly connect: () => void,
  ) {}

  /** Lost, or not connected: plan an attempt, `afterMs` from now at the earliest, and tell in how many milliseconds
   * it is. Undefined when `giveUpMs` have passed since the first loss. */
  next(giveUpMs: number, afterMs = 0): number | undefined {
    const now = performance.now();
    if (this.#connectedAt !== undefined && now - this.#connectedAt >= GOOD_MS) this.restored();
    this.#connectedAt = undefined;
    if (this.#attempts === 0) this.#lostAt = now;
    const left = this.#lostAt + giveUpMs - now;
    if (left <= 0) return undefined;
    const longest = Math.min(this.maxDelayMs, FIRST_DELAY_MS * 2 ** this.#attempts++);
    const delayMs = Math.min(Math.max(afterMs, (longest * (1 + Math.random())) / 2), left);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#run(), delayMs);
    globalThis.addEventListener?.("online", this.#online);
    globalThis.document?.addEventListener("visibilitychange", this.#looked);
    return Math.round(delayMs);
  }

  /** There is a connection. Whether it is good has to be seen. */
  connected(): void {
    this.stop();
    this.#connectedAt = performance.now();
  }

  /** The session goes on: the next loss is a first one. */
  restored(): void {
    this.#attempts = 0;
  }

  stop(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    globalThis.removeEventListener?.("online", this.#online);
    globalThis.document?.removeEventListener("visibilitychange", this.#looked);
  }

  #run(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.connect();
  }
}
