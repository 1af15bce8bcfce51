import type { SpeechError } from "./errors.js";

/** A promise, and what settles it. */
export interface Waiting<T> {
  promise: Promise<T>;
  resolve(value: T): void;
  reject(reason: SpeechError): void;
}

export function waiting<T>(): Waiting<T> {
  const made = {} as Waiting<T>;
  made.promise = new Promise<T>((resolve, reject) => Object.assign(made, { resolve, reject }));
  made.promise.catch(() => {}); // whoever does not await it has `on("error")`; Node would end the process
  return made;
}
