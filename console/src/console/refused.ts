import { SpeechError } from "asr-serve";
import { askForKey } from "../page/key";
import type { Banner } from "./banner";

/** Say why something was not done; where only a key is missing, ask for it and do it again.
 * `about`: the file. */
export async function refused(failure: unknown, banner: Banner, again: () => void, about?: string): Promise<void> {
  const needsKey = failure instanceof SpeechError && failure.code === "invalid_api_key";
  if (needsKey && (await askForKey(false)) !== undefined) again();
  else banner.error(failure, again, about);
}
