import { SpeechError } from "./errors.js";

/** What a stream needs of a WebSocket: the browser's, Node 22's and that of the package `ws` have it. */
export interface Socket {
  binaryType: string;
  readonly bufferedAmount: number;
  send(data: string | Uint8Array<ArrayBuffer>): void;
  close(code?: number, reason?: string): void;
  // eslint-disable-next-line @typescript-eslint/no-explicit-any -- each has event classes of its own
  addEventListener(type: "open" | "message" | "close" | "error", listener: (event: any) => void): void;
}
export type SocketConstructor = new (url: string, protocols?: string[]) => Socket;

export interface StreamOptions {
  /** The server, or the route: `http://host:8000` is `ws://host:8000/v1/stream`. */
  url: string | URL;
  apiKey?: string;
  model?: string;
  language?: string;
  /** Default s16le. `opus`: each `send` is one packet. */
  encoding?: "s16le" | "mulaw" | "alaw" | "opus" | "ogg";
  /** Hz, of s16le, mulaw and alaw. */
  rate?: number;
  /** `silence` (default), or the name of a turn model. */
  turn?: string;
  eagerThreshold?: number;
  turnThreshold?: number;
  partialMs?: number;
  silenceSchedule?: string;
  /** Probability from which a sound is speech, 0..1. */
  threshold?: number;
  maxSegmentMs?: number;
  /** What was said before, for models that read (Whisper): names, spelling and style go on from it. */
  prompt?: string;
  /** Words that may come, with commas between them, each with its weight where it has one: `Ada,Babbage:2`. */
  hotwords?: string;
  /** Segments tell their words, with times. */
  words?: boolean;
  /** Segments tell who speaks; at the end `speakers` corrects them. A session that another one goes on with
   * (`newSession`) counts its speakers anew. */
  speakers?: boolean;
  /** How many speak, if that is known, with or without `speakers`; holds for what is corrected at the end. */
  numSpeakers?: number;
  minSpeakers?: number;
  maxSpeakers?: number;
  /** Numbers, dates and money are written as one writes them. */
  itn?: boolean;
  /** Where there is no global one (Node 20): the class of the package `ws`. */
  WebSocket?: SocketConstructor;
  /** Most audio that is kept, sent or not, until the server has it. Default 4 MiB: two minutes of 16 kHz. */
  maxBufferedBytes?: number;
  reconnect?: ReconnectOptions;
  /** A server that was restarted, or waits no longer, has lost the session: begin another with the audio that is
   * kept, and say so with `restarted`. Words between them may be missing. Default false: that is an error. Not of `ogg`,
   * which cannot begin in the middle. */
  newSession?: boolean;
}

export interface ReconnectOptions {
  /** Longest wait between two attempts. Default 5 000. */
  maxDelayMs?: number;
  /** Default: as long as the server keeps the session. */
  giveUpAfterMs?: number;
  /** A server that owes an answer and says nothing for so long is taken for gone. Default 15 000. */
  silenceMs?: number;
}

const QUERY = {
  model: "model",
  language: "language",
  encoding: "encoding",
  rate: "rate",
  turn: "turn",
  eagerThreshold: "eager_threshold",
  turnThreshold: "turn_threshold",
  partialMs: "partial_ms",
  silenceSchedule: "silence_schedule",
  threshold: "threshold",
  maxSegmentMs: "max_segment_ms",
  prompt: "prompt",
  hotwords: "hotwords",
  words: "words",
  speakers: "speakers",
  numSpeakers: "num_speakers",
  minSpeakers: "min_speakers",
  maxSpeakers: "max_speakers",
  itn: "itn",
} as const satisfies Partial<Record<keyof StreamOptions, string>>;
/** Options of a call: those of a stream that do not say how audio is encoded, or what to do without a connection. */
export type CallOptions = Omit<
  StreamOptions,
  "encoding" | "rate" | "WebSocket" | "maxBufferedBytes" | "reconnect" | "newSession"
>;
const { encoding: _encoding, rate: _rate, ...CALL_QUERY } = QUERY;
const OURS = {
  url: true,
  apiKey: true,
  WebSocket: true,
  maxBufferedBytes: true,
  reconnect: true,
  newSession: true,
} as const satisfies Record<Exclude<keyof StreamOptions, keyof typeof QUERY>, true>;
const RECONNECT = {
  maxDelayMs: true,
  giveUpAfterMs: true,
  silenceMs: true,
} as const satisfies Record<keyof ReconnectOptions, true>;

/** Throws SpeechError for an option that there is not. */
export function expectOptions(options: StreamOptions): void {
  expectNames(options, { ...OURS, ...QUERY });
  expectNames(options.reconnect ?? {}, RECONNECT, "reconnect.");
}

/** Throws SpeechError for an option that there is not of a call. */
export function expectCallOptions(options: CallOptions): void {
  expectNames(options, { url: true, apiKey: true, ...CALL_QUERY });
}

/** The address of a new call. Throws SpeechError. */
export function callUrl(options: CallOptions): string {
  const url = address(options.url, ["http:", "https:"]);
  if (url.pathname === "/") url.pathname = "/v1/whip";
  for (const long of [false, true]) for (const [field, value] of asked(options, long)) url.searchParams.set(field, value);
  return url.href;
}

/** Throws SpeechError for an option that is not among these. */
export function expectNames(options: object, known: object, of = ""): void {
  const unknown = Object.keys(options).find((name) => !Object.hasOwn(known, name));
  if (unknown === undefined) return;
  throw new SpeechError("bad_option", `There is no option ${of}${unknown}. There are ${Object.keys(known).join(", ")}.`);
}

/** Of a value; longer ones go into the first message: servers, and those before them, bound an address. */
const LONG_CHARACTERS = 1_000;

/** The address of a new session. Throws SpeechError. */
export function beginUrl(options: StreamOptions): string {
  const url = routeUrl(options);
  for (const [field, value] of asked(options, false)) url.searchParams.set(field, value);
  if (beginMessage(options) !== undefined) url.searchParams.set("start", "true");
  return url.href;
}

/** What a new session is sent first: what is too long for its address, if anything is. */
export function beginMessage(options: StreamOptions): string | undefined {
  const long = asked(options, true);
  return long.length === 0 ? undefined : JSON.stringify({ type: "start", ...Object.fromEntries(long) });
}

function asked(options: StreamOptions, long: boolean): [string, string][] {
  return Object.entries(QUERY)
    .map(([name, field]): [string, unknown] => [field, options[name as keyof typeof QUERY]])
    .filter(([, value]) => value !== undefined)
    .map(([field, value]): [string, string] => [field, String(value)])
    .filter(([, value]) => value.length > LONG_CHARACTERS === long);
}

/** The address that goes on with a session. `after`: the last numbered event that came; `claim`: `received` and `epoch`,
 * of a session that is stored. */
export function resumeUrl(
  options: StreamOptions,
  session: string,
  after: number,
  claim: Record<string, number> = {},
): string {
  const url = routeUrl(options);
  url.searchParams.set("session", session);
  for (const [name, value] of Object.entries({ after, ...claim })) url.searchParams.set(name, String(value));
  return url.href;
}

/** Characters of a token (RFC 9110, 5.6.2), which a subprotocol is. */
const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;

/** The subprotocols that carry the key: a browser's WebSocket sends no header of ours, and proxies log addresses. None
 * without a key, and for one that a subprotocol cannot hold, which comes in the address. */
export function keyProtocols({ apiKey }: StreamOptions): string[] | undefined {
  return apiKey !== undefined && TOKEN.test(apiKey) ? ["bearer", apiKey] : undefined;
}

/** The class to connect with. Throws SpeechError. */
export function socketClass(options: StreamOptions): SocketConstructor {
  const found = options.WebSocket ?? (globalThis as { WebSocket?: SocketConstructor }).WebSocket;
  if (found) return found;
  throw new SpeechError("bad_option", "There is no global WebSocket here. Pass one: `WebSocket` of the package ws.");
}

function address(said: string | URL, schemes: string[]): URL {
  let url: URL;
  try {
    url = new URL(said);
  } catch (cause) {
    throw new SpeechError("bad_option", `${String(said)} is no address. Say http://host:port.`, { cause });
  }
  if (schemes.includes(url.protocol)) return url;
  const names = schemes.map((scheme) => scheme.slice(0, -1));
  const last = names.pop();
  throw new SpeechError("bad_option", `${url.protocol} is no scheme for a stream: ${names.join(", ")} or ${last}.`);
}

function routeUrl(options: StreamOptions): URL {
  const url = address(options.url, ["http:", "https:", "ws:", "wss:"]);
  url.protocol = ({ "http:": "ws:", "https:": "wss:" } as Record<string, string>)[url.protocol] ?? url.protocol;
  if (url.pathname === "/") url.pathname = "/v1/stream";
  if (options.apiKey !== undefined && !keyProtocols(options)) url.searchParams.set("api_key", options.apiKey);
  return url;
}
