import { clock, count } from "../page/words";

export type Status =
  | "validating"
  | "failed"
  | "in_progress"
  | "finalizing"
  | "completed"
  | "expired"
  | "cancelling"
  | "cancelled";

/** A batch, as the server tells it; times in seconds since 1970. */
export interface Batch {
  id: string;
  endpoint: string;
  errors: { data: { code: string; message: string; line: number | null }[] } | null;
  input_file_id: string;
  status: Status;
  output_file_id: string | null;
  error_file_id: string | null;
  created_at: number;
  in_progress_at: number | null;
  expires_at: number;
  completed_at: number | null;
  failed_at: number | null;
  expired_at: number | null;
  cancelled_at: number | null;
  request_counts: { total: number; completed: number; failed: number };
  metadata: Record<string, string> | null;
}

export const TRANSCRIPTIONS = "/v1/audio/transcriptions";
/** Limits of the server's for one batch. */
export const MOST_LINES = 50_000;
const LONGEST_ID = 512;

const STATES: Record<Status, string> = {
  validating: "Waiting",
  in_progress: "Running",
  finalizing: "Writing results",
  completed: "Completed",
  failed: "Failed",
  expired: "Out of time",
  cancelling: "Cancelling",
  cancelled: "Cancelled",
};

/** What is asked of every recording; "": the server's own choice. */
export interface Choice {
  model: string;
  language: string;
  format: string;
}

export function stateOf({ status }: Batch): string {
  return STATES[status] ?? status;
}

/** Whether it has not ended. */
export function isOpen({ status }: Batch): boolean {
  return ["validating", "in_progress", "finalizing", "cancelling"].includes(status);
}

/** How much of it is answered, 0..1. */
export function shareOf({ status, request_counts: { total, completed, failed } }: Batch): number {
  if (status === "completed") return 1;
  return total ? (completed + failed) / total : 0;
}

/** `412 of 1,000 done, 1 of them failed` */
export function countsOf({ endpoint, request_counts: { total, completed, failed } }: Batch): string {
  if (!total) return "";
  const done = (completed + failed).toLocaleString("en");
  const one = endpoint === TRANSCRIPTIONS ? "recording" : "request";
  const all = completed + failed === total ? count(total, one) : `${done} of ${count(total, one)} done`;
  return failed ? `${all}, ${failed === total ? "all" : failed.toLocaleString("en")} failed` : all;
}

/** How long it took, or takes so far. */
export function tookS(batch: Batch, nowS: number): number {
  const ended = batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
  return Math.max(0, (ended ?? nowS) - (batch.in_progress_at ?? batch.created_at));
}

/** `0:07`, `2 days`. */
export function lasting(seconds: number): string {
  return seconds < 48 * 3_600 ? clock(seconds) : count(Math.round(seconds / 86_400), "day");
}

/** Names by which answers are told apart: paths, each once, none too long for the server. */
export function customIds(paths: readonly string[]): string[] {
  const taken = new Set<string>();
  return paths.map((path) => {
    const short = path.slice(-LONGEST_ID + 10).replace(/^[\udc00-\udfff]/, "") || "recording"; // no half of a pair
    let id = short;
    for (let again = 2; taken.has(id); again++) id = `${short} (${again})`;
    taken.add(id);
    return id;
  });
}

/** The input of a batch: a request a line. */
export function inputLines(recordings: readonly { id: string; fileId: string }[], choice: Choice): string {
  const { model, language, format } = choice;
  const asked = { ...(model && { model }), ...(language && { language }), response_format: format };
  return recordings
    .map(({ id, fileId }) => {
      const body = { ...asked, file: fileId };
      return `${JSON.stringify({ custom_id: id, method: "POST", url: TRANSCRIPTIONS, body })}\n`;
    })
    .join("");
}
