import assert from "node:assert/strict";
import { test } from "node:test";
import { limits, newKey, permissions, type KeyStatus } from "../src/key/limits";

const status: KeyStatus = {
  name: "key-1",
  admin: false,
  concurrent: { used: 2, limit: null },
  requests_per_minute: { used: 60, limit: 60 },
  batches: { bytes: { used: 9e6, limit: 10e6 }, files: { used: 1_200, limit: 200_000 }, open_batches: { used: 0, limit: 100 } },
};

test("limits are told with their use, and warn before they are reached", () => {
  assert.deepEqual(
    limits(status).map(({ text, level }) => [text, level]),
    [
      ["2, no limit", "low"],
      ["60 of 60", "full"],
      ["1,200 of 200,000", "low"],
      ["9.0 MB of 10.0 MB", "high"],
      ["0 of 100", "low"],
    ],
  );
  assert.equal(limits({ ...status, requests_per_minute: null, batches: null }).length, 1);
});

test("what a key may do follows from what the server tells", () => {
  const allowed = (each: KeyStatus): boolean[] => permissions(each).map((may) => may.allowed);
  assert.deepEqual(allowed(status), [true, true, true, false, false]);
  assert.deepEqual(allowed({ ...status, admin: true, batches: null }), [true, true, false, true, true]);
});

test("a new key is one that the settings take, and never the same", () => {
  const keys = Array.from({ length: 50 }, newKey);
  assert.equal(new Set(keys).size, 50);
  for (const key of keys) assert.match(key, /^asr_[0-9a-f]{64}$/);
});
