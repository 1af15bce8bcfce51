import type { Segment } from "asr-serve";
import { keep, recall } from "../page/dom";

/** A transcript that this browser keeps. Sound is not in it. */
export interface Saved {
  id: string;
  /** Milliseconds since 1970. */
  savedMs: number;
  kind: "talk" | "file";
  title: string;
  model: string;
  language: string;
  /** Seconds. */
  duration: number;
  languageScore?: number;
  /** Names that somebody gave to speakers, by the server's. */
  names: [string, string][];
  segments: Segment[];
}

interface Row extends Saved {
  /** Of its JSON. */
  bytes: number;
}

/** With more, the oldest are deleted. */
export const MOST_BYTES = 25_000_000;
const [DATABASE, STORE, BY_AGE] = ["asr-serve", "transcripts", "by-age"];
const SWITCH = "history";

/** Whether transcripts are kept. They are not before somebody has switched it on. */
export function keeps(): boolean {
  return recall(SWITCH) === "on";
}

export function setKeeps(on: boolean): void {
  keep(SWITCH, on ? "on" : undefined);
}

/** Call `changed` when another tab may have changed the switch. */
export function watchKeeps(changed: () => void): void {
  addEventListener("storage", ({ key }) => {
    if (key === null || key === `asr-serve.${SWITCH}`) changed();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") changed();
  });
}

/** Keep a transcript. `again`: it was kept before, and is changed; one that was deleted since stays deleted. Resolves
 * to false where it alone is larger than all may be. Rejects where the browser keeps nothing. */
export async function put(saved: Saved, again = false): Promise<boolean> {
  const bytes = new TextEncoder().encode(JSON.stringify(saved)).length;
  if (bytes > MOST_BYTES) return false;
  await change((store) => write(store, { ...saved, bytes }, again));
  let left = MOST_BYTES;
  await change((store) =>
    each(store.index(BY_AGE).openCursor(null, "prev"), (cursor) => {
      left -= (cursor.value as Row).bytes;
      if (left < 0) cursor.delete();
    }),
  ).catch(() => undefined); // it is kept already, and the next one deletes what is too much
  return true;
}

/** Write a row, `known`: if it is there, and commit without waiting for the end of the requests: the page may be left
 * within milliseconds, and what is not committed by then is lost. */
async function write(store: IDBObjectStore, row: Row, known: boolean): Promise<void> {
  if (!known) {
    store.put(row);
    store.transaction.commit();
    return;
  }
  const found = store.getKey(row.id);
  found.addEventListener("success", () => {
    if (found.result !== undefined) store.put(row);
    store.transaction.commit();
  });
}

/** All of them, the newest first, and their size. Rejects where the browser keeps nothing. */
export async function all(): Promise<{ saved: Saved[]; bytes: number }> {
  let rows: Row[] = [];
  await change(async (store) => {
    rows = (await done(store.index(BY_AGE).getAll())) as Row[];
  }, "readonly");
  return { saved: rows.reverse(), bytes: rows.reduce((sum, { bytes }) => sum + bytes, 0) };
}

/** undefined: it is not there any more. */
export async function find(id: string): Promise<Saved | undefined> {
  let found: Saved | undefined;
  await change(async (store) => {
    found = (await done(store.get(id))) as Saved | undefined;
  }, "readonly");
  return found;
}

export async function remove(id: string): Promise<void> {
  await change((store) => done(store.delete(id)));
}

export async function removeAll(): Promise<void> {
  await change((store) => done(store.clear()));
}

/** One transaction; resolves when it is committed. */
async function change(work: (store: IDBObjectStore) => Promise<unknown>, mode: IDBTransactionMode = "readwrite"): Promise<void> {
  const transaction = (await connection()).transaction(STORE, mode);
  const over = new Promise<void>((resolve, reject) => {
    transaction.addEventListener("complete", () => resolve());
    transaction.addEventListener("abort", () => reject(transaction.error ?? new Error("The browser did not keep it.")));
  });
  await Promise.all([work(transaction.objectStore(STORE)), over]);
}

let opened: Promise<IDBDatabase> | undefined;

/** The page's one connection: somebody may leave right after a change, when there is no time to open another. */
function connection(): Promise<IDBDatabase> {
  return (opened ??= open().catch((failure: unknown) => {
    opened = undefined;
    throw failure;
  }));
}

async function open(): Promise<IDBDatabase> {
  const opening = indexedDB.open(DATABASE, 1);
  opening.addEventListener("upgradeneeded", () => {
    opening.result.createObjectStore(STORE, { keyPath: "id" }).createIndex(BY_AGE, "savedMs");
  });
  const database = await done(opening);
  database.addEventListener("close", () => (opened = undefined)); // the browser's doing: its data was deleted
  database.addEventListener("versionchange", () => {
    opened = undefined;
    database.close(); // it is deleted, or another page brings a newer form
  });
  return database;
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error ?? new Error("The browser did not keep it.")));
  });
}

function each(request: IDBRequest<IDBCursorWithValue | null>, visit: (cursor: IDBCursorWithValue) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    request.addEventListener("error", () => reject(request.error));
    request.addEventListener("success", () => {
      const cursor = request.result;
      if (!cursor) return resolve();
      visit(cursor);
      cursor.continue();
    });
  });
}
