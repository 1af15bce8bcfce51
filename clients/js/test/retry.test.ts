import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { Retry } from "../dist/retry.js";

afterEach(() => {
  for (const name of ["addEventListener", "removeEventListener", "document"]) Reflect.deleteProperty(globalThis, name);
});

/** What Node does not have and a page has. */
function page(): { window: EventTarget; document: EventTarget & { visibilityState: string } } {
  const window = new EventTarget();
  const document = Object.assign(new EventTarget(), { visibilityState: "hidden" });
  Object.assign(globalThis, {
    addEventListener: window.addEventListener.bind(window),
    removeEventListener: window.removeEventListener.bind(window),
    document,
  });
  return { window, document };
}

test("attempts become rarer, none is at a fixed time, and they end", () => {
  const first = new Set<number>();
  for (let run = 0; run < 20; run++) {
    const retry = new Retry(1_000, () => assert.fail("too soon"));
    for (const most of [250, 500, 1_000, 1_000]) {
      const delay = retry.next(60_000)!;
      assert.ok(delay >= most / 2 && delay <= most, `${delay} of ${most}`);
      if (most === 250) first.add(delay);
      retry.stop();
    }
    assert.ok(retry.next(60_000, 3_000)! >= 3_000, "when the server says when");
    retry.stop();
    assert.ok(retry.next(100)! <= 100, "the last attempt is when the session ends");
    retry.stop();
    assert.equal(retry.next(0), undefined);
  }
  assert.ok(first.size > 3);
});

test("a session that goes on begins anew", () => {
  const retry = new Retry(60_000, () => {});
  for (let n = 0; n < 6; n++) retry.next(600_000);
  retry.connected();
  assert.ok(retry.next(600_000)! > 5_000, "a connection that only was there is no good one");
  retry.connected();
  retry.restored();
  assert.ok(retry.next(600_000)! <= 250);
  retry.stop();
});

test("a browser that is online again does not wait, nor a page that is looked at", () => {
  const { window, document } = page();
  let attempts = 0;
  const retry = new Retry(60_000, () => attempts++);
  const wait = (): void => {
    for (let n = 0; n < 6; n++) retry.next(600_000);
  };
  wait();
  window.dispatchEvent(new Event("online"));
  assert.equal(attempts, 1);
  window.dispatchEvent(new Event("online"));
  assert.equal(attempts, 2, "an attempt under way may hang on the old network");
  wait();
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(attempts, 2, "it was hidden");
  document.visibilityState = "visible";
  document.dispatchEvent(new Event("visibilitychange"));
  document.dispatchEvent(new Event("visibilitychange"));
  assert.equal(attempts, 3, "an attempt is under way");
  retry.connected();
  window.dispatchEvent(new Event("online"));
  assert.equal(attempts, 3, "there is a connection");
});
