import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { SpeechError, SpeechStream, type Segment, type StreamOptions, type StreamState } from "asr-serve";
import { Network } from "./proxy.js";
import { clip, letGo, pause, sixteen, skip, url, WebSocket } from "./speech.js";

const SECONDS = 14;
const FRAME_S = 0.1;
/** Where a flush stands: in seconds, between words and inside one. */
const FLUSHES_S = [3.3, 7.7];

/** Everything numbered that came, and what a person would call the result. */
interface Run {
  seqs: number[];
  segments: Segment[];
  turns: [string, number][];
  flushed: [string, number][];
  states: StreamState[];
}

describe("with a server", { skip, timeout: 240_000 }, () => {
  let network: Network;
  let frames: Int16Array[];
  let whole: Run;

  before(async () => {
    network = await Network.to(url);
    const pcm = sixteen(clip);
    const step = 16_000 * FRAME_S;
    frames = Array.from({ length: SECONDS / FRAME_S }, (_, n) => pcm.subarray(n * step, (n + 1) * step));
    whole = await run(() => {});
  });
  after(() => network?.close());

  function stream(options: Partial<StreamOptions> = {}): SpeechStream {
    return new SpeechStream({ url: network.url, WebSocket, ...options });
  }

  /** All of the speech. `trouble` is called before each frame. */
  async function run(
    trouble: (frame: number) => void | Promise<void>,
    options: Partial<StreamOptions> = {},
    watch: (made: SpeechStream) => void = () => {},
  ): Promise<Run> {
    const made = stream(options);
    watch(made);
    const found: Run = { seqs: [], segments: [], turns: [], flushed: [], states: [] };
    for (const type of ["locked", "segment", "turn", "flushed", "end"] as const) {
      made.on(type, ({ seq }) => found.seqs.push(seq));
    }
    made.on("turn", ({ state, position_s }) => found.turns.push([state, position_s]));
    made.on("state", (state) => found.states.push(state));
    await made.open();
    const flushes: Promise<{ id: string; position_s: number }>[] = [];
    for (const [n, frame] of frames.entries()) {
      await trouble(n);
      if (FLUSHES_S.some((at) => Math.round(at / FRAME_S) === n)) flushes.push(made.flush(`at ${n}`));
      while (!made.send(frame)) await made.room();
    }
    const transcript = await made.end();
    found.turns.sort(([a, x], [b, y]) => a.localeCompare(b) || x - y); // `ended` comes when the text does
    found.segments = transcript.segments;
    found.flushed = (await Promise.all(flushes)).map(({ id, position_s }) => [id, position_s]);
    assert.equal(transcript.text, transcript.segments.map(({ text }) => text).join(" "));
    assert.equal(transcript.duration, SECONDS);
    return found;
  }

  test("silence as a count is heard as zeros: the same words and times, also over a connection that was cut", async () => {
    const half = frames.slice(0, 50);
    const said = async (pause: (made: SpeechStream) => void, cut: boolean): Promise<Segment[]> => {
      const made = stream();
      await made.open();
      for (const part of [0, 1]) {
        for (const frame of half) while (!made.send(frame)) await made.room();
        pause(made);
        if (cut && !part) network.cut();
      }
      const { segments, duration } = await made.end();
      assert.equal(duration, 2 * (5 + 3));
      return segments;
    };
    const zeros = await said((made) => assert.ok(made.send(new Int16Array(48_000))), false);
    assert.ok(zeros.length >= 2);
    assert.deepEqual(await said((made) => assert.ok(made.sendSilence(48_000)), false), zeros);
    assert.deepEqual(await said((made) => assert.ok(made.sendSilence(48_000)), true), zeros);
    const opus = stream({ encoding: "opus" });
    assert.throws(() => opus.sendSilence(160), (error) => (error as SpeechError).code === "bad_audio");
    assert.throws(() => stream().sendSilence(1.5), (error) => (error as SpeechError).code === "bad_audio");
  });

  /** The same words and times, and every event once, in order. */
  function same(found: Run): void {
    assert.deepEqual(found.segments, whole.segments);
    assert.deepEqual(found.turns, whole.turns);
    assert.deepEqual(found.flushed, whole.flushed);
    assert.deepEqual(found.seqs, found.seqs.map((_, n) => n + 1));
    assert.equal(found.states.at(-1), "closed");
  }

  test("an undisturbed run", () => {
    const text = whole.segments.map(({ text }) => text).join(" ");
    assert.match(text, /best of times.*worst of times/i);
    assert.deepEqual(whole.states, ["connecting", "open", "closed"]);
    assert.deepEqual(whole.flushed.map(([, at]) => at), FLUSHES_S);
    same(whole);
  });

  test("connections cut at random moments", async () => {
    for (let seed = 1; seed <= 2; seed++) {
      let cuts = 0;
      const found = await run(async (n) => {
        await pause(20); // five times as fast as speech
        if (chance(seed, n) < 0.05) {
          cuts++;
          network.cut();
          network.down = chance(seed, -n) < 0.5; // and is not to be had for a while
          setTimeout(() => (network.down = false), 400);
        }
      });
      assert.ok(cuts >= 2 && found.states.includes("reconnecting"), `seed ${seed}: ${cuts} cuts`);
      same(found);
    }
  });

  test("cut again and again from the first byte to the last", async () => {
    let [cuts, got, lifeMs] = [0, -1, 0];
    let timer: ReturnType<typeof setTimeout> | undefined;
    const found = run(
      async (n) => {
        do await pause(10);
        while (cuts < n / 20);
      },
      { reconnect: { maxDelayMs: 250, giveUpAfterMs: 240_000 } },
      (made) => {
        made.on("session", ({ received_bytes, last_seq }) => {
          // Each connection that brought nothing is followed by one that lives twice as long: a slow server gets on.
          lifeMs = received_bytes + last_seq > got ? 300 * chance(9, cuts) : 2 * lifeMs + 10;
          got = received_bytes + last_seq;
          timer = setTimeout(() => {
            cuts++;
            network.cut();
          }, lifeMs);
        });
      },
    );
    same(await found.finally(() => clearTimeout(timer)));
  });

  test("cut while a flush and the end are under way: each is answered once", async () => {
    const runs = new Set<string>();
    for (const ms of [0, 5, 20, 80]) {
      const made = stream();
      const [seen, turns]: string[][] = [[], []];
      made.on("flushed", ({ id }) => seen!.push(id));
      made.on("turn", ({ state, position_s }) => turns!.push(`${state} ${position_s}`));
      made.on("error", (error) => assert.fail(error));
      await made.open();
      for (const frame of frames.slice(0, 40)) made.send(frame);
      const flushed = made.flush("one");
      await pause(ms);
      network.cut();
      assert.equal((await flushed).position_s, 4);
      for (const frame of frames.slice(40, 60)) made.send(frame);
      const last = made.flush("two");
      const end = made.end();
      await pause(ms);
      network.cut();
      assert.equal((await end).duration, 6);
      assert.equal((await last).position_s, 6);
      assert.deepEqual(seen, ["one", "two"]);
      runs.add(JSON.stringify([made.transcript.segments, turns!.sort()]));
    }
    assert.equal(runs.size, 1, [...runs].join("\n"));
  });

  test("a connection that is only silent is replaced", async () => {
    const before = network.connections;
    const why: (string | undefined)[] = [];
    const found = await run(
      async (n) => {
        await pause(n < 60 ? 5 : 60);
        if (n === 60) network.stall();
      },
      { reconnect: { silenceMs: 3_000 } },
      (made) => made.on("state", (state, { reason }) => state === "reconnecting" && why.push(reason)),
    );
    assert.ok(network.connections - before >= 2);
    assert.equal(why[0], "silent for 3000 ms");
    same(found);
  });

  test("while there is no network audio is kept, as much as was allowed, and flushes wait", async () => {
    const made = stream({ maxBufferedBytes: 512 << 10 });
    await made.open();
    const lost = new Promise((resolve) => made.on("state", (state) => state === "reconnecting" && resolve(null)));
    network.down = true;
    network.cut();
    await lost;
    let taken = 0;
    while (made.send(frames[taken % frames.length]!)) taken++;
    assert.ok(made.bufferedBytes <= 512 << 10 && made.bufferedBytes > 480 << 10, `${made.bufferedBytes} bytes`);
    const flushed = made.flush();
    network.down = false;
    await made.room();
    assert.ok(made.send(frames[0]!));
    assert.equal((await flushed).position_s, Number((taken * FRAME_S).toFixed(7)));
    made.close();
  });

  test("whoever does not come back in time is told", async () => {
    const made = stream({ reconnect: { giveUpAfterMs: 700 } });
    const errors: SpeechError[] = [];
    made.on("error", (error) => errors.push(error));
    await made.open();
    made.send(frames[0]!);
    network.down = true;
    network.cut();
    await assert.rejects(made.end(), { name: "SpeechError", code: "connection_lost" });
    network.down = false;
    assert.deepEqual([made.state, errors.map(({ code }) => code)], ["failed", ["connection_lost"]]);
    assert.equal(made.send(frames[0]!), false);
    await assert.rejects(made.room(), { code: "closed" });
  });

  test("a refusal says why", async () => {
    await assert.rejects(stream({ model: "nobody" }).open(), { name: "SpeechError", code: "model_not_found" });
    await assert.rejects(stream({ rate: 1 }).open(), { code: "option_error" });
    const nowhere = new SpeechStream({ url: "http://127.0.0.1:9", WebSocket });
    await assert.rejects(nowhere.open(), { code: "connection_failed" });
    assert.equal(nowhere.state, "failed");
  });

  test("options mean what they mean to the server", async () => {
    const made = stream({
      ...{ model: "moonshine-tiny-en", language: "en", encoding: "mulaw", rate: 8_000, apiKey: "none" },
      ...{ turn: "silence", eagerThreshold: 0.5, threshold: 0.4, partialMs: 500, maxSegmentMs: 8_000 },
      silenceSchedule: "5000:1500,inf:300",
    });
    const session = await made.open();
    assert.deepEqual([session.encoding, session.rate_hz, session.language], ["mulaw", 8_000, "en"]);
    assert.equal(session.session_id, made.sessionId);
    made.close();
    await assert.rejects(stream({ turnThreshold: 0.5 }).open(), { code: "unsupported_option" });
  });

  test("whoever says how many speak wants to know who", async () => {
    const made = stream({ numSpeakers: 1 });
    await made.open();
    for (const frame of frames) made.send(frame);
    const { segments } = await made.end();
    assert.ok(segments.length > 0);
    assert.deepEqual([...new Set(segments.map(({ speaker }) => speaker))], ["SPEAKER_00"]);
    await assert.rejects(stream({ numSpeakers: 0 }).open(), { code: "option_error", message: /num_speakers/ });
    const crossed = { minSpeakers: 3, maxSpeakers: 2 };
    await assert.rejects(stream(crossed).open(), { code: "option_error", message: /min_speakers.*max_speakers/ });
  });

  test("a list too long for an address is the first message, of a new session alone", async () => {
    const hotwords = Array.from({ length: 400 }, (_, n) => `Babbage ${"ABCDEFGHIJ"[n % 10]}${n}:1.5`).join(",");
    const addresses: URL[] = [];
    const Noted = class extends WebSocket {
      constructor(address: string) {
        super(address);
        addresses.push(new URL(address));
      }
    };
    const options = { hotwords, partialMs: 500, WebSocket: Noted };
    const undisturbed = await run(() => {}, options);
    const found = await run((n) => void (n === 60 && network.cut()), options);
    assert.ok(found.states.includes("reconnecting"));
    assert.deepEqual([found.segments, found.turns], [undisturbed.segments, undisturbed.turns]);
    const begun = addresses.filter((each) => !each.searchParams.has("session"));
    assert.deepEqual(begun.map((each) => each.search), Array(2).fill("?partial_ms=500&start=true"));
    assert.ok(addresses.every((each) => each.searchParams.has("session") !== each.searchParams.has("start")));
    const wrong = stream({ hotwords: `${hotwords},Ada:99`, WebSocket: Noted });
    await assert.rejects(wrong.open(), { code: "option_error", message: /Ada:99/ });
  });

  test("one connection at a time: the older one is told, and does not fight", async () => {
    const made = stream();
    const session = await made.open();
    const failed = new Promise<SpeechError>((resolve) => made.on("error", resolve));
    assert.equal(await firstWord(session.session_id, 1000), "session");
    assert.equal((await failed).code, "taken_over");
  });

  test("hanging up drops the session, and whoever waits is told", async () => {
    const made = stream();
    const session = await made.open();
    made.send(frames[0]!);
    made.close();
    assert.equal(made.state, "closed");
    await assert.rejects(made.end(), { code: "closed" });
    assert.match(await letGo(url, session.session_id), /ended by its client/);
    assert.equal(await firstWord(session.session_id), "session_expired");
    const other = stream();
    const opening = other.open();
    other.close();
    await assert.rejects(opening, { code: "closed" });
    const third = stream();
    await third.open();
    const waiting = [third.flush("mine"), third.flush("mine"), third.end()];
    third.close();
    assert.equal(waiting[0], waiting[1], "the same flush");
    for (const each of waiting) await assert.rejects(each, { code: "closed" });
  });

  test("Float32Array and bytes are the same audio", async () => {
    const bytes = await heard(frames.slice(0, 30));
    const floats = await heard(frames.slice(0, 30).map((frame) => Float32Array.from(frame, (x) => x / 32_768)));
    assert.deepEqual(floats, bytes);
  });

  async function heard(audio: ArrayBufferView[]): Promise<Segment[]> {
    const made = stream();
    await made.open();
    for (const frame of audio) made.send(frame);
    return (await made.end()).segments;
  }

  /** What the server says to somebody who goes on with a session, and hangs up: `session`, or the code of an error. */
  function firstWord(session: string, code = 4000): Promise<string> {
    const socket = new WebSocket(`${url.replace("http", "ws")}/v1/stream?session=${session}&after=0`);
    return new Promise((resolve, reject) => {
      socket.on("error", reject);
      socket.on("message", (data) => {
        const event = JSON.parse(String(data));
        resolve(event.code ?? event.type);
        socket.close(code);
      });
    });
  }
});

test("options that cannot be are refused at once", () => {
  assert.throws(() => new SpeechStream({ url: "nowhere", WebSocket }), { code: "bad_option" });
  assert.throws(() => new SpeechStream({ url: "ftp://host", WebSocket }), { code: "bad_option" });
  assert.throws(() => new SpeechStream({ url: "http://host", WebSocket, maxBufferedBytes: 9 }), { code: "bad_option" });
  for (const [unknown, name] of [[{ lang: "en" }, "lang"], [{ reconnect: { delay: 1 } }, "reconnect.delay"]] as const) {
    const refusal = { code: "bad_option", message: new RegExp(`There is no option ${name}\\.`) };
    assert.throws(() => new SpeechStream({ url: "http://host", WebSocket, ...(unknown as object) }), refusal);
  }
  const made = new SpeechStream({ url: "http://host", WebSocket, encoding: "mulaw" });
  assert.throws(() => made.send(new Float32Array(5)), { code: "bad_audio" });
  assert.throws(() => made.send(new Uint8Array(3 << 20)), { code: "bad_audio" });
  assert.equal(made.send(new Uint8Array(5)), false);
  const inBrowsers: StreamOptions["WebSocket"] = globalThis.WebSocket; // compiles: the browser's own will do
  if (!inBrowsers) assert.throws(() => new SpeechStream({ url: "http://host" }), { code: "bad_option" });
});

/** 0..1, the same for the same seed and number. */
function chance(seed: number, n: number): number {
  const mixed = Math.imul(seed * 7_919 + n * 104_729, 2_654_435_761) >>> 0;
  return ((mixed ^ (mixed >>> 15)) >>> 0) / 2 ** 32;
}
