/** Listeners by type; `Events` maps a type to its listener's arguments. */
export class Emitter<Events extends { [K in keyof Events]: unknown[] }> {
  readonly #listeners: { [K in keyof Events]?: Set<(...args: Events[K]) => void> } = {};

  /** Returns a function that takes the listener off again. */
  on<K extends keyof Events>(type: K, listener: (...args: Events[K]) => void): () => void {
    const own = (...args: Events[K]): void => listener(...args); // the same function twice is two listeners
    const listeners = (this.#listeners[type] ??= new Set());
    listeners.add(own);
    return () => void listeners.delete(own);
  }

  protected emit<K extends keyof Events>(type: K, ...args: Events[K]): void {
    for (const listener of [...(this.#listeners[type] ?? [])]) {
      try {
        listener(...args);
      } catch (failure) {
        // A listener's mistake is reported as any uncaught error is, and stops no other listener.
        queueMicrotask(() => {
          throw failure;
        });
      }
    }
  }
}
