import { byId } from "../page/dom";
import { clock } from "../page/words";
import { letGo } from "./sound";
import type { Sound } from "./take";

/** Plays the recording that is shown. */
export class Player {
  readonly #audio = new Audio();
  readonly #seek = byId("seek", HTMLInputElement);
  #sound: Sound | undefined;

  /** `moved`: to this time. `changed`: it plays, or plays no more. */
  constructor(
    private readonly moved: (seconds: number) => void,
    private readonly changed: () => void,
  ) {
    this.#seek.addEventListener("input", () => this.to(Number(this.#seek.value)));
    this.#audio.addEventListener("seeked", () => this.#tell());
    for (const event of ["play", "pause", "ended"]) this.#audio.addEventListener(event, () => this.changed());
    this.#audio.addEventListener("play", () => this.#run());
  }

  get playing(): boolean {
    return !this.#audio.paused;
  }

  get seconds(): number {
    return this.#audio.currentTime;
  }

  /** undefined: nothing to play. */
  load(sound: Sound | undefined): void {
    this.#audio.pause();
    this.#sound = sound;
    this.#seek.hidden = !sound;
    if (!sound) return letGo(this.#audio);
    this.#audio.src = sound.url;
    this.#seek.max = String(sound.duration);
    this.#tell();
  }

  toggle(): void {
    if (!this.#sound) return;
    if (this.#audio.paused) void this.#audio.play();
    else this.#audio.pause();
  }

  pause(): void {
    this.#audio.pause();
  }

  playFrom(seconds: number): void {
    this.to(seconds);
    if (this.#sound) void this.#audio.play();
  }

  to(seconds: number): void {
    if (!this.#sound) return;
    this.#audio.currentTime = Math.min(this.#sound.duration, Math.max(0, seconds));
    this.#tell();
  }

  #run(): void {
    this.#tell();
    if (this.playing) requestAnimationFrame(() => this.#run());
  }

  #tell(): void {
    if (!this.#sound) return;
    const { currentTime } = this.#audio;
    this.#seek.value = String(currentTime);
    this.#seek.setAttribute("aria-valuetext", `${clock(currentTime)} of ${clock(this.#sound.duration)}`);
    this.moved(currentTime);
  }
}
