import { byId, make, setIcon } from "../page/dom";
import { clock } from "../page/words";
import { Awake } from "./awake";
import { Banner } from "./banner";
import { Chooser } from "./chooser";
import { Meter } from "./level";
import { Player } from "./player";
import { Legend } from "./legend";
import { Remember } from "./remember";
import { facts, type Sound, type Take } from "./take";
import { TextView } from "./textview";
import { Wanted } from "./wanted";
import { Wave } from "./wave";

/** `file`: a recording is sent and heard. */
export type Mode = "idle" | "starting" | "live" | "finishing" | "file";

const BUTTON = {
  idle: ["mic", "Talk"],
  starting: ["x", "Cancel"],
  live: ["stop", "Stop"],
  finishing: ["x", "Give up waiting for the last words"],
  file: ["x", "Cancel"],
} as const;
const WAITING = {
  idle: "",
  starting: "",
  live: "Listening.",
  finishing: "",
  file: "The text comes here.",
} as const;
const TITLE_MARK = { idle: "", starting: "", live: "● ", finishing: "● ", file: "↑ " } as const;

/** What the page shows: the take, what goes on, and the transcripts of this tab. */
export class Stage {
  readonly banner = new Banner();
  readonly chooser = new Chooser(() => this.wanted.know(this.chooser.entry, this.chooser.language, this.chooser.calls));
  readonly meter = new Meter();
  readonly wave = new Wave();
  readonly player = new Player(
    (seconds) => this.#moved(seconds),
    () => this.refresh(),
  );
  readonly wanted = new Wanted();
  readonly #legend = new Legend(() => this.voices());
  readonly view = new TextView((seconds) => this.player.playFrom(seconds), this.#legend);
  readonly #awake = new Awake();
  readonly #takes: Take[] = [];
  readonly remember = new Remember(() => (this.#mode === "idle" ? this.#takes : this.#takes.filter((take) => take !== this.#shown)));
  #mode: Mode = "idle";
  #shown: Take | undefined;

  get mode(): Mode {
    return this.#mode;
  }

  get shown(): Take | undefined {
    return this.#shown;
  }

  /** Whether the main button plays the recording that is shown. */
  get plays(): boolean {
    return this.#mode === "idle" && this.#shown?.sound !== undefined;
  }

  enter(mode: Mode): void {
    this.#mode = mode;
    this.#awake.keep(mode === "live");
    this.refresh();
  }

  /** Show a take, a new one or an earlier one. */
  show(take: Take): void {
    this.#shown = take;
    if (!this.#takes.includes(take)) this.#takes.unshift(take);
    this.view.show(take);
    this.#sound(take);
    this.refresh();
  }

  /** The browser has found out how to play a take. */
  sounds(take: Take, sound: Sound): void {
    if (!this.#takes.includes(take)) return URL.revokeObjectURL(sound.url); // refused meanwhile
    take.sound = sound;
    take.transcript.duration = sound.duration;
    if (take !== this.#shown) return;
    this.#sound(take);
    this.view.refresh();
    this.refresh();
  }

  /** A take that never came to be: show what was there before. */
  forget(take: Take): void {
    const at = this.#takes.indexOf(take);
    if (at < 0) return;
    this.#takes.splice(at, 1);
    if (take === this.#shown) this.#showBefore();
    if (take.sound) URL.revokeObjectURL(take.sound.url); // by now nothing reads from it
  }

  /** Somebody has another name, or has said other segments. */
  voices(): void {
    this.view.voices();
    if (this.#mode === "idle" && this.#shown) this.remember.keep(this.#shown);
    this.refresh();
  }

  #showBefore(): void {
    this.#shown = undefined;
    if (this.#takes[0]) return this.show(this.#takes[0]);
    this.view.clear();
    this.wave.live();
    this.player.load(undefined);
    byId("clock").textContent = clock(0);
    this.refresh();
  }

  /** A word for screen readers only. */
  tell(text: string): void {
    byId("told").textContent = text;
  }

  /** Everything on the page that follows from the mode and the take. */
  refresh(): void {
    const [mode, shown] = [this.#mode, this.#shown];
    document.body.dataset["mode"] = mode;
    const [icon, label] = this.plays ? (this.player.playing ? ["pause", "Pause"] : ["play", "Play"]) : BUTTON[mode];
    const primary = byId("primary");
    setIcon(byId("primary-icon", SVGUseElement), icon!);
    primary.setAttribute("aria-label", label!);
    primary.title = label!;
    byId("talk").hidden = !this.plays;
    byId("level").hidden = mode !== "starting" && mode !== "live";
    byId("browse", HTMLButtonElement).disabled = byId("share", HTMLButtonElement).disabled = mode !== "idle";
    this.chooser.enable(mode === "idle");
    this.wanted.enable(mode === "idle");
    this.#legend.show(shown);
    byId("title").textContent = shown?.title ?? "New transcript";
    byId("subtitle").textContent = mode === "finishing" ? "Finishing the last words" : shown ? facts(shown) : "";
    byId("tools").hidden = !shown?.transcript.segments.length;
    byId("hint").textContent = mode === "starting" ? "Waiting for the microphone" : shown ? "" : "Ready when you are";
    this.view.waiting(WAITING[mode]);
    document.title = `${TITLE_MARK[mode]}${shown?.title ?? "asr-serve"}`;
    this.#list();
  }

  #sound({ sound, transcript }: Take): void {
    this.player.load(sound);
    if (sound) this.wave.whole(sound.peaks);
    else this.wave.live();
    byId("clock").textContent = clock(sound ? 0 : transcript.duration);
  }

  #moved(seconds: number): void {
    const sound = this.#shown?.sound;
    if (!sound) return;
    byId("clock").textContent = clock(seconds);
    this.wave.played(seconds / sound.duration);
    this.view.at(this.player.playing || seconds > 0 ? seconds : undefined);
  }

  #list(): void {
    byId("earlier-room").hidden = this.#takes.length < 2;
    byId("earlier").replaceChildren(
      ...this.#takes.map((take) => {
        const length = make("span", { class: "num" }, clock(take.transcript.duration));
        const button = make("button", { type: "button" }, length, take.transcript.segments[0]?.text || take.title);
        if (take === this.#shown) button.setAttribute("aria-current", "true");
        button.disabled = this.#mode !== "idle";
        button.addEventListener("click", () => {
          this.show(take);
          byId("words").focus();
        });
        return make("li", {}, button);
      }),
    );
  }
}
