import assert from "node:assert/strict";
import { test } from "node:test";
import { Outgoing, type Command } from "../dist/outgoing.js";

/** Numbers that are the same in every run. */
function dice(seed: number): (sides: number) => number {
  return (sides) => {
    seed = (seed * 1_103_515_245 + 12_345) % 2_147_483_648;
    return Math.floor((seed / 2_147_483_648) * sides);
  };
}

/** What a server that reads the connection has: every byte once, commands where they were given. */
test("whatever is lost and when, every byte arrives once and commands stand where they stood", () => {
  for (let seed = 1; seed <= 200; seed++) {
    const roll = dice(seed);
    const out = new Outgoing(true);
    const bytes: number[] = [];
    const [commands, heard] = [new Map<string, number>(), new Map<string, Set<number>>()];
    let [received, reading]: [number[], boolean] = [[], true];
    const open: Command[] = [];
    const exchange = (most: number): void => {
      for (let n = 0; n < most; n++) {
        const data = out.take();
        if (data === undefined) return;
        if (!reading) continue; // the connection is lost, and nobody knows yet
        if (typeof data !== "string") received.push(...data);
        else if (data.includes("silence")) received.push(...new Uint8Array((JSON.parse(data) as { samples: number }).samples));
        else heard.set(data, (heard.get(data) ?? new Set()).add(received.length));
      }
    };
    for (let n = 0; n < 120; n++) {
      switch (roll(8)) {
        case 0:
        case 1: {
          const audio = Uint8Array.from({ length: roll(2_000) }, () => roll(256));
          bytes.push(...audio);
          out.put(audio);
          break;
        }
        case 2: {
          const command = out.command({ type: "flush", id: `${n}` });
          commands.set(command.json, bytes.length);
          open.push(command);
          break;
        }
        case 3:
          exchange(roll(6));
          break;
        case 4:
          reading = false;
          exchange(roll(6));
          break;
        case 5:
          if (reading) assert.ok(out.acknowledge(Math.max(out.received, received.length - roll(500))));
          break;
        case 6: {
          const samples = roll(3_000);
          bytes.push(...new Uint8Array(samples));
          out.silence(samples);
          break;
        }
        case 7: // found out, and connected again; an answer may have come
          reading = true;
          if (open.length && roll(2)) {
            const command = open.shift()!;
            if (heard.has(command.json)) out.drop(command);
          }
          assert.ok(out.resume(received.length));
      }
    }
    assert.ok(out.resume(received.length));
    reading = true;
    exchange(Infinity);
    assert.deepEqual(received, bytes, `seed ${seed}`);
    for (const [json, at] of commands) assert.deepEqual([...heard.get(json)!], [at], `seed ${seed}: ${json}`);
  }
});

test("no more is on its way than a window, and commands do not overtake audio", () => {
  const out = new Outgoing(true);
  out.put(new Uint8Array(1_000_000));
  out.command({ type: "end" });
  let sent = 0;
  for (let data = out.take(); data !== undefined; data = out.take()) sent += data.length;
  assert.ok(sent >= 256 * 1_024 && sent < 300 * 1_024, `${sent} bytes`);
  assert.ok(out.acknowledge(100_000));
  assert.equal(out.bytes, 900_000);
  assert.ok(out.take() instanceof Uint8Array);
});

test("silence is told in samples, waits for acknowledgements as audio does, and is cut where the server has part of it", () => {
  const out = new Outgoing(true, 2);
  out.put(new Uint8Array(10));
  out.silence(400_000);
  let told = 0;
  assert.ok(out.take() instanceof Uint8Array);
  for (let data = out.take(); data !== undefined; data = out.take()) {
    told += (JSON.parse(data as string) as { samples: number }).samples;
  }
  assert.ok(2 * told >= 256 * 1_024 && 2 * told < 300 * 1_024, `${told} samples`);
  assert.ok(out.resume(10 + 2 * 1_000));
  assert.deepEqual(JSON.parse(out.take() as string), { type: "silence", samples: 16_384 - 1_000 });
  assert.equal(out.bytes, 2 * 399_000);
});

test("what is acknowledged and not durable is kept, within a limit, for a server that does not have it", () => {
  const out = new Outgoing(true, 2, 1_000);
  const audio = Uint8Array.from({ length: 600 }, (_, n) => n % 251);
  const sent = (): number[] => {
    const found: number[] = [];
    for (let data = out.take(); data !== undefined; data = out.take()) {
      if (typeof data !== "string") found.push(...data);
      else found.push(...new Uint8Array(2 * ((JSON.parse(data) as { samples?: number }).samples ?? 0)));
    }
    return found;
  };
  out.put(audio);
  const flush = out.command({ type: "flush", id: "a" });
  out.silence(100);
  const all = [...audio, ...new Uint8Array(200)];
  assert.deepEqual(sent(), all);
  assert.ok(out.acknowledge(200));
  assert.ok(out.acknowledge(700, false));
  assert.equal(out.bytes, 100);
  assert.ok(!out.resume(199)); // that was durable
  assert.ok(out.resume(300));
  assert.ok(flush.again);
  assert.deepEqual(sent(), all.slice(300));
  assert.ok(out.acknowledge(800, false));
  out.put(new Uint8Array(700));
  sent();
  assert.ok(out.acknowledge(1_500, false));
  assert.ok(out.dropped >= 300 && out.dropped <= 700, `${out.dropped}`);
  assert.ok(out.resume(out.dropped));
  assert.equal(sent().length, 1_500 - out.dropped);
  assert.ok(out.acknowledge(1_500));
  assert.equal(out.dropped, 1_500);
});

test("packets are not cut; a server cannot have what was never sent", () => {
  const out = new Outgoing(false);
  out.put(new Uint8Array(100_000));
  assert.equal(out.take()?.length, 100_000);
  assert.ok(!out.acknowledge(100_001));
  assert.ok(out.acknowledge(100_000));
  assert.ok(!out.acknowledge(99_999));
});
