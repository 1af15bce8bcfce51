import assert from "node:assert/strict";
import { test } from "node:test";
import { part, sentences, type Route } from "../src/models/stages";

const route: Route = {
  name: "calls",
  stage: "canary",
  next_stage: "promoted",
  stable: "tiny",
  candidate: "base",
  since_utc: "2026-11-20T08:00:00Z",
  by: "admin-1",
  reason: "",
  blocked_by: [],
};

test("a model's part in a route follows from the stage", () => {
  for (const [stage, stable, candidate] of [
    ["stable", "serving", "waiting"],
    ["shadow", "serving", "shadow"],
    ["canary", "serving", "canary"],
    ["promoted", "stand-by", "serving"],
  ] as const) {
    const now = { ...route, stage };
    assert.deepEqual([part("tiny", now), part("base", now), part("other", now)], [stable, candidate, undefined]);
  }
});

test("a route tells what keeps its candidate from the next stage", () => {
  assert.equal(sentences(route), "calls: base is canary since 2026-11-20. It may become promoted.");
  assert.equal(
    sentences({ ...route, reason: "better", blocked_by: ["too few requests", "no evaluation"] }),
    "calls: base is canary since 2026-11-20 (admin-1: better). It may not become promoted: too few requests; no evaluation.",
  );
  assert.equal(sentences({ ...route, stage: "promoted", next_stage: null, since_utc: "" }), "calls: base is serving.");
  assert.equal(sentences({ ...route, candidate: null }), "");
});
