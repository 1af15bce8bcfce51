import { stem } from "../console/export";
import { facts, type Take } from "../console/take";
import { byId } from "../page/dom";
import { fileName, save } from "../page/save";
import { toast } from "../page/toast";
import { size } from "../page/words";
import { sharedPage } from "./document";

/** Larger recordings are not put into the file: browsers are slow to open it, and mail does not take it. */
const LARGEST_AUDIO_BYTES = 20e6;
const TYPE = "text/html";

/** The take that is shown, as one file for somebody else. */
export class Share {
  readonly #dialog = byId("share-dialog", HTMLDialogElement);
  readonly #audio = byId("share-audio", HTMLInputElement);
  readonly #send = byId("share-send", HTMLButtonElement);
  #take: Take | undefined;

  constructor(private readonly shown: () => Take | undefined) {
    byId("share").addEventListener("click", () => this.open());
    byId("share-cancel").addEventListener("click", () => this.#dialog.close());
    byId("share-download").addEventListener("click", () => void this.#give(async (file) => save(file.name, file)));
    this.#send.addEventListener("click", () => void this.#give((file) => navigator.share({ files: [file], title: this.#take!.title })));
  }

  /** Ask what is to be in the file. */
  open(): void {
    const take = this.shown();
    if (!take?.transcript.segments.length) return;
    this.#take = take;
    const recording = take.sound && take.source?.file;
    const fits = recording !== undefined && recording.size <= LARGEST_AUDIO_BYTES;
    this.#audio.disabled = !fits;
    this.#audio.checked = false;
    byId("share-audio-room").hidden = !recording;
    byId("share-audio-size").textContent = recording ? (fits ? size(recording.size) : `larger than ${size(LARGEST_AUDIO_BYTES)}`) : "";
    this.#send.hidden = !(navigator.canShare?.({ files: [new File([""], "transcript.html", { type: TYPE })] }) ?? false);
    this.#dialog.showModal();
  }

  async #give(by: (file: File) => Promise<void>): Promise<void> {
    const take = this.#take!;
    const { transcript, names, title, source } = take;
    try {
      const audio = this.#audio.checked && source ? await dataUrl(source.file) : undefined;
      const nonce = btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(16))));
      const made = new Date(take.savedMs ?? Date.now()).toLocaleDateString("en-GB", { day: "numeric", month: "long", year: "numeric" });
      const page = sharedPage({ title, facts: facts(take), language: transcript.language, names, segments: transcript.segments, audio, made }, nonce);
      await by(new File([page], `${fileName(stem(title)) || "transcript"}.html`, { type: TYPE }));
      this.#dialog.close();
    } catch (failure) {
      if (failure instanceof DOMException && failure.name === "AbortError") return; // thought better of it
      toast(failure instanceof DOMException && failure.name === "NotReadableError" ? "The recording cannot be read any more. Share the text without it." : "The browser did not share it. Download the file instead.");
    }
  }
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result as string));
    reader.addEventListener("error", () => reject(reader.error ?? new Error("The recording cannot be read.")));
    reader.readAsDataURL(file);
  });
}
