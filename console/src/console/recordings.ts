import { SpeechError, Transcript } from "asr-serve";
import { toast } from "../page/toast";
import { whyDefault } from "./identified";
import { Progress } from "./progress";
import { refused } from "./refused";
import { open } from "./sound";
import type { Stage } from "./stage";
import type { Take } from "./take";
import { upload, type Upload } from "./upload";

/** From a file to its text. */
export class Recordings {
  readonly #progress = new Progress();
  #sending: Upload | undefined;

  constructor(private readonly stage: Stage) {}

  async hear(file: File): Promise<void> {
    const { stage } = this;
    if (stage.mode !== "idle") return toast("One thing at a time: stop or cancel this first.");
    const { model, fileModel, language } = stage.chooser;
    const transcript = new Transcript();
    const fields: Record<string, string> = { ...(fileModel && { model: fileModel }), ...(language && { language }), ...stage.wanted.fields() };
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
      this.#sending = upload(file, fields, {
        model: (name, identified) => {
          if (model) return; // a route's name stands for several
          const why = identified && whyDefault(identified, name);
          if (why) toast(why);
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
      if (fileModel !== model) void stage.chooser.load().catch(() => undefined); // the server may have loaded one for it
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
    this.#sending?.cancel();
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
