import type { Transcript } from "asr-serve";
import { clock, count, language } from "../page/words";
import { speakersOf } from "./voices";

/** One transcript of this tab: somebody talking, or a recording. */
export interface Take {
  readonly kind: "talk" | "file";
  readonly title: string;
  readonly transcript: Transcript;
  /** Names that somebody gave to speakers, by the server's. */
  readonly names: Map<string, string>;
  /** What was sent, and what was asked of it; of a recording. */
  readonly source?: Source;
  /** Of a recording that this browser can play. */
  sound: Sound | undefined;
  /** How sure the model was of the language that it heard, 0..1. */
  languageScore?: number;
  /** When the history got it: milliseconds since 1970. */
  savedMs?: number;
  /** The server has chosen the model. */
  automatic?: true;
}

export interface Source {
  readonly file: File;
  readonly fields: Readonly<Record<string, string>>;
}

export interface Sound {
  url: string;
  /** Seconds. */
  duration: number;
  /** The loudest sample of each of equally long parts, 0..1 of the loudest of all; none where it is too long to
   * look at. */
  peaks: Float32Array | undefined;
}

/** `0:44 · 5 segments · 2 speakers · English (98 %) · moonshine-tiny-en, chosen automatically` */
export function facts({ transcript, languageScore, automatic }: Take): string {
  const { model, duration, segments } = transcript;
  const speakers = speakersOf(segments).size;
  const sure = languageScore === undefined ? "" : ` (${Math.round(100 * languageScore)} %)`;
  return [
    duration ? clock(duration) : "",
    segments.length ? count(segments.length, "segment") : "",
    speakers ? count(speakers, "speaker") : "",
    transcript.language && language(transcript.language) + sure,
    automatic ? `${model}, chosen automatically` : model,
  ]
    .filter(Boolean)
    .join(" · ");
}
