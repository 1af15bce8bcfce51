import type { Transcript } from "asr-serve";
import { clock, count, language } from "../page/words";

/** One transcript of this tab: somebody talking, or a recording. */
export interface Take {
  readonly kind: "talk" | "file";
  readonly title: string;
  readonly transcript: Transcript;
  /** Of a recording that this browser can play. */
  sound: Sound | undefined;
}

export interface Sound {
  url: string;
  /** Seconds. */
  duration: number;
  /** The loudest sample of each of equally long parts, 0..1 of the loudest of all; none where it is too long to
   * look at. */
  peaks: Float32Array | undefined;
}

/** `0:44 · 5 segments · English · moonshine-tiny-en` */
export function facts({ transcript }: Take): string {
  const { model, duration, segments } = transcript;
  return [
    duration ? clock(duration) : "",
    segments.length ? count(segments.length, "segment") : "",
    transcript.language && language(transcript.language),
    model,
  ]
    .filter(Boolean)
    .join(" · ");
}
