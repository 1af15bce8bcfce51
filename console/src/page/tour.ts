import { keep, make, recall } from "./dom";

/** What a first visitor is shown, a step at a time. */
const STEPS = [
  {
    title: "Transcribe a recording",
    text: "Drop an audio or video file anywhere on this page, or open one. The text comes while the rest is still being heard.",
    target: "#invite-open",
  },
  {
    title: "Talk, and read along",
    text: "Press the round button, or Space, and talk. Grey words may still change; dark ones are settled. Press again to stop.",
    target: "#primary",
  },
  {
    title: "Have a text spoken",
    text: "On the page Speak a voice reads what you write. There you can hear all voices, and clone your own.",
    target: 'nav a[href="./speak"]',
  },
] as const;

/** Show the tour at a first visit, and whenever the returned function is called. */
export function tour(): () => void {
  if (recall("tour") === undefined) requestAnimationFrame(show);
  return show;
}

function show(): void {
  if (document.querySelector("dialog[open]")) return; // a key is asked for, say
  const before = document.activeElement;
  const title = make("h2", { id: "tour-title", tabindex: "-1" });
  const text = make("p", { id: "tour-text" });
  const place = make("p", { class: "soft fine num", id: "tour-place" });
  const [skip, back, next] = ["Skip", "Back", "Next"].map((name) => make("button", { class: "plain", type: "button" }, name));
  next!.className = "strong";
  const dialog = make(
    "dialog",
    { class: "tour", "aria-labelledby": "tour-title", "aria-describedby": "tour-text" },
    place,
    title,
    text,
    make("div", { class: "actions" }, skip!, back!, next!),
  );
  let at = 0;
  const mark = (on: boolean): void => {
    document.querySelector(STEPS[at]!.target)?.toggleAttribute("data-tour", on);
  };
  const go = (to: number): void => {
    mark(false);
    at = to;
    mark(true);
    place.textContent = `Step ${at + 1} of ${STEPS.length}`;
    title.textContent = STEPS[at]!.title;
    text.textContent = STEPS[at]!.text;
    back!.hidden = at === 0;
    next!.textContent = at === STEPS.length - 1 ? "Done" : "Next";
    title.focus(); // screen readers read the step
  };
  skip!.addEventListener("click", () => dialog.close());
  back!.addEventListener("click", () => go(at - 1));
  next!.addEventListener("click", () => (at === STEPS.length - 1 ? dialog.close() : go(at + 1)));
  dialog.addEventListener("close", () => {
    mark(false);
    keep("tour", "seen");
    dialog.remove();
    if (before instanceof HTMLElement && before !== document.body) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  go(0);
}
