/** What the server sends on /v1/stream. Times are seconds since the session's first sample. Where a new session goes on
 * with the audio of another, `SpeechStream` counts on: in what it tells, times, bytes and segments are those of all the
 * audio; `seq` is the session's own. */

/** First on every connection. After a resume the client goes on with the byte at `received_bytes`. */
export interface SessionEvent {
  type: "session";
  session_id: string;
  resumed: boolean;
  model: string;
  language: string;
  encoding: string;
  rate_hz: number;
  /** Bytes of audio the server has, of all that were sent in this session. */
  received_bytes: number;
  /** Number of the latest numbered event. */
  last_seq: number;
  /** How long a session whose connection is lost waits for the next one. */
  resume_s: number;
  /** The session is stored outside its server, and another one can go on with it. */
  durable?: boolean;
  /** Number of the server's claim of a stored session. */
  epoch?: number;
}

/** What is known beyond segments and locked text. It replaces the one before; "" is nothing any more. */
export interface PartialEvent {
  type: "partial";
  start_s: number;
  end_s: number;
  text: string;
}

/** Audio before `received_bytes` has arrived, and need not be kept if it is durable. Comes at least once a second of
 * audio. */
export interface AckEvent {
  type: "ack";
  received_bytes: number;
  received_s: number;
  /** False: of a stored session whose store is away, so that only this server has the audio. */
  durable?: boolean;
}

/** Words of the open segment that will not change; spaces are inside. */
export interface LockedEvent {
  type: "locked";
  seq: number;
  start_s: number;
  end_s: number;
  text: string;
}

/** A word, or a character of a script without spaces. */
export interface WordEvent {
  text: string;
  start_s: number;
  end_s: number;
  /** 0..1 */
  confidence: number;
  /** Where it is another than the segment's. */
  speaker?: string;
  /** The words that were said for it, where it was written in another form. */
  spoken?: string;
}

/** A segment is final. Its text, or `spoken` where there is one, begins with all that was locked since the segment
 * before. Where the speaker changes several end at once, and the texts of all begin so together. */
export interface SegmentEvent {
  type: "segment";
  seq: number;
  index: number;
  start_s: number;
  end_s: number;
  text: string;
  /** Who says it, as far as that is known by then: `SPEAKER_00` and so on, by who spoke first. */
  speaker?: string;
  /** The text as it was said, where it was written in another form. */
  spoken?: string;
  words?: WordEvent[];
  /** That it was heard in, and how probable that is, 0..1: where nobody has said which, and the model knows several. */
  language?: string;
  language_probability?: number;
}

/** At the end of a session that wanted speakers: segments that somebody else said than they told. */
export interface SpeakersEvent {
  type: "speakers";
  seq: number;
  segments: { index: number; speaker: string }[];
}

/** Every word before `position_s` is final. */
export interface FlushedEvent {
  type: "flushed";
  seq: number;
  id: string;
  position_s: number;
}

/** Whose turn it is. `stopped`: speech is over; `ended`: and all its segments are out. */
export interface TurnEvent {
  type: "turn";
  seq: number;
  state: "started" | "eager_end" | "resumed" | "stopped" | "ended";
  position_s: number;
  probability: number | null;
  /** "silence", or the name of the turn model. */
  by: string;
}

/** Of a call: packets that did not arrive; what they said is made up for that time. */
export interface LossEvent {
  type: "loss";
  start_s: number;
  end_s: number;
  packets: number;
}

/** Nothing follows. */
export interface EndEvent {
  type: "end";
  seq: number;
  duration_s: number;
  /** How many there were. */
  segments: number;
}

/** Refused or failed: what came, what is allowed, what to do. */
export interface ErrorEvent {
  type: "error";
  code: string;
  message: string;
  retry_after_ms?: number;
  param?: string;
}

/** Where a session began in the audio that is sent. */
export interface Origin {
  bytes: number;
  seconds: number;
  segments: number;
}

/** An event as all of the audio counts. */
export function counted<E extends object>(event: E, { bytes, seconds, segments }: Origin): E {
  if (!bytes && !seconds && !segments) return event;
  const made = { ...event } as Record<string, unknown>;
  const add = (name: string, more: number): void => {
    const value = made[name];
    if (typeof value === "number") made[name] = Math.round((value + more) * 1e6) / 1e6;
  };
  add("received_bytes", bytes);
  for (const name of ["start_s", "end_s", "position_s", "received_s", "duration_s"]) add(name, seconds);
  for (const name of ["index", "segments"]) add(name, segments);
  for (const name of ["words", "segments"]) {
    const inner = made[name];
    if (Array.isArray(inner)) made[name] = inner.map((each) => counted(each, { bytes, seconds, segments }));
  }
  return made as unknown as E;
}

export type ServerEvent =
  | SessionEvent
  | PartialEvent
  | AckEvent
  | LockedEvent
  | SegmentEvent
  | FlushedEvent
  | TurnEvent
  | SpeakersEvent
  | EndEvent
  | ErrorEvent;
