import { SpeechError } from "asr-serve";
import { models, type Model } from "../page/api";
import { byId, make } from "../page/dom";
import { onDrop } from "../page/drop";
import { Gauge } from "../page/gauge";
import { toast } from "../page/toast";
import { count, language, size } from "../page/words";
import { MOST_LINES, type Batch } from "./batch";
import { fromDrop, fromField, isRecording, type Picked } from "./pick";
import { Submission, type Order } from "./submission";

const MOST_LISTED = 5;
const WINDOWS_S: Record<string, number> = { "1h": 3_600, "24h": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400 };

/** The form that makes a batch of recordings. */
export class Create {
  readonly #form = byId("form", HTMLFormElement);
  readonly #model = byId("model", HTMLSelectElement);
  readonly #language = byId("language", HTMLSelectElement);
  readonly #gauge = new Gauge("progressbar", "Upload");
  readonly #what = make("p", { class: "soft num" });
  #known: Model[] = [];
  #picked: Picked[] = [];
  #submission: Submission | undefined;
  #running = false;

  /** `made`: the server has this batch, and what is to be said of it. `problem`: to be shown, with what can be done
   * again. */
  constructor(
    private readonly made: (batch: Batch, told: string) => void,
    private readonly problem: (failure: unknown, about?: string, again?: () => void) => void,
  ) {
    byId("sending").append(this.#what, this.#gauge.element);
    for (const id of ["files", "folder"]) {
      const field = byId(id, HTMLInputElement);
      byId(`choose-${id}`).addEventListener("click", () => field.click());
      field.addEventListener("change", () => {
        this.#choose(fromField(field.files));
        field.value = "";
      });
    }
    onDrop(
      () => !byId("create").hidden,
      (data) =>
        fromDrop(data).then(
          (picked) => this.#choose(picked),
          () => toast("The browser cannot read what was dropped. Choose it instead."),
        ),
    );
    this.#model.addEventListener("change", () => this.#languages());
    byId("clear").addEventListener("click", () => void this.#clear());
    byId("stop").addEventListener("click", () => void this.#clear());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#submit();
    });
    addEventListener("beforeunload", (event) => {
      if (this.#running) event.preventDefault();
    });
  }

  /** Whether the server has told its models. */
  get known(): boolean {
    return this.#known.length > 0;
  }

  /** Ask for the models, and show the form. Rejects with SpeechError. */
  async load(): Promise<void> {
    this.#known = await models();
    const ready = this.#known.filter(({ state }) => state === "ready");
    const options = ready.map(({ id }) => make("option", { value: id }, id));
    this.#model.replaceChildren(make("option", { value: "" }, "The server’s choice"), ...options);
    this.#languages();
    byId("create").hidden = false;
  }

  #languages(): void {
    const of = this.#known.filter(({ id, state }) => (this.#model.value ? id === this.#model.value : state === "ready"));
    const codes = [...new Set(of.flatMap(({ languages }) => languages))];
    const options = codes.map((code) => make("option", { value: code }, language(code)));
    options.sort((a, b) => a.text.localeCompare(b.text));
    this.#language.replaceChildren(make("option", { value: "" }, "As it is spoken"), ...options);
    this.#language.disabled = codes.length < 2;
  }

  #choose(picked: readonly Picked[]): void {
    if (!picked.length) return;
    if (this.#running) return toast("One batch at a time: this one is being uploaded.");
    const recordings = picked.filter(isRecording).sort((a, b) => a.path.localeCompare(b.path));
    const others = picked.length - recordings.length;
    if (!recordings.length) {
      return toast(picked.length === 1 ? `${picked[0]!.path} is no recording` : "There is no recording among these files");
    }
    if (recordings.length > MOST_LINES) {
      return toast(`${recordings.length.toLocaleString("en")} recordings: a batch takes up to ${MOST_LINES.toLocaleString("en")}`);
    }
    if (this.#submission) void this.#cancel(this.#submission);
    this.#submission = undefined;
    this.#picked = recordings;
    const bytes = recordings.reduce((sum, { file }) => sum + file.size, 0);
    const left = others ? `, ${count(others, "other file")} left out` : "";
    byId("chosen-count").replaceChildren(make("b", {}, count(recordings.length, "recording")), `, ${size(bytes)}${left}`);
    const listed = recordings.slice(0, MOST_LISTED).map(({ path }) => make("li", {}, path));
    const more = recordings.length - listed.length;
    if (more) listed.push(make("li", {}, `and ${more.toLocaleString("en")} more`));
    byId("chosen-list").replaceChildren(...listed);
    const [folder, rest] = recordings[0]!.path.split("/", 2);
    byId("name", HTMLInputElement).value = rest === undefined ? (recordings.length > 1 ? "" : folder!) : folder!;
    this.#show(true);
    byId("submit").focus();
  }

  #show(chosen: boolean): void {
    byId("pick").hidden = chosen;
    this.#form.hidden = !chosen;
  }

  #run(on: boolean): void {
    this.#running = on;
    byId("sending").hidden = byId("stop").hidden = !on;
    byId("submit", HTMLButtonElement).disabled = byId("clear", HTMLButtonElement).disabled = on;
    for (const field of this.#form.querySelectorAll<HTMLSelectElement | HTMLInputElement>(".fields select, .fields input")) {
      field.disabled = on;
    }
    if (!on) this.#language.disabled = this.#language.options.length < 3;
  }

  /** What was chosen goes, and what was uploaded of it. */
  async #clear(): Promise<void> {
    const running = this.#running;
    const submission = this.#submission;
    this.#submission = undefined;
    this.#picked = [];
    this.#run(false);
    this.#show(false);
    byId("choose-files").focus();
    if (submission) await this.#cancel(submission, running ? "Cancelled: what was uploaded is deleted again" : "");
  }

  /** Says how many files could not be deleted, and otherwise `done`. A batch that the server has by then is shown. */
  async #cancel(submission: Submission, done = ""): Promise<void> {
    let cancelled;
    if (submission.asked) toast("Cancelling: the server is asked whether it has the batch");
    try {
      cancelled = await submission.cancel();
    } catch (failure) {
      return this.problem(failure, "The batch may go on", () => void this.#cancel(submission, done));
    }
    const { batch, files, left } = cancelled;
    if (batch) this.made(batch, done);
    else if (done && !left) toast(done);
    if (left) toast(`${left.toLocaleString("en")} of ${count(files, "uploaded file")} could not be deleted; the server deletes them when they expire`);
  }

  async #submit(): Promise<void> {
    if (this.#running || !this.#picked.length) return;
    this.#submission ??= this.#begin();
    const submission = this.#submission;
    this.#run(true);
    byId("stop").focus();
    try {
      const batch = await submission.run(this.#order());
      if (submission.cancelled) return;
      this.#submission = undefined;
      this.#picked = [];
      this.#run(false);
      this.#show(false);
      this.made(batch, "Started. You may close this page.");
    } catch (failure) {
      if (submission.cancelled) return;
      this.#run(false);
      byId("submit").focus();
      const general = failure instanceof SpeechError && ["connection_failed", "invalid_api_key"].includes(failure.code);
      this.problem(failure, general ? "" : submission.about, () => void this.#submit());
    }
  }

  #begin(): Submission {
    const all = this.#picked.length;
    const show = (done: number, share: number): void => {
      const text = `Uploading, ${done.toLocaleString("en")} of ${count(all, "recording")}`;
      this.#what.textContent = text;
      this.#gauge.set(share, text);
    };
    show(0, 0);
    return new Submission(this.#picked, show);
  }

  #order(): Order {
    const [format, window] = [byId("format", HTMLSelectElement).value, byId("window", HTMLSelectElement).value];
    const choice = { model: this.#model.value, language: this.#language.value, format };
    return { choice, window, windowS: WINDOWS_S[window]!, name: byId("name", HTMLInputElement).value.trim() };
  }
}
