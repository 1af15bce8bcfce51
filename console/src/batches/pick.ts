/** A recording, and its path below what was chosen. */
export interface Picked {
  path: string;
  file: File;
}

/** Suffixes that browsers know no type for. */
const SUFFIXES = /\.(aac|ac3|aiff?|amr|ape|au|caf|dts|flac|gsm|m4[abv]|mka|mkv|mov|mp[234]|mpeg|mts|oga|ogg|ogv|opus|ra|sph|ts|voc|wav|wave|webm|wma|wmv|wv|3gp)$/i;

/** Files that a field holds. */
export function fromField(files: FileList | null): Picked[] {
  return [...(files ?? [])].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
}

/** Files and folders that were dropped, and all that is in them. To be called before the event is over. */
export async function fromDrop(data: DataTransfer | null): Promise<Picked[]> {
  const entries = [...(data?.items ?? [])].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const found: Picked[] = [];
  for (const entry of entries) await walk(entry, "", found);
  return found;
}

async function walk(entry: FileSystemEntry, above: string, found: Picked[]): Promise<void> {
  const path = above + entry.name;
  if (entry.isFile) {
    const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject));
    found.push({ path, file });
    return;
  }
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return; // it tells a hundred or so at a time
    for (const each of some) await walk(each, `${path}/`, found);
  }
}

/** What may be a recording; others in a folder are notes, pictures, lists. */
export function isRecording({ path, file }: Picked): boolean {
  return /^(audio|video)\//.test(file.type) || SUFFIXES.test(path);
}
