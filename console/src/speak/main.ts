import "../styles/page";
import "../styles/console.css";
import "../styles/paper.css";
import "../styles/rail.css";
import "../styles/dock.css";
import "../styles/speak.css";

import { SpeechError } from "asr-serve";
import { Banner } from "../console/banner";
import { sheet } from "../console/sheet";
import { byId, make, setIcon } from "../page/dom";
import { save } from "../page/save";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { clock, count, delay } from "../page/words";
import { Bars } from "./bars";
import { Caption } from "./caption";
import { Player } from "./player";
import { Cloning, deleted } from "./cloning";
import { recorded, spoken, type Ask, type Heard } from "./request";
import { forget, sampled } from "./samples";
import { endOf, inserted, placeOf, ssmlHelp } from "./ssml";
import { Voices, type Voice } from "./voices";

/** So much is taken ahead of what is heard; then the server is left waiting. */
const AHEAD_S = 30;
const LOOK_MS = 250;

const banner = new Banner();
const voices = new Voices({ sample: (voice) => sample(voice), remove: (voice) => void remove(voice) });
const caption = new Caption();
const bars = new Bars();
const text = byId("text", HTMLTextAreaElement);
const [speed, pitch] = [byId("speed", HTMLInputElement), byId("pitch", HTMLInputElement)];
const ssml = byId("ssml", HTMLInputElement);
let going: AbortController | undefined;

function ask(): Ask {
  const { model, voice } = voices;
  return { input: text.value, model, voice, speed: Number(speed.value), pitch: Number(pitch.value), ssml: ssml.checked };
}

function enter(mode: "idle" | "waiting" | "speaking" | "fetching", hint = ""): void {
  document.body.dataset["mode"] = mode;
  const idle = mode === "idle";
  setIcon(byId("primary-icon"), idle ? "play" : "stop");
  byId("primary").setAttribute("aria-label", idle ? "Speak" : "Stop");
  byId("hint").textContent = idle ? "Ready when you are" : hint;
  byId("download", HTMLButtonElement).disabled = !idle;
  if (idle) {
    caption.clear();
    bars.clear();
  }
}

/** The voices that there are, with a key if the server wants one. False: that was told. */
async function known(): Promise<boolean> {
  if (voices.known) return true;
  try {
    await voices.load();
    if (voices.known) return true;
    banner.show("This server has no voice. Whoever runs it can load one: asr-serve serve --voice NAME.");
  } catch (failure) {
    banner.error(failure, () => void known());
  }
  return false;
}

async function speak(heard: (signal: AbortSignal) => AsyncGenerator<Heard>, sampling?: Voice): Promise<void> {
  const pressed = performance.now();
  const player = new Player(); // now: a browser lets a page sound that was just asked to
  const stop = new AbortController();
  going = stop;
  banner.hide();
  wrong();
  voices.sampling(sampling);
  enter("waiting", "Waiting for the first sound");
  byId("clock").textContent = clock(0);
  const show = (): void => {
    if (stop.signal.aborted) return;
    bars.draw(player.analyser);
    caption.at(player.seconds);
    byId("clock").textContent = clock(player.seconds);
    byId("gaps").textContent = String(player.gaps);
    requestAnimationFrame(show);
  };
  let failure: unknown;
  try {
    if (!(await known())) return;
    for await (const piece of heard(stop.signal)) {
      if ("words" in piece) caption.add(piece.words);
      else {
        player.push(piece.pcm);
        if (document.body.dataset["mode"] === "waiting") {
          byId("first").textContent = delay(performance.now() - pressed);
          enter("speaking");
          tell("Speaking");
          show();
        }
      }
      while (player.aheadS > AHEAD_S && !stop.signal.aborted) await pause(LOOK_MS);
    }
    while (player.aheadS > 0 && !stop.signal.aborted) await pause(Math.min(LOOK_MS, 1_000 * player.aheadS + 20));
  } catch (problem) {
    if (!stop.signal.aborted) failure = problem;
  } finally {
    const stopped = stop.signal.aborted;
    stop.abort();
    await player.close();
    if (going === stop) {
      going = undefined;
      voices.sampling(undefined);
      enter("idle");
      tell(stopped ? "Stopped" : failure ? "" : "All has been said");
      if (failure) refused(failure, () => void speak(heard, sampling));
    }
  }
}

/** A sample of one voice, in place of whatever sounds. Pressed again, it stops. */
function sample(voice: Voice): void {
  const stops = document.querySelector(`[data-sample="${CSS.escape(voice.id)}"]`)?.getAttribute("aria-pressed") === "true";
  going?.abort();
  caption.clear();
  if (!stops) void speak((signal) => sampled(voice.model, voice.id, signal), voice);
}

async function remove(voice: Voice): Promise<void> {
  going?.abort();
  banner.hide();
  try {
    if (!(await deleted(voice.id))) return;
    forget(voice.model, voice.id);
    toast(`The voice ${voice.name} is deleted`);
    await voices.load();
  } catch (failure) {
    banner.error(failure, () => void remove(voice));
  }
}

/** An error of SSML is shown where it is: the place is selected, and its line stands below the text. */
function refused(failure: unknown, again: () => void): void {
  banner.error(failure, again);
  const place = ssml.checked && failure instanceof SpeechError ? placeOf(failure.message, text.value) : undefined;
  if (!place) return;
  wrong(place.line, place.column);
  text.focus();
  text.setSelectionRange(place.at, endOf(text.value, place.at));
}

/** Show a line of the text with a mark below its column; no line: none is wrong. */
function wrong(line?: number, column = 1): void {
  if (line === undefined) text.removeAttribute("aria-invalid");
  else text.setAttribute("aria-invalid", "true");
  const around = 40;
  const letters = line === undefined ? [] : [...(text.value.split("\n")[line - 1] ?? "")];
  const from = Math.max(0, column - around);
  const shown = letters.slice(from, column + around).join("");
  byId("text-problem").replaceChildren(
    ...(line === undefined
      ? []
      : [
          make("p", { class: "fine" }, `Line ${line}, column ${column}:`),
          make("pre", { "aria-hidden": "true" }, `${shown}\n${" ".repeat(column - 1 - from)}↑`),
        ]),
  );
}

async function download(): Promise<void> {
  if (!(await known())) return;
  const format = byId("format", HTMLSelectElement).value;
  const stop = new AbortController();
  going = stop;
  banner.hide();
  enter("fetching", "Making the file");
  try {
    save(`speech.${format}`, await recorded(ask(), format, stop.signal));
  } catch (failure) {
    if (stop.signal.aborted) toast("Nothing was kept");
    else refused(failure, () => void download());
  } finally {
    if (going === stop) {
      going = undefined;
      enter("idle");
    }
  }
}

function primary(): void {
  if (going) going.abort();
  else void speak((signal) => spoken(ask(), signal));
}

function told(): void {
  byId("count").textContent = count([...text.value].length, "character");
  byId("speed-told").textContent = `${Number(speed.value).toFixed(2)} ×`;
  const semitones = Number(pitch.value);
  byId("pitch-told").textContent = `${semitones > 0 ? "+" : ""}${semitones} semitones`;
}

function tell(words: string): void {
  byId("told").textContent = words;
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

const closeSheet = sheet();
themeButton();
byId("primary").addEventListener("click", primary);
new Cloning(
  (name, own) => {
    forget(voices.model, name);
    void voices.load(own ? name : undefined).catch((failure) => banner.error(failure));
  },
  () => going?.abort(),
);
ssmlHelp((example) => {
  ssml.checked = true;
  inserted(text, example);
});
text.addEventListener("input", () => wrong());
byId("download").addEventListener("click", () => void download());
for (const field of [text, speed, pitch]) field.addEventListener("input", told);
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return; // Escape closes that
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    if (!going) primary();
  } else if (event.key === "Escape") {
    if (closeSheet()) return;
    if (going) going.abort();
    else banner.hide();
  } else return;
  event.preventDefault();
});
told();
enter("idle");
void known();
