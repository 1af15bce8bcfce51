import { make } from "./dom";

const KEPT = "asr-serve.key";
let held: string | undefined;
let asking: Promise<string | undefined> | undefined;

/** The key somebody gave in this tab, or for all tabs of this browser. */
export function key(): string | undefined {
  try {
    return held ?? sessionStorage.getItem(KEPT) ?? localStorage.getItem(KEPT) ?? undefined;
  } catch {
    return held;
  }
}

/** Whether the key stays when the tab is closed. */
export function isRemembered(): boolean {
  try {
    return localStorage.getItem(KEPT) !== null;
  } catch {
    return false;
  }
}

/** Use this key. `remember`: in all tabs of this browser, until it is forgotten. */
export function keepKey(value: string, remember = isRemembered()): void {
  held = value;
  try {
    sessionStorage.setItem(KEPT, value);
    if (remember) localStorage.setItem(KEPT, value);
    else localStorage.removeItem(KEPT);
  } catch {
    // then it lasts as long as the page
  }
}

export function forgetKey(): void {
  held = undefined;
  try {
    sessionStorage.removeItem(KEPT);
    localStorage.removeItem(KEPT);
  } catch {
    // nothing was kept
  }
}

/** Ask for a key; undefined: not now. Whoever asks meanwhile gets the same answer. `wrong`: the last one was. */
export function askForKey(wrong: boolean): Promise<string | undefined> {
  asking ??= show(wrong).finally(() => (asking = undefined));
  return asking;
}

function show(wrong: boolean): Promise<string | undefined> {
  const field = make("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: "",
    "aria-describedby": "key-problem",
  });
  const problem = make("p", { class: "problem", id: "key-problem", role: "alert" });
  const later = make("button", { class: "plain", type: "button" }, "Not now");
  const form = make(
    "form",
    { method: "dialog" },
    make("h2", { id: "key-title" }, "This server asks for a key"),
    make(
      "p",
      { class: "soft" },
      "Whoever runs it can give you one. It is kept in this tab, and forgotten when the tab is closed, unless you have it remembered on the page Key.",
    ),
    make("label", { for: "key" }, "Key"),
    field,
    problem,
    make("div", { class: "actions" }, later, make("button", { class: "strong", type: "submit" }, "Continue")),
  );
  const dialog = make("dialog", { "aria-labelledby": "key-title" }, form);
  return new Promise((resolve) => {
    let given: string | undefined;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      given = field.value.trim();
      if (given) dialog.close();
    });
    later.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (given) keepKey(given);
      resolve(given);
    });
    document.body.append(dialog);
    dialog.showModal();
    if (wrong) problem.textContent = "The server does not know that key.";
  });
}
