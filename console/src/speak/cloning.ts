import { SpeechError } from "asr-serve";
import { Meter } from "../console/level";
import { request } from "../page/api";
import { byId, setIcon } from "../page/dom";
import { askForKey } from "../page/key";
import { words } from "../page/problems";
import { Recorder } from "../page/recorder";
import { toast } from "../page/toast";
import { clock, count } from "../page/words";
import { SENTENCES } from "./sentences";
import { sentEvents } from "./request";

const RATE_HZ = 24_000;
/** A clip is cut at pauses if it is longer than this. */
const LONGEST_S = 20;
/** The server needs so many clips, and so much speech in them. */
const LEAST_CLIPS = 5;
const LEAST_S = 20;
const NAME = /^[a-z0-9][a-z0-9_-]{0,63}$/;

interface Clip {
  file: File;
  seconds: number;
}

interface Job {
  id: string;
  name: string;
  state: "waiting" | "running" | "done" | "failed" | "cancelled";
  ahead: number;
  progress: { stage: string; share: number; left_s: number | null };
  error: { code: string; message: string } | null;
}

const STAGES: Record<string, string> = {
  waiting: "waiting",
  loading: "loading the model",
  listening: "listening to the recordings",
  aligning: "finding the sounds",
  learning: "learning the voice",
  comparing: "comparing it with you",
};

/** The dialog in which somebody reads sentences aloud and agrees, and the cloning that follows. */
export class Cloning {
  readonly #dialog = byId("clone-dialog", HTMLDialogElement);
  readonly #speaker = byId("speaker", HTMLInputElement);
  readonly #name = byId("voice-name", HTMLInputElement);
  readonly #consent = byId("consent", HTMLTextAreaElement);
  readonly #agree = byId("agree", HTMLInputElement);
  readonly #meter = new Meter("clone-level");
  readonly #clips = new Map<number, Clip>();
  readonly #player = new Audio();
  #at = 0;
  #recorder: Recorder | undefined;
  #recorded = 0;
  /** Somebody has changed the statement, or the name of the voice: it is no more made of the speaker's name. */
  #own = { consent: false, name: false };
  #sending: AbortController | undefined;
  /** The cloning that this page began, and the recordings it was made of. */
  #sent: { id: string; clips: Map<number, Clip> } | undefined;
  /** The cloning that is shown, until it is over: after a lost connection too. */
  #job: Job | undefined;
  /** Its events come. */
  #followed = false;

  /** `done`: the server has this voice now; `own`: this page has sent its recordings. `busy`: it is listened to somebody, and nothing else should sound. */
  constructor(
    private readonly done: (name: string, own: boolean) => void,
    private readonly busy: () => void,
  ) {
    byId("clone").addEventListener("click", () => void this.#open());
    byId("clone-close").addEventListener("click", () => this.#dialog.close());
    byId("clone-key").addEventListener("click", () => void this.#otherKey());
    byId("clone-form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#send();
    });
    this.#dialog.addEventListener("cancel", (event) => {
      if (!this.#recorder) return;
      event.preventDefault(); // Escape ends the recording first
      void this.#end();
    });
    this.#dialog.addEventListener("close", () => {
      void this.#end();
      this.#player.pause();
      this.#sending?.abort();
    });
    this.#speaker.addEventListener("input", () => this.#fill());
    this.#name.addEventListener("input", () => {
      this.#own.name = this.#name.value !== "";
      this.#check();
      this.#refresh();
    });
    this.#consent.addEventListener("input", () => {
      this.#own.consent = true;
      this.#agree.checked = false; // to another statement nobody has agreed
      this.#refresh();
    });
    this.#agree.addEventListener("change", () => this.#refresh());
    byId("read").addEventListener("click", () => void (this.#recorder ? this.#end() : this.#record()));
    byId("read-listen").addEventListener("click", () => this.#listen());
    byId("read-before").addEventListener("click", () => this.#go(-1));
    byId("read-next").addEventListener("click", () => this.#go(1));
    byId("cloning-cancel").addEventListener("click", () => void this.#cancelJob());
    this.#fill();
  }

  async #open(): Promise<void> {
    this.busy();
    this.#dialog.showModal();
    this.#speaker.focus();
    await this.#allowed();
  }

  /** Whether the server lets whoever has this key clone; and one that goes on is followed again. */
  async #allowed(): Promise<void> {
    byId("clone-problem").textContent = "";
    byId("clone-key").hidden = true;
    try {
      const { data } = (await (await request("v1/voices/jobs")).json()) as { data: Job[] };
      const shown = data.find(({ id }) => id === this.#job?.id) ?? data.find(unfinished);
      if (shown && !this.#followed) void this.#follow(shown);
    } catch (failure) {
      this.#refused(failure);
    }
  }

  async #otherKey(): Promise<void> {
    if ((await askForKey(false)) !== undefined) await this.#allowed();
  }

  #fill(): void {
    const speaker = this.#speaker.value.trim();
    if (!this.#own.consent) {
      this.#consent.value = `I, ${speaker || "NAME"}, am the speaker in these recordings and agree that my voice is cloned and used to speak.`;
      this.#agree.checked = false;
    }
    if (!this.#own.name) {
      this.#name.value = speaker.toLowerCase().normalize("NFKD").replace(/\p{M}/gu, "").replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
      this.#check();
    }
    this.#refresh();
  }

  #refresh(): void {
    const clip = this.#clips.get(this.#at);
    const recording = this.#recorder !== undefined;
    byId("sentence-number").textContent = `${this.#at + 1} of ${SENTENCES.length}`;
    byId("sentence").textContent = SENTENCES[this.#at]!;
    byId("read-text").textContent = recording ? "Stop" : clip ? "Record again" : "Record";
    byId("read").setAttribute("aria-pressed", String(recording));
    setIcon(byId("read-icon", SVGUseElement), recording ? "stop" : "mic");
    byId("read-listen", HTMLButtonElement).disabled = recording || !clip;
    byId("read-before", HTMLButtonElement).disabled = recording || this.#at === 0;
    byId("read-next", HTMLButtonElement).disabled = recording || this.#at === SENTENCES.length - 1;
    const seconds = [...this.#clips.values()].reduce((sum, each) => sum + each.seconds, 0);
    const enough = this.#clips.size >= LEAST_CLIPS && seconds >= LEAST_S;
    const lacks = enough ? "More make it better." : `At least ${LEAST_CLIPS} sentences and ${LEAST_S} seconds are needed.`;
    if (!recording) byId("read-state").textContent = `${count(this.#clips.size, "sentence")}, ${clock(seconds)} recorded. ${lacks}`;
    const ready = enough && !recording && this.#agree.checked && NAME.test(this.#name.value) && this.#speaker.value.trim() !== "";
    byId("clone-make", HTMLButtonElement).disabled = !ready || this.#sending !== undefined || this.#followed;
  }

  /** Whether a voice can have this name, as far as the page knows. */
  #check(): void {
    const wrong = this.#name.value && !NAME.test(this.#name.value);
    this.#say("voice-name-problem", this.#name, wrong ? "Only small letters, figures, - and _, beginning with a letter or a figure." : "");
  }

  #say(problem: string, field: HTMLElement, text: string): void {
    byId(problem).textContent = text;
    if (text) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }

  #go(by: number): void {
    this.#player.pause();
    this.#at = Math.min(SENTENCES.length - 1, Math.max(0, this.#at + by));
    this.#refresh();
  }

  #listen(): void {
    const clip = this.#clips.get(this.#at);
    if (!clip) return;
    if (this.#player.src) URL.revokeObjectURL(this.#player.src);
    this.#player.src = URL.createObjectURL(clip.file);
    void this.#player.play().catch(() => undefined); // stopped before it began
  }

  async #record(): Promise<void> {
    this.#player.pause();
    byId("read-problem").textContent = "";
    const made = new Recorder(
      RATE_HZ,
      LONGEST_S,
      (peak, seconds) => {
        this.#recorded = seconds;
        this.#meter.level(peak);
        byId("read-state").textContent = `Recording, ${clock(seconds)}`;
      },
      () => void this.#end(),
    );
    this.#recorder = made;
    this.#recorded = 0;
    this.#refresh();
    try {
      await made.start();
    } catch (failure) {
      if (this.#recorder !== made) return;
      this.#recorder = undefined;
      byId("read-problem").textContent = words(failure);
      this.#refresh();
    }
  }

  async #end(): Promise<void> {
    const made = this.#recorder;
    if (!made) return;
    const file = await made.stop(`${String(this.#at + 1).padStart(2, "0")}.wav`);
    if (this.#recorder !== made) return;
    this.#recorder = undefined;
    this.#meter.rest();
    if (made.failed) byId("read-problem").textContent = words(made.failed);
    if (file && this.#recorded > 1) this.#clips.set(this.#at, { file, seconds: this.#recorded });
    else if (file) byId("read-problem").textContent ||= "That was too short: read the whole sentence.";
    this.#refresh();
  }

  async #send(): Promise<void> {
    if (byId("clone-make", HTMLButtonElement).disabled) return;
    const clips = new Map(this.#clips);
    const form = new FormData();
    form.append("name", this.#name.value);
    form.append("consent", this.#consent.value);
    form.append("texts", [...clips.keys()].map((at) => `${String(at + 1).padStart(2, "0")}|${SENTENCES[at]}`).join("\n"));
    for (const { file } of clips.values()) form.append("files", file);
    const stop = new AbortController();
    this.#sending = stop;
    byId("clone-problem").textContent = "";
    this.#say("consent-problem", this.#consent, "");
    this.#refresh();
    try {
      const job = (await (await request("v1/voices", { method: "POST", body: form, signal: stop.signal })).json()) as Job;
      this.#sent = { id: job.id, clips };
      void this.#follow(job);
      this.#dialog.close();
    } catch (failure) {
      if (!stop.signal.aborted) this.#refused(failure);
    } finally {
      this.#sending = undefined;
      this.#refresh();
    }
  }

  /** Say beside the field that was refused why, or at the end of the dialog. */
  #refused(failure: unknown): void {
    const said = failure instanceof SpeechError && failure.code === "invalid_api_key" ? failure.message : words(failure);
    const param = failure instanceof SpeechError ? failure.param : undefined;
    const [problem, field] = param === "consent" ? ["consent-problem", this.#consent] : ["voice-name-problem", this.#name];
    if (param === "consent" || param === "name") {
      this.#say(problem as string, field as HTMLElement, said);
      (field as HTMLElement).focus();
      return;
    }
    byId("clone-problem").textContent = said;
    byId("clone-key").hidden = !(failure instanceof SpeechError && (failure.code === "not_allowed" || failure.code === "invalid_api_key"));
  }

  /** Show how far a cloning is, until it is over. */
  async #follow(first: Job): Promise<void> {
    [this.#job, this.#followed] = [first, true];
    byId("cloning").hidden = false;
    this.#progress(first);
    this.#refresh();
    try {
      const answer = await request(`v1/voices/jobs/${first.id}/events`);
      let job = first;
      for await (job of sentEvents<Job>(answer)) this.#progress((this.#job = job));
      if (unfinished(job)) throw new SpeechError("connection_lost", "The answer broke off.");
      this.#over(job);
    } catch (failure) {
      const lost = failure instanceof SpeechError && failure.code === "connection_lost";
      byId("cloning-state").textContent = `${lost ? "The connection is lost." : words(failure)} The cloning goes on if the server does.`;
    } finally {
      this.#followed = false;
      this.#refresh();
    }
  }

  #progress({ name, state, ahead, progress }: Job): void {
    const minutes = progress.left_s === null ? "" : `, ${clock(progress.left_s)} left at most`;
    const doing = state === "waiting" ? (ahead ? `waiting for ${count(ahead, "other")}` : "waiting") : (STAGES[progress.stage] ?? progress.stage);
    const text = `Cloning ${name}: ${doing}${state === "running" ? minutes : ""}`;
    const state_ = byId("cloning-state");
    if (state_.textContent !== text) state_.textContent = text;
    byId("cloning-bar").setAttribute("aria-valuenow", String(Math.round(100 * progress.share)));
    byId("cloning-fill").style.transform = `scaleX(${progress.share})`;
  }

  #over({ id, name, state, error }: Job): void {
    this.#job = undefined;
    if (state === "failed") {
      byId("cloning-state").textContent = `The voice ${name} was not made: ${error?.message ?? "the server does not say why"}`;
      return;
    }
    byId("cloning").hidden = true;
    if (state === "cancelled") return toast("The cloning was cancelled");
    const own = id === this.#sent?.id;
    if (own) this.#forget(this.#sent!.clips);
    toast(`The voice ${name} is made`);
    this.done(name, own);
  }

  /** A voice is made of these. What was recorded since stays. */
  #forget(clips: Map<number, Clip>): void {
    for (const [at, clip] of clips) if (this.#clips.get(at) === clip) this.#clips.delete(at);
    if (!this.#recorder) this.#at = 0;
    this.#agree.checked = false;
    this.#refresh();
  }

  async #cancelJob(): Promise<void> {
    const id = this.#job?.id;
    if (id === undefined) return void (byId("cloning").hidden = true);
    try {
      const job = (await (await request(`v1/voices/jobs/${id}`, { method: "DELETE" })).json()) as Job;
      if (this.#job?.id === id && !this.#followed) this.#over(job); // otherwise its last event says so
    } catch (failure) {
      toast(words(failure));
      if (!(failure instanceof SpeechError && failure.code === "unknown_job") || this.#job?.id !== id) return;
      this.#job = undefined;
      byId("cloning").hidden = true;
    }
  }
}

function unfinished({ state }: Job): boolean {
  return state === "waiting" || state === "running";
}

/** Ask whether a voice is to be deleted, and have the server do so. Resolves with whether it did. Rejects with
 * SpeechError. */
export async function deleted(name: string): Promise<boolean> {
  const dialog = byId("delete-dialog", HTMLDialogElement);
  byId("delete-name").textContent = name;
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  if (dialog.returnValue !== "delete") return false;
  await request(`v1/voices/${encodeURIComponent(name)}`, { method: "DELETE" });
  return true;
}
