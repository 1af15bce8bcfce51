import { make } from "../page/dom";

/** As long as a name that the server takes. */
const LONGEST = 64;

/** Let somebody write another name where `button` stands. `done`: with the name, "" for none; not where it is left
 * as it was. */
export function rename(button: HTMLElement, name: string, done: (name: string) => void): void {
  const field = make("input", {
    class: "rename",
    type: "text",
    maxlength: String(LONGEST),
    autocomplete: "off",
    spellcheck: "false",
    "aria-label": `Name of ${name}`,
  });
  field.value = name;
  let over = false;
  const end = (keep: boolean, focus: boolean): void => {
    if (over) return;
    over = true;
    const given = field.value.trim().replace(/\s+/g, " ");
    if (field.isConnected) field.replaceWith(button);
    if (focus) button.focus();
    if (keep && given !== name) done(given);
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation(); // Escape is for this alone
    end(event.key === "Enter", true);
  });
  field.addEventListener("blur", () => end(true, false));
  button.replaceWith(field);
  field.focus();
  field.select();
}
