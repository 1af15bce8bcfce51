import assert from "node:assert/strict";
import { test } from "node:test";
import { forEach } from "../src/page/pool";

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

test("all items are worked on once, and no more at a time than is allowed", async () => {
  const done: number[] = [];
  let [now, most] = [0, 0];
  await forEach([0, 1, 2, 3, 4, 5, 6], 3, async (n) => {
    most = Math.max(most, ++now);
    await turn();
    done.push(n);
    now--;
  });
  assert.deepEqual(done, [0, 1, 2, 3, 4, 5, 6]);
  assert.equal(most, 3);
  await forEach([], 3, () => Promise.reject(new Error("there is nothing to do")));
});

test("after a failure nothing is begun, and what was begun is waited for", async () => {
  const [begun, ended]: [number[], number[]] = [[], []];
  const work = async (n: number): Promise<void> => {
    begun.push(n);
    if (n === 1) throw new Error("the second");
    await turn();
    ended.push(n);
  };
  await assert.rejects(forEach([0, 1, 2, 3, 4, 5], 3, work), /the second/);
  assert.deepEqual(begun, [0, 1, 2]);
  assert.deepEqual(ended, [0, 2]);
});
