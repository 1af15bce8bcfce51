import "../styles/page";
import "../styles/status.css";

import { SpeechError } from "asr-serve";
import { get } from "../page/api";
import { byId, make } from "../page/dom";
import { words } from "../page/problems";
import { themeButton } from "../page/theme";
import { CHARTS, TILES } from "./charts";
import { ChartView } from "./chartview";
import { parse, type Page } from "./prometheus";

const EVERY_MS = 2_000;
const KEPT_S = 600;
/** What is rare is counted over so long. */
const RECENT_S = 30;

const views = CHARTS.map((chart) => ({ chart, view: new ChartView(chart, KEPT_S) }));
const tiles = TILES.map((tile) => ({ tile, value: make("dd"), note: make("dd", { class: "soft fine" }) }));
const pages: { atS: number; page: Page }[] = [];
const pause = byId("pause", HTMLButtonElement);
let paused = false;
let timer: ReturnType<typeof setTimeout> | undefined;

function show(page: Page): void {
  const atS = performance.now() / 1_000;
  pages.push({ atS, page });
  while (pages.length > 2 && pages[1]!.atS < atS - RECENT_S) pages.shift();
  const recent = pages[0]!;
  for (const { chart, view } of views) view.add(atS, chart.read(page, recent.page, atS - recent.atS));
  for (const { tile, value, note } of tiles) {
    const read = tile.read(page);
    value.textContent = read.value;
    value.classList.toggle("bad", read.bad ?? false);
    note.textContent = read.note;
  }
}

async function about(): Promise<void> {
  const { version, uptime_s } = (await (await get("health")).json()) as { version: string; uptime_s: number };
  byId("about").textContent = `Version ${version}, up for ${span(uptime_s)}. Looks every ${EVERY_MS / 1_000} s.`;
}

function span(seconds: number): string {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7_200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3_600)} h` : `${Math.round(seconds / 86_400)} days`;
}

function problem(text: string): void {
  const box = byId("problem");
  if (box.textContent !== text) box.textContent = text; // said once, not every two seconds
  document.body.toggleAttribute("data-stale", text !== "");
}

async function look(): Promise<void> {
  clearTimeout(timer);
  try {
    const page = parse(await (await get("metrics")).text());
    await about();
    show(page);
    byId("measured").hidden = false; // all at once: what is there does not move
    problem("");
  } catch (failure) {
    const code = failure instanceof SpeechError ? failure.code : "";
    if (code === "no_such_route") return problem("This server does not tell its metrics: the setting `metrics` is off.");
    problem(`${words(failure)} What is shown is old; trying again.`);
    if (code === "invalid_api_key") return setPaused(true);
  }
  plan();
}

function plan(): void {
  clearTimeout(timer);
  if (!paused && !document.hidden) timer = setTimeout(() => void look(), EVERY_MS);
}

function setPaused(on: boolean): void {
  paused = on;
  pause.textContent = paused ? "Go on" : "Pause";
  if (paused) clearTimeout(timer);
  else void look();
}

byId("charts").append(...views.map(({ view }) => view.element));
byId("tiles").append(...tiles.map(({ tile, value, note }) => make("div", {}, make("dt", {}, tile.name), value, note)));
pause.addEventListener("click", () => setPaused(!paused));
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !paused) void look();
});
themeButton();
void look();
