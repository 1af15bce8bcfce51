import "../styles/page";
import "../styles/cards.css";
import "../styles/batches.css";

import { SpeechError } from "asr-serve";
import { get } from "../page/api";
import { byId } from "../page/dom";
import { forEach } from "../page/pool";
import { words } from "../page/problems";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { isOpen, type Batch } from "./batch";
import { BatchView } from "./batchview";
import { Create } from "./create";

const PAGE = 50;
/** Requests for older batches at a time. */
const AT_ONCE = 3;
/** Between two looks, while a batch runs. */
const LOOK_MS = 2_000;
/** The same, while the server does not answer. */
const LOOK_AGAIN_MS = 5_000;
const OFF = "This server keeps no batches. Whoever runs it can turn them on with the setting batch.enabled.";

interface Page {
  data: Batch[];
  has_more: boolean;
}

const views = new Map<string, BatchView>();
let timer: ReturnType<typeof setTimeout> | undefined;
let again: () => void = () => void look();
/** Whether the problem that is shown is that the list could not be had. */
let lost = false;
/** Whether to ask again by itself, because the server did not answer. */
let waits = false;

const create = new Create(
  (batch, told) => {
    hush();
    show([batch]);
    if (told) toast(told);
    plan();
  },
  (failure, about = "", retry) => {
    const full = failure instanceof SpeechError && failure.code === "at_capacity";
    const said = full ? "Too many batches have not ended. Try again when one has." : words(failure);
    complain(about ? `${about}: ${said}` : said, retry);
  },
);

/** Ask for the newest batches, and for the open ones among the older. */
async function look(): Promise<void> {
  clearTimeout(timer);
  try {
    const page = (await (await get(`v1/batches?limit=${PAGE}`)).json()) as Page;
    const known = new Set(page.data.map(({ id }) => id));
    const older = [...views.values()].filter(({ batch }) => isOpen(batch) && !known.has(batch.id));
    const first = !views.size;
    await forEach(older, AT_ONCE, ask);
    show(page.data);
    if (first) byId("older").hidden = !page.has_more;
    if (!create.known) {
      await create.load();
      byId("teach").hidden = false;
    }
    if (lost) hush();
    waits = false;
    plan();
  } catch (failure) {
    lost = true;
    if (failure instanceof SpeechError && failure.code === "no_such_route") return off();
    waits = failure instanceof SpeechError && failure.code !== "invalid_api_key";
    complain(words(failure), () => void look());
    if (waits) plan();
  }
}

/** Ask for one batch. One that the server does not have, or not for this key, leaves the list. */
async function ask(view: BatchView): Promise<void> {
  const { id } = view.batch;
  try {
    show([(await (await get(`v1/batches/${id}`)).json()) as Batch]);
  } catch (failure) {
    if (!(failure instanceof SpeechError && failure.code === "unknown_batch")) throw failure;
    views.delete(id);
    if (view.element.contains(document.activeElement)) byId("main").focus();
    view.element.remove();
  }
}

async function older(): Promise<void> {
  const last = [...views.values()].reduce((a, b) => (a.batch.created_at <= b.batch.created_at ? a : b));
  const button = byId("older", HTMLButtonElement);
  button.disabled = true;
  try {
    const page = (await (await get(`v1/batches?limit=${PAGE}&after=${last.batch.id}`)).json()) as Page;
    show(page.data);
    button.hidden = !page.has_more;
  } catch (failure) {
    toast(words(failure));
  }
  button.disabled = false;
}

/** Batches as they are now, known ones and new ones. */
function show(batches: readonly Batch[]): void {
  for (const batch of batches) {
    const known = views.get(batch.id);
    if (known) known.update(batch);
    else {
      const view = new BatchView(batch, (changed) => (show([changed]), plan()), tell);
      views.set(batch.id, view);
      place(view);
    }
  }
  byId("list-room").hidden = !views.size;
}

/** The newest first. */
function place({ element, batch }: BatchView): void {
  const list = byId("list");
  const after = [...views.values()]
    .filter((view) => view.element.parentElement === list && view.batch.created_at < batch.created_at)
    .sort((a, b) => b.batch.created_at - a.batch.created_at)[0];
  list.insertBefore(element, after?.element ?? null);
}

/** Look again while something runs, or the server does not answer, and somebody sees it. */
function plan(): void {
  clearTimeout(timer);
  const open = [...views.values()].some(({ batch }) => isOpen(batch));
  if ((open || waits) && document.visibilityState === "visible") timer = setTimeout(() => void look(), waits ? LOOK_AGAIN_MS : LOOK_MS);
}

function off(): void {
  complain(OFF);
  byId("create").hidden = byId("list-room").hidden = byId("teach").hidden = true;
}

function complain(text: string, retry?: () => void): void {
  again = retry ?? (() => {});
  if (byId("problem").textContent !== text) byId("problem").textContent = text; // once for screen readers
  byId("again").hidden = !retry;
  byId("notice").hidden = false;
}

function hush(): void {
  lost = false;
  byId("problem").textContent = "";
  byId("notice").hidden = true;
}

function tell(text: string): void {
  byId("told").textContent = text;
}

for (const room of document.querySelectorAll(".server")) room.textContent = new URL("./", document.baseURI).href.replace(/\/$/, "");
byId("again").addEventListener("click", () => {
  const act = again;
  hush();
  byId("main").focus();
  act();
});
byId("older").addEventListener("click", () => void older());
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && (waits || !byId("list-room").hidden)) void look();
});
themeButton();
void look();
