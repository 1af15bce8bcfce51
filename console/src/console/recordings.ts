import { SpeechError, Transcript } from "asr-serve";
import { words } from "../page/problems";
import { toast } from "../page/toast";
import { language as nameOf } from "../page/words";
import { detect } from "./detect";
import { Progress } from "./progress";
import { refused } from "./refused";
import { open } from "./sound";
import type { Stage } from "./stage";
import type { Take } from "./take";
import { upload, type Upload } from "./upload";

/** Least probability of a detected language by which the server is to choose the model. */
const LEAST_SCORE = 0.5;

/** From a file to its text. */
export class Recordings {
  readonly #progress = new Progress();
  #sending: Upload | undefined;
  #detecting: AbortController | undefined;

  constructor(private readonly stage: Stage) {}

  async hear(file: File): Promise<void> {
    const { stage } = this;
    if (stage.mode !== "idle") return toast("One thing at a time: stop or cancel this first.");
    const { model, language, detects } = stage.chooser;
    const transcript = new Transcript();
    const fields: Record<string, string> = { ...(model && { model }), ...(language && { language }), ...stage.wanted.fields() };
    const source = { file, fields };
    const take: Take = { kind: "file", title: file.name, transcript, names: new Map(), source, sound: undefined };
    [transcript.model, transcript.language] = [model, language];
    stage.banner.hide();
    stage.wanted.refused();
    stage.enter("file");
    stage.show(take);
    this.#progress.begin(file.size, "spk" in fields);
    void this.#play(take, file);
    try {
      if (detects) await this.#detect(take, file, fields);
      this.#sending = upload(file, fields, {
        model: (name) => {
          if (model) return; // a route's name stands for several
          transcript.model = name;
          take.automatic = true;
          stage.refresh();
        },
        sent: (bytes, total) => this.#progress.sent(bytes, total),
        segment: (segment) => {
          transcript.segments.push(segment);
          stage.view.segment(segment);
          this.#progress.heard(segment.end);
          stage.refresh();
        },
        language: (code, score) => {
          transcript.language = code;
          if (score !== undefined && !fields["language"]) take.languageScore = score;
        },
      });
      await this.#sending.done;
      this.#over(take);
      if (!transcript.segments.length) toast("No speech was found in it");
      stage.tell(transcript.segments.length ? "The transcript is done" : "");
    } catch (failure) {
      this.#over(take);
      if (!transcript.segments.length) stage.forget(take);
      stage.wanted.refused(failure);
      if (failure instanceof SpeechError && failure.code === "cancelled") toast("Cancelled");
      else await refused(failure, stage.banner, () => void this.hear(file), file.name);
    }
  }

  cancel(): void {
    this.#detecting?.abort();
    this.#sending?.cancel();
  }

  /** Find out which language is spoken; the server chooses the model by it. Rejects when it is cancelled, or a key is
   * missing: where it fails otherwise, or the language is uncertain, the default model hears the recording. */
  async #detect(take: Take, file: File, fields: Record<string, string>): Promise<void> {
    this.#detecting = new AbortController();
    this.#progress.detecting();
    try {
      const { language, score } = await detect(file, this.#detecting.signal);
      if (score < LEAST_SCORE) toast(`The language is uncertain, ${nameOf(language)} at ${Math.round(100 * score)} %: the default model hears it`);
      else [fields["language"], take.transcript.language, take.languageScore] = [language, language, score];
      void this.stage.chooser.load().catch(() => undefined); // the model that detects is loaded now
    } catch (failure) {
      if (failure instanceof SpeechError && ["cancelled", "invalid_api_key"].includes(failure.code)) throw failure;
      toast(`The language could not be found out: ${words(failure)}`);
    } finally {
      this.#detecting = undefined;
    }
  }

  #over(take: Take): void {
    const { transcript } = take;
    this.#sending = undefined;
    this.#progress.end();
    transcript.duration ||= transcript.segments.at(-1)?.end ?? 0;
    this.stage.enter("idle");
    this.stage.remember.keep(take);
  }

  async #play(take: Take, file: File): Promise<void> {
    const sound = await open(file);
    if (!sound) return;
    this.stage.sounds(take, sound);
    if (take === this.stage.shown) this.#progress.lasts(sound.duration);
  }
}
