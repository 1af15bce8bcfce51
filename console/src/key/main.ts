import "../styles/page";
import "../styles/cards.css";
import "../styles/key.css";

import { SpeechError } from "asr-serve";
import { address, authorization, refusal } from "../page/api";
import { byId, make } from "../page/dom";
import { Gauge } from "../page/gauge";
import { forgetKey, isRemembered, keepKey, key } from "../page/key";
import { words } from "../page/problems";
import { themeButton } from "../page/theme";
import { toast } from "../page/toast";
import { size } from "../page/words";
import { ANONYMOUS, limits, newKey, permissions, type KeyStatus } from "./limits";

/** Between two looks, while somebody sees the page. */
const LOOK_MS = 5_000;

const field = byId("key-field", HTMLInputElement);
const remember = byId("remember", HTMLInputElement);
const gauges = new Map<string, { gauge: Gauge | undefined; text: HTMLElement }>();
let timer: ReturnType<typeof setTimeout> | undefined;

/** GET with the key, which is not asked for: this page has a field for it. Rejects with SpeechError. */
async function ask<T>(route: string): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(address(route), { headers: authorization(), cache: "no-store" });
  } catch (cause) {
    throw new SpeechError("connection_failed", "The server does not answer.", { cause });
  }
  if (!answer.ok) throw refusal(answer.status, await answer.text(), answer.headers.get("retry-after-ms"));
  return (await answer.json()) as T;
}

async function look(): Promise<void> {
  clearTimeout(timer);
  try {
    const status = await ask<KeyStatus>("v1/key");
    show(status);
    if (status.admin) showAll((await ask<{ data: KeyStatus[] }>("v1/keys")).data, status.name);
    byId("all").hidden = !status.admin;
    byId("new").hidden = !status.admin && status.name !== ANONYMOUS;
    byId("notice").hidden = true;
  } catch (failure) {
    if (failure instanceof SpeechError && failure.code === "invalid_api_key") return refused();
    setText(byId("problem"), words(failure));
    byId("notice").hidden = false;
  }
  if (document.visibilityState === "visible") timer = setTimeout(() => void look(), LOOK_MS);
}

function show(status: KeyStatus): void {
  const open = status.name === ANONYMOUS;
  const held = key();
  markUnknown(open && held !== undefined); // it answers without keys, and is asked with one that is none of its own
  byId("form").hidden = false;
  byId("forget").hidden = held === undefined;
  byId("state").replaceChildren(
    ...(open
      ? ["This server asks for no key. All who use it without one share the limits below. If it has admin keys, one of them allows more."]
      : ["The key ending in ", make("code", {}, held!.slice(-4)), ` is used ${isRemembered() ? "in all tabs of this browser" : "in this tab, and forgotten when it is closed"}. The server’s logs name it `, make("code", {}, status.name), "."]),
  );
  byId("may-title").textContent = open ? "What anybody may do" : "What it may do";
  byId("may-list").replaceChildren(
    ...permissions(status).map(({ text, allowed }) => {
      const mark = make("span", { class: "mark", "aria-hidden": "true" }, allowed ? "✓" : "–");
      return make("li", { class: allowed ? "allowed" : "soft" }, mark, allowed ? "" : make("span", { class: "unseen" }, "Not allowed: "), text);
    }),
  );
  for (const { name, text, share, level } of limits(status)) {
    const row = gauges.get(name) ?? newRow(name, share !== undefined);
    row.text.textContent = text;
    row.gauge?.set(share ?? 0, text);
    if (row.gauge) row.gauge.element.dataset["level"] = level;
  }
  byId("may").hidden = byId("limits").hidden = false;
}

function newRow(name: string, limited: boolean): { gauge: Gauge | undefined; text: HTMLElement } {
  const row = { gauge: limited ? new Gauge("meter", name) : undefined, text: make("dd", { class: "num" }) };
  byId("limits-list").append(make("div", {}, make("dt", {}, name), row.text, ...(row.gauge ? [make("dd", {}, row.gauge.element)] : [])));
  gauges.set(name, row);
  return row;
}

function showAll(all: readonly KeyStatus[], own: string): void {
  const cell = (text: string): HTMLElement => make("td", { class: "num" }, text);
  byId("all-rows").replaceChildren(
    ...all.map(({ name, admin, concurrent, requests_per_minute: rate, batches }) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, name, name === own ? make("span", { class: "soft" }, " (this one)") : ""),
        make("td", {}, admin ? "Admin" : "API"),
        cell(String(concurrent.used)),
        cell(rate ? String(rate.used) : "–"),
        cell(batches ? batches.files.used.toLocaleString("en") : "–"),
        cell(batches ? (batches.bytes.used ? size(batches.bytes.used) : "0") : "–"),
        cell(batches ? String(batches.open_batches.used) : "–"),
      ),
    ),
  );
}

/** There is no key, or the server does not know it. */
function refused(): void {
  const held = key();
  byId("state").textContent = held === undefined ? "This server asks for a key. Whoever runs it can give you one." : "The server refuses the key of this browser.";
  markUnknown(held !== undefined);
  byId("notice").hidden = true;
  byId("form").hidden = false;
  byId("forget").hidden = held === undefined;
  for (const id of ["may", "limits", "all", "new"]) byId(id).hidden = true;
  if (held !== undefined) field.focus();
}

/** Say, or say no more, that the key of this browser is none of the server's. */
function markUnknown(unknown: boolean): void {
  setText(byId("key-problem"), unknown ? "The server does not know this key." : "");
  if (unknown) field.setAttribute("aria-invalid", "true");
  else field.removeAttribute("aria-invalid");
}

/** Once for screen readers, however often the page looks. */
function setText(alert: HTMLElement, text: string): void {
  if (alert.textContent !== text) alert.textContent = text;
}

function made(admin: boolean): void {
  const setting = admin ? "admin_keys_file" : "api_keys_file";
  const file = admin ? "admin-keys.txt" : "api-keys.txt";
  byId("made-label").textContent = `The new ${admin ? "admin" : "API"} key, which is shown this once`;
  byId("made-key", HTMLInputElement).value = newKey();
  byId("snippet").textContent = `asr-serve serve --set ${setting}=${file}`;
  byId("made").hidden = false;
  byId("copy").focus();
}

async function copy(): Promise<void> {
  const shown = byId("made-key", HTMLInputElement);
  shown.select();
  try {
    await navigator.clipboard.writeText(shown.value);
    toast("Copied");
  } catch {
    toast("The browser does not let this page copy: the key is selected, copy it by hand");
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = field.value.trim();
  if (given) keepKey(given, remember.checked);
  else if (key() !== undefined) keepKey(key()!, remember.checked); // the switch alone was changed
  else return field.focus();
  field.value = "";
  void look();
});
byId("forget").addEventListener("click", () => {
  forgetKey();
  remember.checked = false;
  field.value = "";
  byId("main").focus();
  void look();
  toast("Forgotten");
});
byId("make-api").addEventListener("click", () => made(false));
byId("make-admin").addEventListener("click", () => made(true));
byId("copy").addEventListener("click", () => void copy());
byId("again").addEventListener("click", () => void look());
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") void look();
});
remember.checked = isRemembered();
themeButton();
void look();
