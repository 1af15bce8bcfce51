import "../styles/page";
import "../styles/cards.css";
import "../styles/switch.css";
import "../styles/history.css";

import { Transcript } from "asr-serve";
import { archivePaths } from "../batches/answers";
import { FORMS, withNames } from "../forms/forms";
import { confirm } from "../page/confirm";
import { byId, make } from "../page/dom";
import { Gauge } from "../page/gauge";
import { save } from "../page/save";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { clock, count, language, size } from "../page/words";
import { zip } from "../page/zip";
import { hits, marked, terms } from "./search";
import { all, keeps, MOST_BYTES, remove, removeAll, setKeeps, watchKeeps, type Saved } from "./store";

const SHOWN_AT_ONCE = 50;
/** Places that are shown of one transcript. */
const MOST_PLACES = 3;
const SEARCH_AFTER_MS = 120;
const REFUSED = "This browser does not let the page store anything, so there is no history.";
const NOT_DELETED = "The browser did not delete it. Load the page again, then try again.";

const query = byId("query", HTMLInputElement);
const gauge = new Gauge("meter", "Room that is used");
let saved: Saved[] = [];
let shown = 0;
let found: { each: Saved; places: number[] }[] = [];
let timer: ReturnType<typeof setTimeout> | undefined;

async function load(): Promise<void> {
  try {
    const kept = await all();
    saved = kept.saved;
    const used = `${count(saved.length, "transcript")}, ${size(kept.bytes)} of at most ${size(MOST_BYTES)}`;
    byId("size").textContent = used;
    gauge.set(kept.bytes / MOST_BYTES, used);
    byId("notice").hidden = true;
  } catch {
    byId("problem").textContent = REFUSED;
    byId("notice").hidden = false;
    saved = [];
  }
  byId("kept").hidden = byId("search-room").hidden = !saved.length;
  search();
}

function search(): void {
  const wanted = terms(query.value);
  found = saved.flatMap((each) => {
    const places = wanted.length ? hits(each, wanted) : [];
    return places ? [{ each, places }] : [];
  });
  shown = 0;
  byId("list").replaceChildren();
  show(wanted);
  byId("found").textContent = wanted.length && saved.length ? `${found.length ? found.length : "No"} of ${count(saved.length, "transcript")}` : "";
  const none = byId("none");
  none.hidden = found.length > 0;
  none.textContent = saved.length
    ? "Nothing that is kept has all of these words."
    : keeps()
      ? "Nothing is kept yet. What you transcribe in the console comes here."
      : "Nothing is kept. Switch it on above, and what you transcribe in the console comes here.";
}

function show(wanted: readonly string[]): void {
  const next = found.slice(shown, shown + SHOWN_AT_ONCE).map(({ each, places }) => card(each, places, wanted));
  byId("list").append(...next);
  shown += next.length;
  const more = byId("more");
  more.hidden = shown >= found.length;
  more.textContent = `Show ${Math.min(SHOWN_AT_ONCE, found.length - shown)} more`;
  more.onclick = () => {
    show(wanted);
    next[0]?.querySelector("a")?.focus();
  };
}

function card(each: Saved, places: readonly number[], wanted: readonly string[]): HTMLElement {
  const open = make("a", { href: link(each) }, ...marks(each.title, wanted));
  const facts = [moment(each.savedMs), clock(each.duration), each.language && language(each.language), each.model];
  const item = make("li", { class: "card saved" });
  const buttons = make(
    "p",
    { class: "saved-buttons" },
    button("Download", `Download ${each.title}`, () => save(`${archivePaths([each.title], [".txt"])[0]!}`, new Blob([text(each)], { type: "text/plain" }))),
    button("Delete", `Delete ${each.title}`, () => void forget(each, item)),
  );
  const snippets = (places.length ? places.slice(0, MOST_PLACES) : [0]).flatMap((n) => {
    const segment = each.segments[n];
    if (!segment) return [];
    const said = make("span", {}, ...marks(segment.text, wanted));
    if (!places.length) return [make("p", { class: "snippet" }, said)];
    const at = clock(segment.start);
    const place = make("a", { class: "num", href: `${link(each)}&at=${segment.start}`, "aria-label": `Open at ${at}` }, at);
    return [make("p", { class: "snippet" }, place, " ", said)];
  });
  const others = places.length - MOST_PLACES;
  if (others > 0) snippets.push(make("p", { class: "soft fine" }, `and ${count(others, "more place")}`));
  item.append(make("div", { class: "saved-head" }, make("h2", {}, open), buttons), make("p", { class: "soft fine num" }, facts.filter(Boolean).join(" · ")), ...snippets);
  return item;
}

async function forget(each: Saved, item: HTMLElement): Promise<void> {
  if (!(await confirm(`Delete ${each.title}?`, "It is in this browser alone, and cannot be had back.", "Delete"))) return;
  const after = item.nextElementSibling ?? item.previousElementSibling;
  try {
    await remove(each.id);
  } catch {
    return toast(NOT_DELETED);
  }
  const at = after && [...byId("list").children].indexOf(after) - (after === item.nextElementSibling ? 1 : 0);
  await load();
  const next = at === null ? undefined : byId("list").children[at]?.querySelector("a");
  (next ?? query).focus();
  toast("Deleted");
}

function marks(text: string, wanted: readonly string[]): (Node | string)[] {
  if (!wanted.length) return [text];
  return marked(text, wanted).map((part) => (part.hit ? make("mark", {}, part.text) : part.text));
}

function link({ id }: Saved): string {
  return `./#saved=${encodeURIComponent(id)}`;
}

function button(name: string, label: string, act: () => void): HTMLElement {
  const made = make("button", { class: "plain", type: "button", "aria-label": label }, name);
  made.addEventListener("click", act);
  return made;
}

function transcript({ segments, model, language: code, duration, names }: Saved): Transcript {
  const made = Object.assign(new Transcript(), { segments, model, language: code, duration });
  return withNames(made, new Map(names));
}

function text(each: Saved): string {
  return FORMS["txt"]!.made({ key: each.title, transcript: transcript(each), languageScore: each.languageScore });
}

/** All of them as one archive: the text of each, and beside it all that is known. */
function exportAll(): void {
  const titles = saved.map(({ title }) => title);
  const paths = archivePaths(titles, titles.map(() => ""));
  const files = saved.flatMap((each, n) => {
    const given = { key: each.title, transcript: transcript(each), languageScore: each.languageScore };
    return [".txt", ".json"].map((suffix) => ({ path: paths[n]! + suffix, text: FORMS[suffix.slice(1)]!.made(given) }));
  });
  save("transcripts.zip", zip(files, new Date()));
}

function moment(ms: number): string {
  return new Date(ms).toLocaleString("en-GB", { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" });
}

function hint(): void {
  byId("keep-hint").textContent = keeps()
    ? `New transcripts are kept, up to ${size(MOST_BYTES)}; then the oldest go.`
    : "Nothing new is kept. What is here already stays until you delete it.";
}

const keeping = byId("keep-history", HTMLInputElement);
keeping.checked = keeps();
keeping.addEventListener("change", () => {
  setKeeps(keeping.checked);
  hint();
  search();
});
byId("size").after(gauge.element);
query.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, SEARCH_AFTER_MS);
});
byId("export").addEventListener("click", exportAll);
byId("delete-all").addEventListener("click", () => {
  const what = count(saved.length, "transcript");
  void confirm(`Delete ${what}?`, "They are in this browser alone, and cannot be had back.", "Delete all").then(async (yes) => {
    if (!yes) return;
    try {
      await removeAll();
    } catch {
      return toast(NOT_DELETED);
    }
    query.value = "";
    await load();
    keeping.focus();
    toast(`Deleted ${what}`);
  });
});
watchKeeps(() => {
  keeping.checked = keeps();
  hint();
  void load(); // another tab may have changed what is kept, too
});
themeButton();
hint();
void load();
