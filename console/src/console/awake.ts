/** Keeps the screen on while somebody talks: a telephone that sleeps hears nothing. */
export class Awake {
  #wanted = false;
  #lock: WakeLockSentinel | undefined;

  constructor() {
    // Browsers take the lock back from a page that is not looked at.
    document.addEventListener("visibilitychange", () => void this.#ask());
  }

  keep(on: boolean): void {
    this.#wanted = on;
    void this.#ask();
    if (!on) this.#release();
  }

  async #ask(): Promise<void> {
    if (!this.#wanted || document.hidden || (this.#lock && !this.#lock.released)) return;
    try {
      this.#lock = await navigator.wakeLock?.request("screen");
    } catch {
      return; // a battery that is low, for one: then the screen goes off as ever
    }
    if (!this.#wanted) this.#release();
  }

  #release(): void {
    void this.#lock?.release();
    this.#lock = undefined;
  }
}
