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
import { fileName, save } from "../page/save";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { clock, count, language, size } from "../page/words";
import { rate } from "./alignment";
import { Column } from "./column";
import { compare, equalSide, wordsOf, type Comparison } from "./differences";
import { FILES, type Report } from "./report";
import { run, type Result } from "./run";
import { SideSettings } from "./settings";

const RATE_HZ = 16_000;
const LONGEST_S = 600;
const LOOK_AGAIN_MS = 3_000;
/** Texts are aligned with the reference once nobody has typed for so long. */
const TYPED_MS = 200;
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
let results: Results | undefined;
let typed: ReturnType<typeof setTimeout> | undefined;
/** What stands there before anything is chosen. */
const nothing = byId("chosen").textContent;

interface Results {
  a: Result | Error;
  b: Result | Error;
  /** A to B; undefined where one is missing. */
  between: Comparison | undefined;
  /** The text that `versus` was made with. */
  reference: string | undefined;
  /** The reference to each; undefined where there is no reference or no result. */
  versus: { a: Comparison | undefined; b: Comparison | undefined };
}

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
  showChosen();
  reference.value = said;
  byId("reference-room", HTMLDetailsElement).open = said !== "";
  results = undefined;
  byId("results").hidden = true;
  byId("state").textContent = "";
  refresh();
}

function showChosen(): void {
  byId("chosen").textContent = recording ? `${recording.name}, ${size(recording.size)}` : nothing;
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
    if (recorder !== made) return; // stopped before the browser had its answer
    byId("level").hidden = false;
    byId("record").setAttribute("aria-pressed", "true");
    byId("record-text").textContent = "Stop recording";
    setIcon(byId("record-icon", SVGUseElement), "stop");
  } catch (failure) {
    if (recorder !== made) return;
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
  if (file) choose(file);
  else {
    showChosen();
    refresh();
    if (!made.failed) toast("Nothing was recorded");
  }
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
    const between = a instanceof Error || b instanceof Error ? undefined : compare(a.words, b.words);
    results = { a, b, between, reference: undefined, versus: { a: undefined, b: undefined } };
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

/** Align each side with the reference, unless it is the one that they are aligned with. */
function alignReference(found: Results): void {
  if (found.reference === reference.value) return;
  found.reference = reference.value;
  const said = wordsOf(reference.value);
  const versus = (result: Result | Error): Comparison | undefined =>
    said.length && !(result instanceof Error) ? compare(said, result.words) : undefined;
  found.versus = { a: versus(found.a), b: versus(found.b) };
}

/** The comparison of both results; undefined where one is missing. */
function report(): Report | undefined {
  if (!recording || !results) return undefined;
  alignReference(results);
  const { a, b, between, versus } = results;
  if (a instanceof Error || b instanceof Error || !between) return undefined;
  const both = versus.a && versus.b ? { versus: { a: versus.a, b: versus.b } } : {};
  return { recording: recording.name, reference: reference.value.trim(), a, b, between, ...both };
}

function show(): void {
  clearTimeout(typed);
  if (!results) return;
  alignReference(results);
  const { a, b, between, versus } = results;
  byId("results").hidden = a instanceof Error && b instanceof Error;
  byId("download", HTMLButtonElement).disabled = byId("format", HTMLSelectElement).disabled = !between;
  const said = versus.a ?? versus.b;
  against.options[1]!.disabled = !said;
  if (!said) against.value = "other";
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
    const marked = (toReference ? versus[side]?.b : between?.[side]) ?? equalSide(result.words);
    columns[side].show(result.words, marked, toReference ? "the reference" : side === "a" ? "B" : "A");
  }
  figures(results);
  byId("summary").textContent = between ? summary(between) : "";
}

function figures({ a, b, versus }: Results): void {
  const columns = ["", "Model", "Language", "Words", "Time", "Real-time factor", "Word error rate"];
  const row = (name: "A" | "B", result: Result | Error, reference: Comparison | undefined): HTMLElement => {
    const head = make("th", { scope: "row" }, name);
    if (result instanceof Error) return make("tr", {}, head, make("td", { colspan: "6" }, told(result)));
    const cells = [
      result.model,
      result.language ? language(result.language) : "–",
      String(result.words.length),
      `${result.seconds.toFixed(2)} s`,
      `${(result.seconds / result.duration).toFixed(3)}, ${(result.duration / result.seconds).toFixed(1)} × real time`,
      reference ? `${percent(reference)} (${counts(reference)})` : "no reference",
    ];
    return make("tr", {}, head, ...cells.map((cell) => make("td", { class: "num" }, cell)));
  };
  const head = make("tr", {}, ...columns.map((name) => (name ? make("th", { scope: "col" }, name) : make("td"))));
  byId("figures").replaceChildren(
    make("caption", { class: "unseen" }, "Speed and accuracy of A and B"),
    make("thead", {}, head),
    make("tbody", {}, row("A", a, versus.a), row("B", b, versus.b)),
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
  const name = fileName(stem(whole.recording)) || "recording";
  save(`${name}-comparison.${format}`, new Blob([file.made(whole)], { type: file.type }));
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
reference.addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(show, TYPED_MS);
});
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
