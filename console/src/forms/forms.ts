import { Transcript } from "asr-serve";
import { speakerName, type Names } from "../console/voices";
import { field, type Given } from "./given";
import { json, jsonl } from "./json";
import { ctm, rttm, textgrid } from "./tables";

/** A file that can be kept. */
export interface Form {
  /** Of the file's name. */
  suffix: string;
  type: string;
  /** From what the page knows. */
  made(given: Given): string;
  /** `response_format` of the server, which knows more of a recording; none: it has nothing to add. */
  asked?: string;
  /** How a speaker's name is written in it. */
  named(name: string): string;
  /** What it says nothing without. */
  needs?: "speakers" | "words";
}

const plain = (name: string): string => name;

/** By the names that the menu has. */
export const FORMS: Record<string, Form> = {
  txt: { suffix: ".txt", type: "text/plain", made: ({ transcript }) => transcript.toTxt(), named: plain },
  srt: { suffix: ".srt", type: "application/x-subrip", made: ({ transcript }) => transcript.toSrt(), asked: "srt", named: plain },
  vtt: {
    suffix: ".vtt",
    type: "text/vtt",
    made: ({ transcript }) => transcript.toVtt({ karaoke: true }),
    asked: "vtt",
    named: (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"),
  },
  json: { suffix: ".json", type: "application/json", made: json, asked: "verbose_json", named: quoted },
  jsonl: { suffix: ".jsonl", type: "application/jsonl", made: jsonl, asked: "jsonl", named: quoted },
  rttm: { suffix: ".rttm", type: "text/plain", made: rttm, asked: "rttm", named: field, needs: "speakers" },
  ctm: { suffix: ".ctm", type: "text/plain", made: ctm, asked: "ctm", named: plain, needs: "words" },
  textgrid: {
    suffix: ".TextGrid",
    type: "text/plain",
    made: textgrid,
    asked: "textgrid",
    named: (name) => name.replaceAll('"', '""'),
    needs: "words",
  },
};

/** As the page shows it: speakers by their names. */
export function withNames(transcript: Transcript, names: Names): Transcript {
  const made = Object.assign(new Transcript(), transcript);
  made.segments = transcript.segments.map((segment) => ({
    ...segment,
    ...(segment.speaker !== undefined && { speaker: speakerName(segment.speaker, names) }),
    ...(segment.words && {
      words: segment.words.map((word) => ({
        ...word,
        ...(word.speaker !== undefined && { speaker: speakerName(word.speaker, names) }),
      })),
    }),
  }));
  return made;
}

/** The server's file, with the names that somebody gave to its speakers. */
export function renamed(file: string, names: Names, named: Form["named"]): string {
  return file.replace(/\b(?:SPEAKER_|SPK)(\d+)\b/g, (told, number: string) => {
    const name = names.get(`SPEAKER_${number.padStart(2, "0")}`);
    return name === undefined ? told : named(name);
  });
}

function quoted(name: string): string {
  return JSON.stringify(name).slice(1, -1);
}
