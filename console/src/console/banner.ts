import { byId } from "../page/dom";
import { passing, words } from "../page/problems";

/** What can be done about it. */
interface Act {
  label: string;
  run(): void;
}

/** The one place where the console says that something is wrong, or being waited for. */
export class Banner {
  readonly #box = byId("banner");
  readonly #text = byId("banner-text");
  readonly #act = byId("banner-act", HTMLButtonElement);
  #run: (() => void) | undefined;
  #timer: ReturnType<typeof setInterval> | undefined;

  constructor() {
    byId("banner-close").addEventListener("click", () => this.#leave());
    this.#act.addEventListener("click", () => {
      const run = this.#run;
      this.#leave();
      run?.();
    });
  }

  /** `wait`: it is being seen to. */
  show(text: string, kind: "bad" | "wait" = "bad", act?: Act): void {
    this.hide();
    this.#box.dataset["kind"] = kind;
    this.#box.hidden = false;
    this.#text.textContent = text;
    this.#act.hidden = !act;
    this.#act.disabled = false;
    this.#act.textContent = act?.label ?? "";
    this.#run = act?.run;
  }

  /** An error, of the file `about`; `again` is offered where the same may work later, once the server is ready for it. */
  error(error: unknown, again?: () => void, about = ""): void {
    const offer = again && passing(error) ? { label: "Try again", run: again } : undefined;
    const said = words(error);
    this.show(about ? `${about}: ${said[0]!.toLowerCase()}${said.slice(1)}` : said, "bad", offer);
    if (offer) this.#countDown((passing(error) && error.retryAfterMs) || 0);
  }

  hide(): void {
    clearInterval(this.#timer);
    this.#box.hidden = true;
    this.#text.textContent = "";
    this.#run = undefined;
  }

  /** Its buttons go; the focus has to stay somewhere. */
  #leave(): void {
    this.hide();
    byId("primary").focus();
  }

  #countDown(ms: number): void {
    const end = performance.now() + ms;
    const show = (): void => {
      const left = Math.ceil((end - performance.now()) / 1_000);
      this.#act.disabled = left > 0;
      this.#act.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left <= 0) clearInterval(this.#timer);
    };
    this.#timer = setInterval(show, 250);
    show();
  }
}
