import { size } from "../page/words";

/** Use of one limit; `limit` null: there is none. */
export interface Quota {
  used: number;
  limit: number | null;
}

/** GET /v1/key. */
export interface KeyStatus {
  name: string;
  admin: boolean;
  concurrent: Quota;
  requests_per_minute: Quota | null;
  batches: { bytes: Quota; files: Quota; open_batches: Quota } | null;
}

/** Name of all who come without a key, where none is needed. */
export const ANONYMOUS = "anonymous";
const HIGH = 0.8;

export interface Limit {
  name: string;
  text: string;
  /** 0..1; undefined: there is no limit. */
  share: number | undefined;
  level: "low" | "high" | "full";
}

export function limits({ concurrent, requests_per_minute: rate, batches }: KeyStatus): Limit[] {
  return [
    limit("Requests and talks at once", concurrent, whole),
    ...(rate ? [limit("Requests in the last minute", rate, whole)] : []),
    ...(batches
      ? [
          limit("Files that are stored", batches.files, whole),
          limit("Their size", batches.bytes, (bytes) => (bytes ? size(bytes) : "0")),
          limit("Batches that have not ended", batches.open_batches, whole),
        ]
      : []),
  ];
}

function limit(name: string, { used, limit: most }: Quota, told: (n: number) => string): Limit {
  if (most === null) return { name, text: `${told(used)}, no limit`, share: undefined, level: "low" };
  const share = Math.min(1, used / most);
  return { name, text: `${told(used)} of ${told(most)}`, share, level: share >= 1 ? "full" : share >= HIGH ? "high" : "low" };
}

function whole(n: number): string {
  return n.toLocaleString("en");
}

/** What a key is good for, and what not. */
export function permissions({ admin, batches }: KeyStatus): { text: string; allowed: boolean }[] {
  return [
    { text: "Transcribe recordings and talk live", allowed: true },
    { text: "Have texts spoken", allowed: true },
    { text: "Store files and run batches", allowed: batches !== null },
    { text: "Load and unload models, clone voices", allowed: admin },
    { text: "See the policy of models, and all keys", allowed: admin },
  ];
}

/** 256 random bits, as text that needs no quotes anywhere. */
export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(32));
  return `asr_${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
