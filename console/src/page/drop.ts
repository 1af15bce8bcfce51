import { byId } from "./dom";

/** Files dropped anywhere on the page, while `takes`; meanwhile #drop lies over it. */
export function onDrop(takes: () => boolean, dropped: (data: DataTransfer) => void): void {
  const veil = byId("drop");
  const holdsFiles = ({ dataTransfer }: DragEvent): boolean => (dataTransfer?.types.includes("Files") ?? false) && takes();
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
    dropped(event.dataTransfer!);
  });
}
