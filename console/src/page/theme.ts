import { byId, keep, recall, setIcon } from "./dom";

const CHOICES = [
  { name: "auto", icon: "auto", told: "Colours: as the system" },
  { name: "light", icon: "sun", told: "Colours: light" },
  { name: "dark", icon: "moon", told: "Colours: dark" },
] as const;

const changed = new EventTarget();

/** The button that goes round system, light, dark. Returns what it does. */
export function themeButton(): () => void {
  const button = byId("theme", HTMLButtonElement);
  const use = button.querySelector("use")!;
  let at = Math.max(0, CHOICES.findIndex((choice) => choice.name === recall("theme")));
  const show = (): void => {
    const choice = CHOICES[at]!;
    if (choice.name === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = choice.name;
    setIcon(use, choice.icon);
    button.setAttribute("aria-label", choice.told);
    button.title = choice.told;
    changed.dispatchEvent(new Event("change"));
  };
  const next = (): void => {
    at = (at + 1) % CHOICES.length;
    keep("theme", at === 0 ? undefined : CHOICES[at]!.name);
    show();
  };
  button.addEventListener("click", next);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
  return next;
}

/** For drawings, which do not follow by themselves. */
export function onTheme(listener: () => void): void {
  changed.addEventListener("change", listener);
}
