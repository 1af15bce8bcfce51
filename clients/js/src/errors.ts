/** Anything that goes wrong with a stream or a microphone.
 *
 * `code` is the server's (`at_capacity`, `invalid_key`, `session_expired`, ...) or one of our own:
 *
 *     connection_failed   no server answered at that address
 *     connection_lost     the connection was lost, and did not come back in time
 *     protocol            the server sent what the protocol does not have
 *     closed              `close` was called, or there is no session (any more)
 *     bad_audio           audio that cannot be sent: its kind, or more at once than the buffer holds
 *     bad_option          an option that cannot be
 *     no-microphone  no-permission  insecure-context  in-use      (see `microphone`)
 */
export class SpeechError extends Error {
  readonly code: string;
  /** When the server is full: it may have room after this time. */
  declare readonly retryAfterMs?: number;
  /** The option that the server did not take. */
  declare readonly param?: string;

  constructor(
    code: string,
    message: string,
    options: { retryAfterMs?: number | undefined; param?: string | undefined; cause?: unknown } = {},
  ) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.name = "SpeechError";
    this.code = code;
    if (options.retryAfterMs !== undefined) this.retryAfterMs = options.retryAfterMs;
    if (options.param !== undefined) this.param = options.param;
  }
}
