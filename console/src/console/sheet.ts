import { byId } from "../page/dom";

/** On narrow screens the settings lie in a sheet. Returns what closes it; false: it was not open. */
export function sheet(): () => boolean {
  const button = byId("settings");
  const rail = byId("rail");
  const show = (open: boolean): void => {
    rail.classList.toggle("shown", open);
    button.setAttribute("aria-expanded", String(open));
    if (open) (rail.querySelector<HTMLElement>("[aria-invalid]") ?? rail.querySelector("select"))?.focus();
  };
  const close = (): boolean => {
    const open = rail.classList.contains("shown");
    show(false);
    if (open) button.focus();
    return open;
  };
  button.addEventListener("click", () => show(!rail.classList.contains("shown")));
  rail.addEventListener("keydown", (event) => {
    const own = event.target instanceof HTMLSelectElement; // whose list it may close
    if (event.key === "Escape" && !own && close()) event.stopPropagation();
  });
  document.addEventListener("pointerdown", ({ target }) => {
    if (target instanceof Node && !rail.contains(target) && !button.contains(target)) show(false);
  });
  return close;
}
