import { SpeechError } from "asr-serve";

const WORDS: Record<string, string> = {
  "insecure-context":
    "Browsers give a microphone only to pages that come over https, or from this machine. Recordings can be dropped here all the same.",
  "no-permission":
    "This page is not allowed to use the microphone. Allow it beside the address in your browser, then try again.",
  "no-microphone": "There is no microphone. Plug one in or choose another, then try again.",
  "no-voice-activity":
    "Speech cannot be told from silence here: this browser records at a rate of its own, or cannot run the module. Switch “Send speech only” off, then try again.",
  "in-use": "The microphone cannot be read. Another program may be using it.",
  connection_failed: "The server does not answer. Is it running, and is this machine online?",
  connection_lost: "The connection did not come back in time. The text up to here is kept.",
  session_expired:
    "The server does not have this session any more: the connection was gone for too long, or the server began anew. The text up to here is kept.",
  events_expired: "The connection was gone for too long, and some text was lost. What came before is kept.",
  taken_over: "This session was taken over by another connection.",
  at_capacity: "The server is full right now.",
  rate_limit_exceeded: "Too many requests came with this key.",
  draining: "The server is going down for now.",
  engine_closed: "The model is starting.",
  invalid_api_key: "This server asks for a key.",
  not_audio: "This is no audio or video that the server can read.",
  empty_audio: "This file is empty.",
  unsupported_audio: "The server cannot decode this kind of audio.",
  truncated_audio: "This file is cut off: it ends before it says it does.",
  corrupt_audio: "This file is damaged: it breaks off in the middle.",
  audio_too_large: "This file is larger than the server takes.",
  audio_too_long: "This is longer than the server takes.",
  model_not_loaded: "This model is not loaded on the server.",
  weights_missing: "The weights of this model are not on the server.",
  quota_exceeded: "There is no room for more files with this key.",
  store_unavailable: "The server cannot read its files and batches right now.",
  unknown_file: "The server does not have this file any more: files are deleted after a while.",
  unknown_batch: "The server does not have this batch any more.",
  batch_ended: "This batch has ended already.",
  batch_expired: "The batch ran out of time before this one.",
  batch_cancelled: "The batch was cancelled before this one.",
  engine_crashed: "The model crashed over this recording again and again, so it was given up.",
};

/** Codes whose own message has a number in it that one wants to know. */
const WITH_MESSAGE = new Set(["audio_too_large", "audio_too_long", "unsupported_audio", "weights_missing", "quota_exceeded"]);

/** Beside what the server itself says a time for. */
const LATER = new Set(["connection_failed", "invalid_api_key"]);

/** What went wrong, for somebody who is no programmer. */
export function words(error: unknown): string {
  if (!(error instanceof SpeechError)) return error instanceof Error ? error.message : String(error);
  const known = WORDS[error.code];
  if (known === undefined) return sentences(error.message);
  return WITH_MESSAGE.has(error.code) ? `${known} The server says: ${sentences(error.message)}` : known;
}

/** Whether the same may work a little later. */
export function passing(error: unknown): error is SpeechError {
  return error instanceof SpeechError && (error.retryAfterMs !== undefined || LATER.has(error.code));
}

/** The server writes each sentence of an error small. */
function sentences(message: string): string {
  return message.replace(/(^|[.!?] )([a-z])/g, (_, before: string, letter: string) => before + letter.toUpperCase());
}
