import { SpeechError } from "asr-serve";
import { request } from "../page/api";
import { wordsOf, type SaidWord } from "./differences";

/** What a model is asked with. */
export interface Settings {
  model: string;
  /** "": the model detects it, or knows no other. */
  language: string;
  hotwords: string;
  /** 0..1; 0 takes the most probable tokens. */
  temperature: number;
}

/** What a model has made of the recording. */
export interface Result {
  settings: Settings;
  /** The model that answered: a name may stand for several. */
  model: string;
  language: string;
  /** Length of the recording in seconds. */
  duration: number;
  /** Seconds from sending the recording until the whole text was here. */
  seconds: number;
  words: SaidWord[];
}

interface Answer {
  language?: string;
  duration: number;
  segments: { start: number; end: number; text: string; words?: { word: string; start: number; end: number }[] }[];
}

/** Transcribe a recording. Rejects with SpeechError; its code is `cancelled` after `signal`. */
export async function run(file: File, settings: Settings, signal: AbortSignal): Promise<Result> {
  const { model, language, hotwords, temperature } = settings;
  const form = new FormData();
  form.append("model", model);
  if (language) form.append("language", language);
  if (hotwords) form.append("hotwords", hotwords);
  if (temperature) form.append("temperature", String(temperature));
  form.append("response_format", "verbose_json");
  form.append("timestamp_granularities[]", "word");
  form.append("file", file);
  const since = performance.now();
  const answer = await request("v1/audio/transcriptions", { method: "POST", body: form, signal });
  const told = await whole(answer, signal);
  return {
    settings,
    model: answer.headers.get("x-model") ?? model,
    language: told.language ?? "",
    duration: told.duration,
    seconds: (performance.now() - since) / 1_000,
    words: told.segments.flatMap(({ text, start, end, words }) =>
      words?.length
        ? words.map(({ word, ...times }) => ({ text: word, ...times }))
        : wordsOf(text).map((word) => ({ ...word, start, end })), // as near as this model knows
    ),
  };
}

async function whole(answer: Response, signal: AbortSignal): Promise<Answer> {
  try {
    return (await answer.json()) as Answer;
  } catch (cause) {
    throw signal.aborted ? cause : new SpeechError("connection_lost", "The answer broke off.", { cause });
  }
}
