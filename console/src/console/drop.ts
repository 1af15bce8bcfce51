import { byId } from "../page/dom";
import { toast } from "../page/toast";

/** Recordings dropped anywhere on the page, or chosen. Returns what opens the browser's chooser. */
export function files(open: (file: File) => void): () => void {
  const veil = byId("drop");
  const input = byId("file", HTMLInputElement);
  const first = (files: FileList | null | undefined): void => {
    const file = files?.[0];
    if (!file) return;
    if (files.length > 1) toast(`One at a time: this is ${file.name}`);
    open(file);
  };
  const holdsFiles = (event: DragEvent): boolean => event.dataTransfer?.types.includes("Files") ?? false;
  let depth = 0; // each element entered is left again
  addEventListener("dragenter", (event) => {
    if (holdsFiles(event)) veil.hidden = ++depth === 0;
  });
  addEventListener("dragleave", (event) => {
    if (holdsFiles(event)) veil.hidden = --depth <= 0;
  });
  addEventListener("dragover", (event) => {
    if (holdsFiles(event)) event.preventDefault();
  });
  addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    const folder = event.dataTransfer?.items[0]?.webkitGetAsEntry()?.isDirectory;
    if (folder) toast("This is a folder: drop a recording");
    else first(event.dataTransfer?.files);
  });
  input.addEventListener("change", () => {
    first(input.files);
    input.value = "";
  });
  const browse = (): void => input.click();
  for (const button of document.querySelectorAll("#browse, #invite-open")) button.addEventListener("click", browse);
  return browse;
}
