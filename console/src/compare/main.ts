import "../styles/page";
import "../styles/console.css";
import "../styles/paper.css";
import "../styles/dock.css";
import "../styles/compare.css";

import { SpeechError } from "asr-serve";
import { Banner } from "../console/banner";
import { files } from "../console/drop";
import { stem } from "../console/export";
import { Meter } from "../console/level";
import { request, models } from "../page/api";
import { byId, make, setIcon } from "../page/dom";
import { words as told } from "../page/problems";
import { Recorder } from "../page/recorder";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { clock, count, language, size } from "../page/words";
import { rate } from "./alignment";
import { Column } from "./column";
import { compare, wordsOf, type Comparison } from "./differences";
import { FILES, type Report } from "./report";
import { run, type Result } from "./run";
import { SideSettings } from "./settings";

const RATE_HZ = 16_000;
const LONGEST_S = 600;
const LOOK_AGAIN_MS = 3_000;
/** The beginning of Dickens's novel, which is read in the demo clip. */
const DEMO_TEXT =
  "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the " +
  "epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the " +
  "spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were all going " +
  "direct to Heaven, we were all going direct the other way – in short, the period was so far like the present period, that " +
  "some of its noisiest authorities insisted on its being received, for good or for evil, in the superlative degree of " +
  "comparison only.";

const banner = new Banner();
const meter = new Meter();
const sides = { a: new SideSettings("a"), b: new SideSettings("b") };
const player = byId("player", HTMLAudioElement);
const columns = { a: new Column("text-a", play), b: new Column("text-b", play) };
const reference = byId("reference", HTMLTextAreaElement);
const against = byId("against", HTMLSelectElement);
const primary = byId("primary", HTMLButtonElement);
let recording: File | undefined;
let recorder: Recorder | undefined;
let going: AbortController | undefined;
let results: { a: Result | Error; b: Result | Error } | undefined;

function play(seconds: number): void {
  player.currentTime = seconds;
  void player.play().catch(() => undefined); // paused before it began: nothing is wrong
}

/** Buttons and fields as what goes on allows. */
function refresh(): void {
  const busy = going !== undefined;
  document.body.dataset["mode"] = busy ? "running" : recorder ? "recording" : "idle";
  for (const id of ["browse", "demo"]) byId(id, HTMLButtonElement).disabled = busy || recorder !== undefined;
  byId("record", HTMLButtonElement).disabled = busy;
  for (const side of Object.values(sides)) side.enable(!busy);
  primary.textContent = busy ? "Stop" : "Compare";
  primary.disabled = !busy && (!recording || recorder !== undefined || !sides.a.settings.model);
}

function choose(file: File, said = ""): void {
  if (going || recorder) return toast("One thing at a time: stop this first.");
  banner.hide();
  recording = file;
  if (player.src) URL.revokeObjectURL(player.src);
  player.src = URL.createObjectURL(file);
  byId("chosen").textContent = `${file.name}, ${size(file.size)}`;
  reference.value = said;
  byId("reference-room", HTMLDetailsElement).open = said !== "";
  results = undefined;
  byId("results").hidden = true;
  byId("state").textContent = "";
  refresh();
}

async function takeDemo(): Promise<void> {
  banner.hide();
  try {
    const clip = await (await request("assets/two_cities.wav", { cache: "default" })).blob();
    choose(new File([clip], "two_cities.wav", { type: "audio/wav" }), DEMO_TEXT);
  } catch (failure) {
    if (failure instanceof SpeechError && failure.code !== "connection_failed") {
      banner.show("This server has no demo clip: its package moonshine-voice is missing. Open a recording, or make one.");
    } else banner.error(failure, () => void takeDemo());
  }
}

async function record(): Promise<void> {
  if (recorder) return endRecording();
  banner.hide();
  const made = new Recorder(RATE_HZ, LONGEST_S, (peak, seconds) => {
    meter.level(peak);
    byId("chosen").textContent = `Recording, ${clock(seconds)}`;
  }, () => void endRecording());
  recorder = made;
  refresh();
  try {
    await made.start();
    byId("level").hidden = false;
    byId("record").setAttribute("aria-pressed", "true");
    byId("record-text").textContent = "Stop recording";
    setIcon(byId("record-icon", SVGUseElement), "stop");
  } catch (failure) {
    recorder = undefined;
    refresh();
    banner.error(failure);
  }
}

async function endRecording(): Promise<void> {
  const made = recorder;
  if (!made) return;
  const file = await made.stop(`recording-${new Date().toISOString().slice(0, 19).replace(/[T:]/g, "-")}.wav`);
  if (recorder !== made) return;
  recorder = undefined;
  meter.rest();
  byId("level").hidden = true;
  byId("record").setAttribute("aria-pressed", "false");
  byId("record-text").textContent = "Record";
  setIcon(byId("record-icon", SVGUseElement), "mic");
  choose(file);
  if (made.failed) banner.error(made.failed);
}

async function start(): Promise<void> {
  const file = recording;
  if (!file) return;
  banner.hide();
  const stop = new AbortController();
  going = stop;
  refresh();
  /** One after the other, so that neither takes the other's time. What fails leaves the other's result. */
  const one = async (side: "a" | "b"): Promise<Result | Error> => {
    const { settings } = sides[side];
    byId("state").textContent = `${side.toUpperCase()} listens: ${settings.model}`;
    try {
      return await run(file, settings, stop.signal);
    } catch (failure) {
      if (stop.signal.aborted) throw failure;
      return failure as Error;
    }
  };
  try {
    const [a, b] = [await one("a"), await one("b")];
    results = { a, b };
    const bad = [a, b].filter((result) => result instanceof Error);
    byId("state").textContent = bad.length ? "" : "Done";
    if (bad[0]) banner.error(bad[0], () => void start());
    show();
    if (bad.length < 2) byId("results-title").focus();
  } catch (failure) {
    byId("state").textContent = "";
    if (stop.signal.aborted) toast("Stopped");
    else throw failure;
  } finally {
    going = undefined;
    refresh();
  }
}

/** The comparison of both results; undefined where one is missing. */
function report(): Report | undefined {
  if (!recording || !results || results.a instanceof Error || results.b instanceof Error) return undefined;
  const { a, b } = results;
  const said = wordsOf(reference.value);
  const versus = said.length ? { versus: { a: compare(said, a.words), b: compare(said, b.words) } } : {};
  return { recording: recording.name, reference: reference.value.trim(), a, b, between: compare(a.words, b.words), ...versus };
}

function show(): void {
  if (!results) return;
  const whole = report();
  const { a, b } = results;
  byId("results").hidden = a instanceof Error && b instanceof Error;
  byId("download", HTMLButtonElement).disabled = byId("format", HTMLSelectElement).disabled = !whole;
  const said = wordsOf(reference.value);
  against.options[1]!.disabled = !said.length;
  if (!said.length) against.value = "other";
  const toReference = against.value === "reference";
  for (const side of ["a", "b"] as const) {
    const result = results[side];
    const title = byId(`text-${side}-title`);
    if (result instanceof Error) {
      title.textContent = `${side.toUpperCase()}: ${sides[side].settings.model}`;
      columns[side].clear(told(result));
      continue;
    }
    title.textContent = `${side.toUpperCase()}: ${result.model}`;
    const alone = compare(result.words, result.words)[side];
    const marked = toReference ? compare(said, result.words).b : (whole?.between[side] ?? alone);
    columns[side].show(result.words, marked, toReference ? "the reference" : side === "a" ? "B" : "A");
  }
  figures(a, b, whole);
  byId("summary").textContent = whole ? summary(whole.between) : "";
}

function figures(a: Result | Error, b: Result | Error, whole: Report | undefined): void {
  const columns = ["", "Model", "Language", "Words", "Time", "Real-time factor", "Word error rate"];
  const row = (name: "A" | "B", result: Result | Error, versus: Comparison | undefined): HTMLElement => {
    const head = make("th", { scope: "row" }, name);
    if (result instanceof Error) return make("tr", {}, head, make("td", { colspan: "6" }, told(result)));
    const cells = [
      result.model,
      result.language ? language(result.language) : "–",
      String(result.words.length),
      `${result.seconds.toFixed(2)} s`,
      `${(result.seconds / result.duration).toFixed(3)}, ${(result.duration / result.seconds).toFixed(1)} × real time`,
      versus ? `${percent(versus)} (${counts(versus)})` : "no reference",
    ];
    return make("tr", {}, head, ...cells.map((cell) => make("td", { class: "num" }, cell)));
  };
  const head = make("tr", {}, ...columns.map((name) => (name ? make("th", { scope: "col" }, name) : make("td"))));
  byId("figures").replaceChildren(
    make("caption", { class: "unseen" }, "Speed and accuracy of A and B"),
    make("thead", {}, head),
    make("tbody", {}, row("A", a, whole?.versus?.a), row("B", b, whole?.versus?.b)),
  );
}

function percent({ errors }: Comparison): string {
  const found = rate(errors);
  return found === undefined ? "–" : `${found.toFixed(1)} %`;
}

function counts({ errors: { substitutions, deletions, insertions } }: Comparison): string {
  return `${substitutions} replaced, ${deletions} missing, ${insertions} added`;
}

function summary(between: Comparison): string {
  const { substitutions, deletions, insertions } = between.errors;
  if (substitutions + deletions + insertions === 0) return "A and B agree in every word.";
  return `B differs from A in ${percent(between)} of A's words: ${counts(between)}. ${count(between.errors.reference, "word")} in A.`;
}

function download(): void {
  const whole = report();
  const format = byId("format", HTMLSelectElement).value;
  const file = FILES[format];
  if (!whole || !file) return;
  const url = URL.createObjectURL(new Blob([file.made(whole)], { type: file.type }));
  const name = stem(whole.recording).replace(/[^\p{L}\p{N}._-]+/gu, "-") || "recording";
  make("a", { href: url, download: `${name}-comparison.${format}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function load(): Promise<void> {
  try {
    const found = await models();
    sides.a.know(found, 0);
    sides.b.know(found, 1);
    refresh();
    if (found.some(({ state }) => state === "loading" || state === "restarting")) setTimeout(() => void load(), LOOK_AGAIN_MS);
  } catch (failure) {
    banner.error(failure, () => void load());
  }
}

/** Words are marked while they are heard. */
function follow(): void {
  const seconds = player.paused ? undefined : player.currentTime;
  for (const column of Object.values(columns)) column.at(seconds);
  if (!player.paused) requestAnimationFrame(follow);
}

themeButton();
files((file) => choose(file));
byId("demo").addEventListener("click", () => void takeDemo());
byId("record").addEventListener("click", () => void record());
primary.addEventListener("click", () => (going ? going.abort() : void start()));
byId("download").addEventListener("click", download);
reference.addEventListener("input", show);
against.addEventListener("change", show);
for (const event of ["play", "pause", "ended", "seeked"]) player.addEventListener(event, follow);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (going) going.abort();
  else if (recorder) void endRecording();
  else banner.hide();
});
refresh();
void load();
