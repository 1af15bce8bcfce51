/** `1:02:03`, `0:07`. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3_600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n: number): string => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** `240 ms`, `1.24 s`. */
export function delay(ms: number): string {
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1_000).toFixed(2)} s`;
}

/** `12.4 MB`. */
export function size(bytes: number): string {
  if (bytes < 1e6) return `${Math.max(1, Math.round(bytes / 1e3))} kB`;
  return bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`;
}

const LANGUAGES = new Intl.DisplayNames(["en"], { type: "language", fallback: "code" });

/** `en` -> `English`. */
export function language(code: string): string {
  try {
    return LANGUAGES.of(code) ?? code;
  } catch {
    return code; // no code that the browser knows
  }
}

export function count(n: number, one: string): string {
  return `${n} ${one}${n === 1 ? "" : "s"}`;
}
