import assert from "node:assert/strict";
import { test } from "node:test";
import { sharedPage, type Shared } from "../src/share/document";

const shared: Shared = {
  title: `<img src=x onerror="alert(1)">`,
  facts: "0:04 · 'two' & more",
  language: `en" onload="x`,
  names: new Map([["SPEAKER_00", "<b>Ada</b>"]]),
  segments: [
    { index: 0, start: 0, end: 2, text: " </span><script>alert(2)</script>\u0000 ", speaker: "SPEAKER_00" },
    { index: 1, start: 2, end: 4, text: "Again.", speaker: "SPEAKER_00" },
  ],
  audio: undefined,
  made: "27 November 2026",
};

test("no text is markup", () => {
  const page = sharedPage(shared, "n0nce");
  assert(!/<(img|script|b>Ada)/.test(page));
  assert(!page.includes('onload="'));
  assert(!page.includes("\u0000"));
  assert(page.includes("&lt;/span&gt;&lt;script&gt;alert(2)&lt;/script&gt;"));
  assert(page.includes("<title>&lt;img src=x onerror=&quot;alert(1)&quot;&gt;</title>"));
  assert.equal(page.match(/class="who/g)?.length, 1); // once, where the speaker changes
});

test("without sound there is no script, and the policy allows none", () => {
  const page = sharedPage(shared, "n0nce");
  assert(page.includes(`content="default-src 'none'; style-src 'nonce-n0nce'; base-uri 'none'; form-action 'none'"`));
  assert(!page.includes("<audio"));
  assert(!page.includes("<button"));
});

test("with sound there is the one script, and nothing is loaded from elsewhere", () => {
  const page = sharedPage({ ...shared, audio: "data:audio/wav;base64,AAAA" }, "n0nce");
  assert.equal(page.match(/<script/g)?.length, 1);
  assert(page.includes(`script-src 'nonce-n0nce'; media-src data:`));
  assert(page.includes(`<audio controls preload="metadata" src="data:audio/wav;base64,AAAA">`));
  assert(!/https?:|\/\/[a-z]|url\(|@import/.test(page.replace(/^\/\/ .*$/gm, "")));
});
