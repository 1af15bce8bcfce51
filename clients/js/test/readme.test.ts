/** The examples of README.md, as they stand there but for the addresses. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { chromium, inPage } from "./browser.js";
import { clip, sixteen, skip, url } from "./speech.js";

const PACKAGE = join(import.meta.dirname, "..");
const examples = [...readFileSync(join(PACKAGE, "README.md"), "utf8").matchAll(/^```js\n(.*?)^```/gms)].map(
  ([, code]) => code!.replaceAll("http://127.0.0.1:8000", url),
);
const [inBrowser, inNode] = examples;

test("in Node", { skip }, () => {
  const folder = mkdtempSync(join(PACKAGE, "build", "readme-")); // below the package: there `asr-serve` is itself
  try {
    const pcm = sixteen(clip).subarray(0, 16_000 * 8);
    const head = Buffer.alloc(44);
    writeFileSync(join(folder, "talk.wav"), Buffer.concat([head, new Uint8Array(pcm.buffer, 0, pcm.byteLength)]));
    writeFileSync(join(folder, "example.mjs"), inNode!);
    const said = execFileSync(process.execPath, ["example.mjs"], { cwd: folder, encoding: "utf8", timeout: 120_000 });
    assert.match(said, /^1\.\d It was the best of times/im);
    assert.match(said, /^1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\nIt was the best of times/im);
  } finally {
    rmSync(folder, { recursive: true });
  }
});

const PRESS = `
  for (const id of ["words", "listen"]) {
    document.body.append(Object.assign(document.createElement("button"), { id }));
  }
`;
const WATCH = `
  const shown = new Set();
  const watched = document.querySelector("#words");
  let pressed = false;
  new MutationObserver(() => {
    shown.add(watched.className);
    if (!pressed && /best of times/i.test(watched.textContent) && (pressed = true)) listen.click();
    if (/WEBVTT/.test(watched.textContent)) tell([watched.textContent, [...shown]]);
  }).observe(watched, { attributes: true, childList: true });
  listen.click();
`;

test("in a browser", { skip: skip || (chromium ? false : "there is no Chromium") }, async () => {
  const flags = [
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    `--use-file-for-fake-audio-capture=${clip}`,
  ];
  const code = PRESS + inBrowser!.replace('"asr-serve"', '"/dist/index.js"') + WATCH;
  const [text, states] = (await inPage(code, flags)) as [string, string[]];
  assert.match(text, /^WEBVTT\n\n00:00:0\d\.\d{3} --> /);
  assert.match(text.replace(/\s+/g, " "), /best of times/i); // a cue may be broken between any two words
  assert.deepEqual(states, ["connecting", "open", "closed"]);
});
