import { byId, keep, recall } from "../page/dom";

export interface Shortcuts {
  /** Key, as the browser names it, in small letters -> what it does; false: nothing now, the browser may have it. */
  [key: string]: () => boolean | void;
}

const TAKES_SPACE = "button, select, a, summary, [role=menuitem]";
const TAKES_ALL = "input:not([type=range]), textarea, select, dialog, [role=menu]";

/** Single keys for the whole page, and the list of them; they can be switched off there. */
export function shortcuts(table: Shortcuts): void {
  const dialog = byId("keys-dialog", HTMLDialogElement);
  const on = byId("keys-on", HTMLInputElement);
  on.checked = recall("keys") !== "off";
  on.addEventListener("change", () => keep("keys", on.checked ? undefined : "off"));
  byId("keys").addEventListener("click", () => dialog.showModal());
  document.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.defaultPrevented) return;
    if (!(target instanceof Element) || target.closest(TAKES_ALL)) return;
    if (event.key === "?") return dialog.showModal();
    if (!on.checked && event.key !== "Escape") return;
    if (event.key === " " && target.closest(TAKES_SPACE)) return;
    if (event.key.startsWith("Arrow") && target.matches("input")) return;
    const act = table[event.key.toLowerCase()];
    if (act && act() !== false) event.preventDefault();
  });
}
