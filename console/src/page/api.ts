import { SpeechError } from "asr-serve";
import { askForKey, key } from "./key";

/** The address of one of the server's routes, below whatever prefix a proxy gives this page. */
export function address(route: string): string {
  return new URL(route, document.baseURI).href;
}

export function authorization(): Record<string, string> {
  const held = key();
  return held === undefined ? {} : { Authorization: `Bearer ${held}` };
}

/** GET. Asks for a key where one is needed. Rejects with SpeechError. */
export function get(route: string, signal?: AbortSignal): Promise<Response> {
  return request(route, { signal: signal ?? null });
}

/** A request whose body can be sent again. Asks for a key where one is needed. Rejects with SpeechError; its code is
 * `cancelled` after the signal of `init`. */
export async function request(route: string, init: RequestInit = {}): Promise<Response> {
  for (;;) {
    let answer: Response;
    try {
      const headers = { ...(init.headers as Record<string, string>), ...authorization() };
      answer = await fetch(address(route), { cache: "no-store", ...init, headers });
    } catch (cause) {
      if (init.signal?.aborted) throw new SpeechError("cancelled", "Cancelled.", { cause });
      throw new SpeechError("connection_failed", "The server does not answer.", { cause });
    }
    if (answer.ok) return answer;
    const refused = refusal(answer.status, await answer.text(), answer.headers.get("retry-after-ms"));
    if (refused.code !== "invalid_api_key" || (await askForKey(key() !== undefined)) === undefined) throw refused;
  }
}

/** An error as OpenAI tells it. */
export interface Told {
  code: string | null;
  type: string;
  message: string;
  param?: string | null;
}

export function failed({ code, type, message, param }: Told, retry: { retryAfterMs?: number | undefined } = {}): SpeechError {
  return new SpeechError(code ?? type, message, { ...retry, param: param ?? undefined });
}

/** An answer that is an error, with its HTTP status. */
export class HttpError extends SpeechError {
  constructor(
    readonly status: number,
    { code, message, retryAfterMs, param }: SpeechError,
  ) {
    super(code, message, { retryAfterMs, param });
  }
}

/** The error in an answer of OpenAI's shape, or in one of a proxy's that has none. */
export function refusal(status: number, body: string, retryAfterMs: string | null): HttpError {
  const retry = { retryAfterMs: retryAfterMs === null ? undefined : Number(retryAfterMs) };
  let error: SpeechError;
  try {
    error = failed((JSON.parse(body) as { error: Told }).error, retry);
  } catch {
    error = new SpeechError(`http_${status}`, `The server, or a proxy before it, answered with status ${status}.`, retry);
  }
  return new HttpError(status, error);
}

export interface Model {
  id: string;
  state: string;
  languages: string[];
  parameters: number;
  speaks: boolean;
  /** It answers requests that name no model. */
  default: boolean;
  /** It serves recordings for which no model is named and that the default one cannot; loaded for the first one. */
  auto: boolean;
  /** What else it can be asked for. */
  words: boolean;
  hotwords: boolean;
  /** Longest delay of a word of a streaming model; of others null. */
  lag_ms: number | null;
  speakers: boolean;
  /** Languages whose numbers can be written in digits. */
  itn: string[];
}

/** Those that hear. */
export async function models(): Promise<Model[]> {
  const { data } = (await (await get("v1/models")).json()) as { data: Model[] };
  return data.filter((model) => !model.speaks);
}
