import { make } from "./dom";

/** Ask before something that cannot be undone. Resolves to whether it is to be done. */
export function confirm(title: string, text: string, verb: string): Promise<boolean> {
  const no = make("button", { class: "plain", type: "button" }, "Leave it");
  const form = make(
    "form",
    { method: "dialog" },
    make("h2", { id: "confirm-title" }, title),
    make("p", { class: "soft" }, text),
    make("div", { class: "actions" }, no, make("button", { class: "strong", type: "submit", value: "yes" }, verb)),
  );
  const dialog = make("dialog", { "aria-labelledby": "confirm-title" }, form);
  return new Promise((resolve) => {
    no.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
    no.focus();
  });
}
