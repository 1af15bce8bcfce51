export { SpeechCall, type CallEvents, type CallState, type CallStats } from "./call.js";
export { SpeechError } from "./errors.js";
export type {
  AckEvent,
  EndEvent,
  ErrorEvent,
  FlushedEvent,
  LockedEvent,
  LossEvent,
  PartialEvent,
  SegmentEvent,
  ServerEvent,
  SessionEvent,
  SpeakersEvent,
  TurnEvent,
  WordEvent,
} from "./events.js";
export { microphone, type Level, type Microphone, type MicrophoneEvents, type MicrophoneOptions, type SpeechOnlyOptions } from "./microphone.js";
export type { CallOptions, ReconnectOptions, Socket, SocketConstructor, StreamOptions } from "./options.js";
export { Resampler } from "./resample.js";
export { SpeechStream, type Restart, type StateDetail, type StreamEvents, type StreamState } from "./stream.js";
export { Transcript, type Segment, type Word } from "./transcript.js";
