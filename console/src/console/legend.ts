import { byId, make } from "../page/dom";
import { clock } from "../page/words";
import { rename } from "./rename";
import type { Take } from "./take";
import { speakerColour, speakerName, speakersOf } from "./voices";

/** Who speaks, in which colour, and for how long; and where speakers get names. */
export class Legend {
  readonly #room = byId("voices");
  #take: Take | undefined;
  #shown = "";

  /** `renamed`: somebody has another name now. */
  constructor(private readonly renamed: () => void) {}

  /** As the take is now; undefined: there is none. */
  show(take: Take | undefined): void {
    const speakers = [...speakersOf(take?.transcript.segments ?? [])].sort(([a], [b]) => (a < b ? -1 : 1));
    const shown = JSON.stringify([speakers, speakers.map(([speaker]) => speakerName(speaker, take!.names))]);
    const busy = this.#room.contains(document.activeElement) && document.activeElement instanceof HTMLInputElement;
    if (take === this.#take && (shown === this.#shown || busy)) return; // nobody loses what is being written
    [this.#take, this.#shown] = [take, shown];
    const focused = document.activeElement?.closest<HTMLElement>("#voices [data-speaker]")?.dataset["speaker"];
    this.#room.hidden = !speakers.length;
    const buttons = speakers.map(([speaker, seconds]) => {
      const made = this.button(take!, speaker);
      made.append(make("span", { class: "num" }, clock(seconds)));
      return made;
    });
    this.#room.replaceChildren(...buttons.map((button) => make("li", {}, button)));
    if (focused) buttons.find((button) => button.dataset["speaker"] === focused)?.focus();
  }

  /** A speaker's name, which can be changed. */
  button(take: Take, speaker: string): HTMLButtonElement {
    const name = speakerName(speaker, take.names);
    const made = make("button", {
      class: "voice",
      type: "button",
      "data-voice": String(speakerColour(speaker)),
      "data-speaker": speaker,
      title: "Rename",
    });
    made.append(make("i", { "aria-hidden": "true" }), make("b", {}, name));
    made.addEventListener("click", () =>
      rename(made, name, (given) => {
        if (given) take.names.set(speaker, given);
        else take.names.delete(speaker);
        this.#shown = "";
        this.renamed();
      }),
    );
    return made;
  }
}
