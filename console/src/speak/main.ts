import "../styles/page";
import "../styles/console.css";
import "../styles/paper.css";
import "../styles/rail.css";
import "../styles/dock.css";
import "../styles/speak.css";

import { Banner } from "../console/banner";
import { sheet } from "../console/sheet";
import { byId, make, setIcon } from "../page/dom";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { clock, count, delay } from "../page/words";
import { Bars } from "./bars";
import { Caption } from "./caption";
import { Player } from "./player";
import { recorded, spoken, type Ask } from "./request";
import { Voices } from "./voices";

/** So much is taken ahead of what is heard; then the server is left waiting. */
const AHEAD_S = 30;
const LOOK_MS = 250;
const SAMPLE = "I read whatever you write. Shall we begin?";

const banner = new Banner();
const voices = new Voices();
const caption = new Caption();
const bars = new Bars();
const text = byId("text", HTMLTextAreaElement);
const [speed, pitch] = [byId("speed", HTMLInputElement), byId("pitch", HTMLInputElement)];
const ssml = byId("ssml", HTMLInputElement);
let going: AbortController | undefined;

function ask(input: string, marked = ssml.checked): Ask {
  const { model, voice } = voices;
  return { input, model, voice, speed: Number(speed.value), pitch: Number(pitch.value), ssml: marked };
}

function enter(mode: "idle" | "waiting" | "speaking" | "fetching", hint = ""): void {
  document.body.dataset["mode"] = mode;
  const idle = mode === "idle";
  setIcon(byId("primary-icon"), idle ? "play" : "stop");
  byId("primary").setAttribute("aria-label", idle ? "Speak" : "Stop");
  byId("hint").textContent = idle ? "Ready when you are" : hint;
  for (const id of ["sample", "download"]) byId(id, HTMLButtonElement).disabled = !idle;
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

async function speak(asked: () => Ask): Promise<void> {
  const pressed = performance.now();
  const player = new Player(); // now: a browser lets a page sound that was just asked to
  const stop = new AbortController();
  going = stop;
  banner.hide();
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
    for await (const heard of spoken(asked(), stop.signal)) {
      if ("words" in heard) caption.add(heard.words);
      else {
        player.push(heard.pcm);
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
      enter("idle");
      tell(stopped ? "Stopped" : failure ? "" : "All has been said");
      if (failure) banner.error(failure, () => void speak(asked));
    }
  }
}

async function download(): Promise<void> {
  if (!(await known())) return;
  const format = byId("format", HTMLSelectElement).value;
  const stop = new AbortController();
  going = stop;
  banner.hide();
  enter("fetching", "Making the file");
  try {
    const url = URL.createObjectURL(await recorded(ask(text.value), format, stop.signal));
    make("a", { href: url, download: `speech.${format}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } catch (failure) {
    if (stop.signal.aborted) toast("Nothing was kept");
    else banner.error(failure, () => void download());
  } finally {
    going = undefined;
    enter("idle");
  }
}

function primary(): void {
  if (going) going.abort();
  else void speak(() => ask(text.value));
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
byId("sample").addEventListener("click", () => void speak(() => ask(SAMPLE, false)));
byId("download").addEventListener("click", () => void download());
for (const field of [text, speed, pitch]) field.addEventListener("input", told);
document.addEventListener("keydown", (event) => {
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
