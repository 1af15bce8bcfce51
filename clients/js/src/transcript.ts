import type { SegmentEvent, ServerEvent } from "./events.js";
import { toMs } from "./pieces.js";
import { srt, vtt } from "./subtitles.js";

/** A word; times in seconds since the first sample. */
export interface Word {
  text: string;
  start: number;
  end: number;
  /** 0..1 */
  confidence: number;
  speaker?: string;
  spoken?: string;
}

/** A final segment; times in seconds since the first sample. `speaker`, `spoken` and `words` where they were asked for. */
export interface Segment {
  index: number;
  start: number;
  end: number;
  text: string;
  speaker?: string;
  spoken?: string;
  words?: Word[];
}

/** What has been heard so far: a reducer over the server's events. The exports hold what is final. */
export class Transcript {
  segments: Segment[] = [];
  /** Of the open segment, what will not change. */
  locked = "";
  /** Behind it, what may still change. */
  partial = "";
  /** Where these two begin, and how far they reach; seconds. */
  open = { start: 0, end: 0 };
  model = "";
  language = "";
  /** Seconds; 0 until the end. */
  duration = 0;

  /** All that is known: segments, locked, partial. */
  get text(): string {
    return [...this.segments.map((segment) => segment.text), this.locked + this.partial].filter(Boolean).join(" ");
  }

  apply(event: ServerEvent): void {
    switch (event.type) {
      case "session":
        this.model = event.model;
        this.language = event.language;
        break;
      case "partial":
        if (event.text) this.#reach(event);
        this.partial = event.text;
        break;
      case "locked":
        this.#reach(event);
        this.locked += event.text;
        // Until the next partial comes, what was locked is not shown twice.
        this.partial = this.partial.startsWith(event.text) ? this.partial.slice(event.text.length) : "";
        break;
      case "segment":
        this.segments.push(segmentOf(event));
        this.#left(event.spoken ?? event.text, event.end_s);
        break;
      case "speakers":
        for (const { index, speaker } of event.segments) this.#saidBy(index, speaker);
        break;
      case "end":
        this.duration = event.duration_s;
        this.locked = this.partial = "";
        break;
    }
  }

  /** Nothing more is coming of the open segment: its words will not change any more, and so they are one. */
  settle(): Segment | undefined {
    const text = (this.locked + this.partial).trim();
    this.locked = this.partial = "";
    if (!text) return undefined;
    const segment = { index: this.segments.length, ...this.open, text };
    this.segments.push(segment);
    return segment;
  }

  /** Of two who were heard as one, the second's words are the next segment's. */
  #left(said: string, end: number): void {
    this.locked = this.locked.startsWith(said) ? this.locked.slice(said.length).trimStart() : "";
    this.partial = "";
    this.open = { start: end, end: this.locked ? Math.max(end, this.open.end) : end };
  }

  #saidBy(index: number, speaker: string): void {
    const at = this.segments.findIndex((segment) => segment.index === index);
    if (at >= 0) this.segments[at] = { ...this.segments[at]!, speaker };
  }

  #reach({ start_s, end_s }: { start_s: number; end_s: number }): void {
    const start = this.locked || this.partial ? this.open.start : start_s;
    this.open = { start, end: end_s };
  }

  /** A line for each segment, behind the speaker's name where that is another than before. */
  toTxt(): string {
    let told = "";
    const lines = this.segments.map(({ text, speaker = "" }) => {
      const line = oneLine(text);
      if (!line) return "";
      const name = oneLine(speaker);
      const said = name && speaker !== told ? `${name}: ${line}\n` : `${line}\n`;
      told = speaker;
      return said;
    });
    return lines.join("");
  }

  /** SubRip, in cues of at most two lines of 42 columns; a name where the speaker changes. */
  toSrt(): string {
    return srt(this.segments, toMs(this.duration));
  }

  /** WebVTT, in the same cues; speakers are voices. `karaoke`: each word lights up as it is said. */
  toVtt({ karaoke = false }: { karaoke?: boolean } = {}): string {
    return vtt(this.segments, toMs(this.duration), karaoke);
  }

  /** `{text, language, duration, model, segments: [{start, end, text}]}`, times in seconds; segments have `speaker`,
   * `spoken` and `words` where they are known. */
  toJson(): string {
    const { language, duration, model } = this;
    const segments = this.segments.map(({ index: _, words, ...segment }) => ({
      ...segment,
      ...(words && { words: words.map(({ text, ...word }) => ({ word: text, ...word })) }),
    }));
    const text = segments.map((segment) => segment.text).filter(Boolean).join(" ");
    return `${JSON.stringify({ text, language, duration, model, segments }, null, 2)}\n`;
  }
}

function oneLine(text: string): string {
  return text.trim().replace(/\s+/g, " ");
}

function segmentOf({ index, start_s, end_s, text, speaker, spoken, words }: SegmentEvent): Segment {
  return {
    index,
    start: start_s,
    end: end_s,
    text,
    ...(speaker !== undefined && { speaker }),
    ...(spoken !== undefined && { spoken }),
    ...(words && { words: words.map(({ start_s: start, end_s: end, ...word }) => ({ ...word, start, end })) }),
  };
}
