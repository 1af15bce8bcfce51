import { growth, mean, quantile, total, values, type Page, type Where } from "./prometheus";

/** One line of a chart. */
export interface Line {
  name: string;
  value: number | undefined;
}

/** A chart: what it shows, and how its lines are read from the metrics. */
export interface Chart {
  id: string;
  title: string;
  /** What the numbers mean, in a sentence. */
  note: string;
  unit: "" | "s" | "×" | "%" | "/min";
  /** Shown while there is no number to draw. */
  empty: string;
  /** Counted at a moment, and drawn as steps; else it is about a stretch of time. */
  counted?: true;
  /** `recent`: the page of `recentS` before `now`, about half a minute. */
  read(now: Page, recent: Page, recentS: number): Line[];
}

const SCRAPES: Where = ({ route }) => route === "/metrics";
/** A caller of /v1/stream over HTTP is one request for as long. */
const STREAMS: Where = ({ route }) => route === "/v1/stream";
const STAGES = ["vad", "chunk", "encode", "verify", "decode", "turn"];

function each(names: string[], value: (name: string) => number | undefined): Line[] {
  return names.map((name) => ({ name, value: value(name) }));
}

function live(page: Page): number {
  return (total(page, "asr_serve_live_open_sessions") ?? 0) + (total(page, "asr_serve_requests_in_flight", STREAMS) ?? 0);
}

function percentiles(before: Page, now: Page, name: string): Line[] {
  return [
    { name: "half within", value: quantile(before, now, name, 0.5) },
    { name: "95 % within", value: quantile(before, now, name, 0.95) },
  ];
}

export const CHARTS: Chart[] = [
  {
    id: "callers",
    title: "Live callers and requests",
    note: "Connections of live callers that are open, over either transport, and other requests begun and not yet answered.",
    unit: "",
    empty: "Nobody is here",
    counted: true,
    read: (now) => [
      { name: "live callers", value: live(now) },
      {
        name: "requests in flight",
        value: total(now, "asr_serve_requests_in_flight", (labels) => !SCRAPES(labels) && !STREAMS(labels)) ?? 0,
      },
    ],
  },
  {
    id: "final",
    title: "Final words, live",
    note: "From the pause that ended a sentence to its final text. Over the last half minute.",
    unit: "s",
    empty: "No live sentence has ended lately",
    read: (now, recent) => percentiles(recent, now, "asr_serve_live_final_seconds"),
  },
  {
    id: "first",
    title: "First words of a recording",
    note: "From the head of a request to its first text, the upload included. Over the last half minute.",
    unit: "s",
    empty: "No recording was transcribed lately",
    read: (now, recent) => percentiles(recent, now, "asr_serve_first_text_seconds"),
  },
  {
    id: "speed",
    title: "Speed",
    note: "Seconds of audio recognised per second; a live caller's audio counts again for each partial.",
    unit: "×",
    empty: "Nothing is being recognised",
    read: (now, recent, recentS) =>
      each(values(now, "asr_serve_audio_seconds_total", "model"), (model) => {
        const grown = growth(recent, now, "asr_serve_audio_seconds_total", (labels) => labels["model"] === model);
        return recentS ? (grown ?? 0) / recentS : undefined;
      }),
  },
  {
    id: "queue",
    title: "Utterances in the engine",
    note: "Segments of speech that wait for the encoder, and those being decoded.",
    unit: "",
    empty: "The engine is idle",
    counted: true,
    read: (now) =>
      each(["waiting", "decoding"], (state) =>
        total(now, "asr_serve_engine_requests", (labels) => labels["state"] === state),
      ),
  },
  {
    id: "wait",
    title: "Wait for the encoder",
    note: "95 % of utterances waited no longer than this, by priority. Over the last half minute.",
    unit: "s",
    empty: "Nothing has waited lately",
    read: (now, recent) =>
      each(values(now, "asr_serve_queue_seconds_count", "priority"), (priority) =>
        quantile(recent, now, "asr_serve_queue_seconds", 0.95, (labels) => labels["priority"] === priority),
      ),
  },
  {
    id: "batch",
    title: "Batch size",
    note: "How many share one step of the engine, on average. Over the last half minute.",
    unit: "",
    empty: "The engine takes no steps",
    read: (now, recent) =>
      each(STAGES, (stage) => mean(recent, now, "asr_serve_batch_rows", (labels) => labels["stage"] === stage)),
  },
  {
    id: "steps",
    title: "Step time",
    note: "95 % of the engine's steps took no longer than this, by stage. Over the last half minute.",
    unit: "s",
    empty: "The engine takes no steps",
    read: (now, recent) =>
      each(STAGES, (stage) =>
        quantile(recent, now, "asr_serve_step_seconds", 0.95, (labels) => labels["stage"] === stage),
      ),
  },
  {
    id: "memory",
    title: "Decoder memory",
    note: "Pages of the decoder's memory that are lent out, of those there are.",
    unit: "%",
    empty: "No memory is lent out",
    counted: true,
    read: (now) =>
      each(values(now, "asr_serve_pages", "model"), (model) => {
        const own: Where = (labels) => labels["model"] === model;
        return (100 * total(now, "asr_serve_pages_used", own)!) / total(now, "asr_serve_pages", own)!;
      }),
  },
  {
    id: "rejections",
    title: "Refused or failed",
    note: "Requests and sessions refused or given up, by reason. Over the last half minute.",
    unit: "/min",
    empty: "Nothing was refused",
    read: (now, recent, recentS) =>
      each(values(now, "asr_serve_rejections_total", "reason"), (reason) => {
        const grown = growth(recent, now, "asr_serve_rejections_total", (labels) => labels["reason"] === reason);
        return recentS ? ((grown ?? 0) * 60) / recentS : undefined;
      }),
  },
];

/** The numbers on top of the page. */
export interface Tile {
  name: string;
  read(now: Page): { value: string; note: string; bad?: boolean };
}

export const TILES: Tile[] = [
  {
    name: "Engines",
    read(now) {
      const engines = now.get("asr_serve_engine_up") ?? [];
      const down = engines.filter(({ value }) => value !== 1).map(({ labels }) => labels["model"]);
      const note = down.length ? `down: ${down.join(", ")}` : engines.map(({ labels }) => labels["model"]).join(", ");
      return { value: `${engines.length - down.length} of ${engines.length} up`, note, bad: down.length > 0 };
    },
  },
  {
    name: "Restarts",
    read(now) {
      const restarts = total(now, "asr_serve_engine_restarts_total") ?? 0;
      return { value: String(restarts), note: "engines started anew after a fault", bad: restarts > 0 };
    },
  },
  {
    name: "Live callers",
    read: (now) => {
      const waiting = total(now, "asr_serve_live_waiting_sessions") ?? 0;
      return { value: String(live(now)), note: waiting ? `${waiting} more waiting, or just over` : "connected now" };
    },
  },
  {
    name: "Audio recognised",
    read(now) {
      const seconds = total(now, "asr_serve_audio_seconds_total") ?? 0;
      const value = seconds < 5_400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3_600).toFixed(1)} h`;
      return { value, note: "since the engines started" };
    },
  },
  {
    name: "Refused or failed",
    read(now) {
      const refused = total(now, "asr_serve_rejections_total") ?? 0;
      const worst = [...(now.get("asr_serve_rejections_total") ?? [])].sort((a, b) => b.value - a.value)[0];
      return { value: String(refused), note: worst ? `most: ${worst.labels["reason"]}` : "since the server started" };
    },
  },
];
