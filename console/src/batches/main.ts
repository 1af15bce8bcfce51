import "../styles/page";
import "../styles/cards.css";
import "../styles/batches.css";

import { SpeechError } from "asr-serve";
import { get } from "../page/api";
import { byId } from "../page/dom";
import { words } from "../page/problems";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { isOpen, type Batch } from "./batch";
import { BatchView } from "./batchview";
import { Create } from "./create";

const PAGE = 50;
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

const create = new Create(
  (batch) => {
    hush();
    show([batch]);
    tell("The batch is in the queue");
    toast("Started. You may close this page.");
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
    const others = await Promise.all(older.map(async ({ batch }) => (await (await get(`v1/batches/${batch.id}`)).json()) as Batch));
    const first = !views.size;
    show([...page.data, ...others]);
    if (first) byId("older").hidden = !page.has_more;
    if (!create.known) {
      await create.load();
      byId("teach").hidden = false;
    }
    if (lost) hush();
    plan();
  } catch (failure) {
    lost = true;
    if (failure instanceof SpeechError && failure.code === "no_such_route") return off();
    const waits = failure instanceof SpeechError && failure.code !== "invalid_api_key";
    complain(words(failure), () => void look());
    if (waits) timer = setTimeout(() => void look(), LOOK_AGAIN_MS);
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

/** Look again while something runs and somebody sees it. */
function plan(): void {
  clearTimeout(timer);
  const open = [...views.values()].some(({ batch }) => isOpen(batch));
  if (open && document.visibilityState === "visible") timer = setTimeout(() => void look(), LOOK_MS);
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
  if (document.visibilityState === "visible" && !byId("list-room").hidden) void look();
});
themeButton();
void look();
