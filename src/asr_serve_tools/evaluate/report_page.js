"use strict";
// Everything is put into the page as text: nothing in a transcript, a path or a name is read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const figure = (value, digits, unit = "") => (value === null || value === undefined ? "–" : value.toFixed(digits) + unit);
const nameOf = (run) => run.system + (run.live ? " (live)" : "");
/** The figure by which recognizers are compared: of words, or of characters in a script without spaces. */
const rateOf = (run) => (run.wer === null ? run.cer : run.wer);
const boundsOf = (run) => (run.wer === null ? [run.cer_low, run.cer_high] : [run.wer_low, run.wer_high]);

const COLUMNS = [
  ["System", nameOf, nameOf],
  ["Dataset", (run) => run.dataset, (run) => run.dataset],
  ["Clips", (run) => run.clips, (run) => `${run.clips} of ${run.dataset_clips}`],
  ["WER %", (run) => run.wer, (run) => interval(run.wer, run.wer_low, run.wer_high)],
  ["CER %", (run) => run.cer, (run) => (run.wer === null ? interval(run.cer, run.cer_low, run.cer_high) : figure(run.cer, 2))],
  ["RTFx", (run) => run.rtfx, (run) => figure(run.rtfx, 1)],
  ["Latency p50 s", (run) => run.latency_p50_s, (run) => figure(run.latency_p50_s, 2)],
  ["Latency p95 s", (run) => run.latency_p95_s, (run) => figure(run.latency_p95_s, 2)],
  ["First word p50 ms", (run) => run.first_word_p50_ms, (run) => figure(run.first_word_p50_ms, 0)],
  ["First word p95 ms", (run) => run.first_word_p95_ms, (run) => figure(run.first_word_p95_ms, 0)],
  ["Final p95 ms", (run) => run.final_p95_ms, (run) => figure(run.final_p95_ms, 0)],
  ["DER %", (run) => run.der, (run) => figure(run.der, 1)],
  ["Hot words %", (run) => run.hotword_recall, (run) => figure(run.hotword_recall, 1)],
  ["Cost per hour of audio", (run) => run.cost_per_audio_hour, (run) => figure(run.cost_per_audio_hour, 4)],
  ["Failed", (run) => run.failed, (run) => String(run.failed)],
  ["Licence", (run) => run.license, (run) => run.license || "–"],
  ["Quantization", (run) => run.quantization, (run) => run.quantization || "–"],
  ["Revision", (run) => run.revision, (run) => run.revision || "–"],
];
let sorted = { column: 3, down: false };

function shown() {
  const [dataset, system] = [at("dataset").value, at("system").value];
  return data.runs.filter((run) => (!dataset || run.dataset === dataset) && (!system || run.system === system));
}

function interval(rate, low, high) {
  if (rate === null || rate === undefined) return "–";
  const cell = make("span");
  cell.append(figure(rate, 2));
  if (low === null || low === undefined) return cell;
  cell.append(make("span", { class: "soft" }, ` (${figure(low, 2)} to ${figure(high, 2)})`));
  const most = Math.max(...data.runs.map((run) => boundsOf(run)[1] || 0), 1e-9);
  const place = (value) => (4 + (112 * value) / most).toFixed(1);
  cell.append(draw("svg", { width: 120, height: 12, viewBox: "0 0 120 12", "aria-hidden": "true" },
    draw("line", { class: "grid", x1: 4, x2: 116, y1: 6, y2: 6 }),
    draw("line", { class: "bar", x1: place(low), x2: place(high), y1: 6, y2: 6 }),
    draw("circle", { class: "mark", cx: place(rate), cy: 6, r: 4 })));
  return cell;
}

function order(runs) {
  const value = COLUMNS[sorted.column][1];
  const sign = sorted.down ? -1 : 1;
  return [...runs].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1; // what was not measured comes last, either way
    if (b === null || b === undefined) return -1;
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
}

/** Figures that no run has are left out. */
const measured = COLUMNS.map(([, value]) => data.runs.some((run) => value(run) !== null && value(run) !== undefined && value(run) !== ""));

function table() {
  const head = make("tr");
  COLUMNS.forEach(([title], column) => {
    if (!measured[column]) return;
    const button = make("button", { type: "button", "data-column": column }, title);
    button.addEventListener("click", () => {
      sorted = { column, down: sorted.column === column ? !sorted.down : false };
      table();
      at("runs").querySelector(`thead button[data-column="${column}"]`).focus();
    });
    const direction = sorted.column !== column ? "none" : sorted.down ? "descending" : "ascending";
    head.append(make("th", { scope: "col", "aria-sort": direction }, button));
  });
  const body = make("tbody");
  for (const run of order(shown())) {
    const row = make("tr");
    COLUMNS.forEach(([, , show], column) => {
      if (measured[column]) row.append(make(column ? "td" : "th", column ? {} : { scope: "row" }, show(run)));
    });
    body.append(row);
  }
  at("runs").replaceChildren(make("table", {}, make("caption", { class: "hidden" }, "Runs"), make("thead", {}, head), body));
}

const SHAPES = [
  () => draw("circle", { r: 6, class: "mark" }),
  () => draw("rect", { x: -6, y: -6, width: 12, height: 12, class: "mark" }),
  () => draw("path", { d: "M0 -8 L7 6 L-7 6 Z", class: "mark" }),
  () => draw("path", { d: "M0 -8 L8 0 L0 8 L-8 0 Z", class: "mark" }),
  () => draw("path", { d: "M-2 -7 h4 v5 h5 v4 h-5 v5 h-4 v-5 h-5 v-4 h5 Z", class: "mark" }),
];

function plot() {
  const runs = shown().filter((run) => run.rtfx && rateOf(run) !== null);
  const without = shown().length - runs.length;
  at("plot-note").textContent = without ? `${without} of ${shown().length} runs have no speed of one whole pass, or no error rate, and are not shown.` : "";
  if (!runs.length) return at("plot").replaceChildren(make("p", { class: "soft" }, "No run has both a speed and an error rate."));
  const [left, right, top, bottom] = [56, 620, 16, 300];
  const speeds = runs.map((run) => Math.log10(run.rtfx));
  const [least, most] = [Math.floor(Math.min(...speeds) * 2 - 0.2) / 2, Math.ceil(Math.max(...speeds) * 2 + 0.2) / 2];
  const worst = Math.max(...runs.map((run) => boundsOf(run)[1] || rateOf(run)), 1) * 1.05;
  const x = (speed) => left + ((right - left) * (Math.log10(speed) - least)) / (most - least);
  const y = (rate) => bottom - ((bottom - top) * rate) / worst;
  const picture = draw("svg", { viewBox: "0 0 640 350", role: "group", "aria-label": "Error rate against speed" });
  for (let power = least; power <= most + 1e-9; power += 0.5) {
    const place = x(10 ** power);
    picture.append(draw("line", { class: "grid", x1: place, x2: place, y1: top, y2: bottom }),
      draw("text", { x: place, y: bottom + 18, "text-anchor": "middle" }, String(Number((10 ** power).toPrecision(2)))));
  }
  const step = [1, 2, 5, 10, 20, 50, 100].find((size) => worst / size <= 6) || 200;
  for (let rate = 0; rate <= worst; rate += step) {
    picture.append(draw("line", { class: "grid", x1: left, x2: right, y1: y(rate), y2: y(rate) }),
      draw("text", { x: left - 8, y: y(rate) + 4, "text-anchor": "end" }, String(rate)));
  }
  picture.append(draw("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    draw("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }),
    draw("text", { x: (left + right) / 2, y: bottom + 40, "text-anchor": "middle" }, "RTFx: seconds of audio per second (logarithmic)"),
    draw("text", { transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "error rate in %"));
  const systems = [...new Set(data.runs.map((run) => run.system))];
  const taken = []; // places of labels, so that none covers another
  for (const run of [...runs].sort((one, other) => rateOf(one) - rateOf(other))) {
    const [low, high] = boundsOf(run);
    const label = `${nameOf(run)}, ${run.dataset}: ${figure(rateOf(run), 2)} % (${figure(low, 2)} to ${figure(high, 2)}), ${figure(run.rtfx, 1)} x real time`;
    const place = [x(run.rtfx), y(rateOf(run))];
    const point = draw("g", { class: "point", tabindex: "0", role: "img", "aria-label": label }, draw("title", {}, label));
    if (low !== null && low !== undefined) point.append(draw("line", { class: "bar", x1: place[0], x2: place[0], y1: y(low), y2: y(high) }));
    const shape = SHAPES[systems.indexOf(run.system) % SHAPES.length]();
    shape.setAttribute("transform", `translate(${place[0]} ${place[1]})`);
    const end = place[0] > (left + right) / 2;
    let height = place[1] + 4;
    while (taken.some((other) => Math.abs(other - height) < 14)) height -= 3;
    taken.push(height);
    point.append(shape, draw("text", { x: place[0] + (end ? -11 : 11), y: height, "text-anchor": end ? "end" : "start" }, run.system.slice(0, 40)));
    for (const event of ["focus", "mouseenter"]) point.addEventListener(event, () => { at("tip").textContent = label; });
    picture.append(point);
  }
  return at("plot").replaceChildren(picture);
}

function words(clip) {
  const paragraph = make("p", { class: "words" });
  for (const [kind, reference, hypothesis] of clip.difference) {
    const lost = reference && make("del", {}, make("span", { class: "hidden" }, "missing "), reference);
    const added = hypothesis && make("ins", {}, make("span", { class: "hidden" }, "added "), hypothesis);
    if (kind === "equal") paragraph.append(reference);
    else if (kind === "delete") paragraph.append(lost);
    else if (kind === "insert") paragraph.append(added);
    else paragraph.append(make("span", { class: "changed" }, lost, " ", added));
    paragraph.append(" ");
  }
  return paragraph;
}

function facts(clip) {
  const list = make("dl");
  for (const [name, value] of [
    ["length", figure(clip.audio_s, 1, " s")], ["whole answer", figure(clip.seconds, 2, " s")],
    ["first word", figure(clip.first_word_ms, 0, " ms")], ["final", figure(clip.final_ms, 0, " ms")],
  ]) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return list;
}

const ORDERS = {
  "most errors": (clip) => -(clip.error ? Infinity : clip.errors || 0),
  "highest error rate": (clip) => -(clip.error ? Infinity : clip.length ? clip.errors / clip.length : clip.errors || 0),
  slowest: (clip) => -(clip.seconds || clip.final_ms / 1000 || 0),
  longest: (clip) => -clip.audio_s,
};
const PAGE = 40;

function browser(count = PAGE) {
  const run = data.runs[Number(at("run").value)];
  if (!run) return at("clips").replaceChildren();
  const clips = [...run.rows].sort((one, other) => ORDERS[at("order").value](one) - ORDERS[at("order").value](other));
  const made = clips.slice(0, count).map((clip) => {
    const score = clip.error ? "failed" : clip.length === null ? "no transcript" : `${clip.errors}/${clip.length} wrong`;
    const inside = make("div", { class: "clip" });
    const details = make("details", {}, make("summary", {}, `${score}: ${clip.path}`), inside);
    details.addEventListener("toggle", () => {
      if (!details.open || inside.childElementCount) return;
      const source = clip.audio === null ? null : data.audio[clip.audio];
      if (source) inside.append(make("audio", { controls: "", preload: "none", src: source, "aria-label": clip.path }));
      if (clip.error) inside.append(make("p", {}, clip.error));
      else if (clip.difference) inside.append(words(clip));
      else inside.append(make("p", { class: "words" }, clip.hypothesis || ""));
      inside.append(facts(clip));
      if (!clip.error && clip.difference) inside.append(make("p", { class: "soft" }, `as written: ${clip.hypothesis}`));
    });
    return details;
  });
  if (clips.length > count) {
    const more = make("button", { type: "button" }, `Show ${Math.min(PAGE, clips.length - count)} more of ${clips.length}`);
    more.addEventListener("click", () => browser(count + PAGE));
    made.push(more);
  }
  const hidden = run.clips + run.failed - run.rows.length;
  at("clips-note").textContent = hidden > 0 ? `${hidden} clips with fewer errors are not in this page.` : "";
  return at("clips").replaceChildren(...made);
}

function runs() {
  const chosen = at("run").value;
  const indices = shown().map((run) => data.runs.indexOf(run));
  at("run").replaceChildren(...indices.map((index) => make("option", { value: index }, `${nameOf(data.runs[index])}, ${data.runs[index].dataset}`)));
  if (indices.includes(Number(chosen)) && chosen !== "") at("run").value = chosen;
}

function all() {
  table();
  plot();
  runs();
  browser();
}

for (const [id, names] of [["dataset", data.runs.map((run) => run.dataset)], ["system", data.runs.map((run) => run.system)]]) {
  at(id).append(...[...new Set(names)].sort().map((name) => make("option", { value: name }, name)));
  at(id).addEventListener("change", all);
}
at("order").append(...Object.keys(ORDERS).map((name) => make("option", { value: name }, name)));
for (const id of ["run", "order"]) at(id).addEventListener("change", () => browser());
at("left-out").textContent = data.left_out;
all();
