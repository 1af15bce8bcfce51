import { byId } from "../page/dom";
import { onDrop } from "../page/drop";
import { toast } from "../page/toast";

/** Recordings dropped anywhere on the page, or chosen. Returns what opens the browser's chooser. */
export function files(open: (file: File) => void): () => void {
  const input = byId("file", HTMLInputElement);
  const first = (files: FileList | null | undefined): void => {
    const file = files?.[0];
    if (!file) return;
    if (files.length > 1) toast(`One at a time: this is ${file.name}`);
    open(file);
  };
  onDrop(
    () => true,
    ({ items, files: dropped }) => {
      if (items[0]?.webkitGetAsEntry()?.isDirectory) toast("This is a folder: drop a recording");
      else first(dropped);
    },
  );
  input.addEventListener("change", () => {
    first(input.files);
    input.value = "";
  });
  const browse = (): void => input.click();
  for (const button of document.querySelectorAll("#browse, #invite-open")) button.addEventListener("click", browse);
  return browse;
}
