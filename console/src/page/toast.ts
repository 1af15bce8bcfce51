import { byId, make } from "./dom";

const SHOWN_MS = 4_000;

/** A short word at the bottom of the page, which screen readers tell too. */
export function toast(text: string): void {
  const shown = make("p", { class: "toast" }, text);
  const room = byId("toasts");
  while (room.childElementCount > 1) room.firstElementChild?.remove();
  room.append(shown);
  setTimeout(() => shown.remove(), SHOWN_MS);
}
