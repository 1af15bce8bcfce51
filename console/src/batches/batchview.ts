import { SpeechError } from "asr-serve";
import { get, request } from "../page/api";
import { confirm } from "../page/confirm";
import { make } from "../page/dom";
import { Gauge } from "../page/gauge";
import { words } from "../page/problems";
import { fileName, save } from "../page/save";
import { toast } from "../page/toast";
import { clock, size } from "../page/words";
import { answers, archivePaths, type Answer } from "./answers";
import { countsOf, isOpen, lasting, shareOf, stateOf, tookS, type Batch } from "./batch";
import { zip } from "../page/zip";

/** Larger results are downloaded and not shown. */
const LARGEST_SHOWN_BYTES = 64e6;
const SHOWN_AT_ONCE = 50;

/** One batch in the list. */
export class BatchView {
  readonly element: HTMLLIElement;
  readonly #state = make("span", { class: "pill" });
  readonly #counts = make("span", { class: "num" });
  readonly #times = make("span", { class: "soft num" });
  readonly #gauge: Gauge;
  readonly #errors = make("ul", { class: "line-errors" });
  readonly #cancel = make("button", { class: "plain", type: "button" }, "Cancel");
  readonly #results = make("details", { class: "results" });
  readonly #room = make("div");
  readonly #name: string;
  #batch: Batch;
  #loaded = false;

  /** `changed`: it was changed here. `tell`: something for screen readers. */
  constructor(
    batch: Batch,
    private readonly changed: (batch: Batch) => void,
    private readonly tell: (text: string) => void,
  ) {
    this.#batch = batch;
    this.#name = batch.metadata?.["name"] || `Batch of ${moment(batch.created_at)}`;
    this.#gauge = new Gauge("progressbar", `Progress of ${this.#name}`);
    this.#cancel.setAttribute("aria-label", `Cancel ${this.#name}`);
    this.#cancel.addEventListener("click", () => void this.#stop());
    this.#results.append(make("summary", {}, "Results"), this.#room);
    this.#results.addEventListener("toggle", () => {
      if (this.#results.open && !this.#loaded) void this.#load();
    });
    const title = make("h3", {}, this.#name);
    const head = make("div", { class: "batch-head" }, title, this.#state, this.#cancel);
    const facts = make("p", { class: "batch-facts" }, this.#counts, this.#times);
    const id = make("p", { class: "soft fine mono" }, batch.id);
    this.element = make("li", { class: "card batch" }, head, this.#gauge.element, facts, this.#errors, this.#results, id);
    this.#show();
  }

  get batch(): Batch {
    return this.#batch;
  }

  /** As the server tells it now. */
  update(batch: Batch): void {
    const before = this.#batch;
    this.#batch = batch;
    this.#show();
    if (isOpen(before) && !isOpen(batch)) this.tell(`${this.#name}: ${stateOf(batch).toLowerCase()}. ${countsOf(batch)}`);
  }

  #show(): void {
    const batch = this.#batch;
    const open = isOpen(batch);
    this.#state.textContent = stateOf(batch);
    this.#state.dataset["state"] = batch.status;
    this.#counts.textContent = countsOf(batch);
    this.#times.textContent = times(batch);
    this.#gauge.element.hidden = !open;
    this.#gauge.set(shareOf(batch), countsOf(batch) || stateOf(batch));
    if (!open && this.#cancel.contains(document.activeElement)) this.#results.querySelector("summary")?.focus();
    this.#cancel.hidden = !open;
    this.#cancel.disabled = batch.status === "cancelling";
    this.#results.hidden = open || !(batch.output_file_id || batch.error_file_id);
    this.#errors.hidden = !batch.errors;
    this.#errors.replaceChildren(
      ...(batch.errors?.data ?? []).map(({ line, code, message }) => {
        const said = words(new SpeechError(code, message));
        return make("li", {}, line === null ? said : `Line ${line}: ${said}`);
      }),
    );
  }

  async #stop(): Promise<void> {
    const text = "Recordings that are done keep their transcripts. The others are not transcribed.";
    if (!(await confirm(`Cancel ${this.#name}?`, text, "Cancel the batch"))) return;
    try {
      const answer = await request(`v1/batches/${this.#batch.id}/cancel`, { method: "POST" });
      this.changed((await answer.json()) as Batch);
    } catch (failure) {
      toast(words(failure));
    }
  }

  async #load(): Promise<void> {
    this.#loaded = true;
    this.#room.replaceChildren(make("p", { class: "soft" }, "Asking the server"));
    const { output_file_id: output, error_file_id: errors } = this.#batch;
    try {
      const files = await Promise.all([output, errors].map((id) => (id ? about(id) : undefined)));
      const bytes = files.reduce((sum, file) => sum + (file?.bytes ?? 0), 0);
      const until = make("p", { class: "soft fine" }, `The server deletes these results on ${moment(Math.min(...files.map((file) => file?.expires_at ?? Infinity)))}.`);
      if (bytes > LARGEST_SHOWN_BYTES) {
        const large = make("p", {}, `${size(bytes)} are too many to be shown here.`);
        return this.#room.replaceChildren(large, this.#downloads(undefined), until);
      }
      const found = (await Promise.all([errors, output].map((id) => (id ? text(id) : "")))).flatMap(answers);
      this.#room.replaceChildren(this.#downloads(found), list(found), until);
    } catch (failure) {
      this.#loaded = false;
      const again = make("button", { class: "plain", type: "button" }, "Try again");
      again.addEventListener("click", () => void this.#load());
      this.#room.replaceChildren(make("p", { class: "problem", role: "alert" }, words(failure)), again);
    }
  }

  #downloads(found: readonly Answer[] | undefined): HTMLElement {
    const { output_file_id: output, error_file_id: errors } = this.#batch;
    const row = make("p", { class: "downloads" });
    const stem = fileName(this.#name) || this.#batch.id;
    const texts = (found ?? []).filter((each) => "text" in each);
    if (texts.length) {
      row.append(
        button("Transcripts (.zip)", `Download the transcripts of ${this.#name}`, async () => {
          const paths = archivePaths(texts.map(({ id }) => id), texts.map(({ suffix }) => suffix));
          save(`${stem}.zip`, zip(texts.map(({ file }, n) => ({ path: paths[n]!, text: file })), new Date()));
        }),
      );
    }
    for (const [id, what, name] of [
      [output, "All answers (.jsonl)", `${stem}.jsonl`],
      [errors, "Errors (.jsonl)", `${stem}-errors.jsonl`],
    ] as const) {
      if (id) row.append(button(what, `${what} of ${this.#name}`, async () => save(name, await (await content(id)).blob())));
    }
    return row;
  }
}

function list(found: readonly Answer[]): HTMLElement {
  const rows = make("ul", { class: "answers" });
  const more = make("button", { class: "plain", type: "button" });
  let shown = 0;
  const show = (): void => {
    const next = found.slice(shown, shown + SHOWN_AT_ONCE).map(row);
    rows.append(...next);
    requestAnimationFrame(() => next.forEach(letOpen)); // once it is laid out
    if (shown) next[0]?.querySelector<HTMLElement>("button")?.focus();
    shown += next.length;
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(SHOWN_AT_ONCE, found.length - shown)} more`;
  };
  more.addEventListener("click", show);
  show();
  return make("div", {}, rows, more);
}

function row(answer: Answer): HTMLElement {
  const name = make("b", {}, answer.id);
  if ("wrong" in answer) return make("li", { class: "wrong" }, name, make("p", {}, answer.wrong));
  const stem = fileName(answer.id.replace(/^.*[\\/]/, "").replace(/\.\w{1,5}$/, "")) || "transcript";
  const act = button("Download", `Download ${answer.id}`, async () => {
    const made = "text" in answer ? new Blob([answer.file], { type: "text/plain" }) : await (await content(answer.audio.fileId)).blob();
    save(stem + answer.suffix, made);
  });
  const what = "text" in answer ? answer.text.trim() || "No speech was found in it." : `${clock(answer.audio.seconds)} of speech, ${size(answer.audio.bytes)}`;
  return make("li", {}, name, act, make("p", { class: "answer" }, what));
}

/** A text that is cut off gets a button that shows all of it. */
function letOpen(row: HTMLElement): void {
  const text = row.querySelector<HTMLElement>(".answer");
  if (!text || text.scrollHeight <= text.clientHeight) return;
  const name = row.querySelector("b")!.textContent;
  const toggle = make("button", { class: "plain", type: "button" });
  const show = (whole: boolean): void => {
    text.classList.toggle("whole", whole);
    toggle.textContent = whole ? "Show less" : "Show all";
    toggle.setAttribute("aria-label", `${toggle.textContent} of ${name}`);
    toggle.setAttribute("aria-expanded", String(whole));
  };
  toggle.addEventListener("click", () => show(!text.classList.contains("whole")));
  show(false);
  row.append(toggle);
}

function button(text: string, label: string, act: () => Promise<void>): HTMLButtonElement {
  const made = make("button", { class: "plain", type: "button", "aria-label": label }, text);
  made.addEventListener("click", () => {
    made.disabled = true;
    act()
      .catch((failure: unknown) => toast(words(failure)))
      .finally(() => (made.disabled = false));
  });
  return made;
}

async function about(id: string): Promise<{ bytes: number; expires_at: number }> {
  return (await (await get(`v1/files/${id}`)).json()) as { bytes: number; expires_at: number };
}

function content(id: string): Promise<Response> {
  return get(`v1/files/${id}/content`);
}

async function text(id: string): Promise<string> {
  return (await content(id)).text();
}

/** When it began, and how long it has. */
function times(batch: Batch): string {
  const took = lasting(tookS(batch, Date.now() / 1_000));
  if (!isOpen(batch)) return `${moment(batch.created_at)}, took ${took}`;
  return `for ${took}, until ${moment(batch.expires_at)} at the latest`;
}

function moment(seconds: number): string {
  return new Date(1_000 * seconds).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}
