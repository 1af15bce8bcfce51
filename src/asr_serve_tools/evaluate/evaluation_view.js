// Tables, plot and clips of evaluations: drawn in the report of `asr-serve eval report`, which holds its data, and in the
// console's page /models, which asks the server for it. Everything is put into the page as text: nothing in a transcript,
// a path or a name is read as HTML.

/**
 * @typedef {Record<string, any>} Run figures of a run: EvaluationSummary of asr_serve/evaluation/store.py
 * @typedef {Record<string, any>} Clip EvaluationResult of that file
 * @typedef {object} EvaluationSource where the data comes from
 * @property {Run[]} runs
 * @property {(run: Run, order: string, offset: number, limit: number) => Promise<{ data: Clip[]; total: number }>} clips
 * @property {(run: Run, clip: Clip) => Promise<string | null>} audio address of a clip's recording; null: there is none
 * @property {(failure: unknown) => string} words what went wrong, in words
 */

const SVG = "http://www.w3.org/2000/svg";
const SHOWN_CLIPS = 40;
const ORDERS = { errors: "most errors", error_rate: "highest error rate", slowest: "slowest", longest: "longest" };

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

const isThere = (value) => value !== null && value !== undefined && value !== "";
const figure = (value, digits, unit = "") => (isThere(value) ? value.toFixed(digits) + unit : "–");
const nameOf = (run) => run.system + (run.live ? " (live)" : "");
const titleOf = (run) => `${nameOf(run)}, ${run.dataset}`;
/** The figure by which recognizers are compared: of words, or of characters in a script without spaces. */
const rateOf = (run) => (run.wer === null ? run.cer : run.wer);
const boundsOf = (run) => (run.wer === null ? [run.cer_low, run.cer_high] : [run.wer_low, run.wer_high]);

/** Title, value to sort by, and what is shown; `most`: the highest bound of all runs. */
const COLUMNS = [
  ["System", nameOf, nameOf],
  ["Dataset", (run) => run.dataset, (run) => run.dataset],
  ["Clips", (run) => run.clips, (run) => `${run.clips} of ${run.dataset_clips}`],
  ["WER %", (run) => run.wer, (run, most) => interval(run.wer, run.wer_low, run.wer_high, most)],
  ["CER %", (run) => run.cer, (run, most) => (run.wer === null ? interval(run.cer, run.cer_low, run.cer_high, most) : figure(run.cer, 2))],
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
const BY_WER = 3;

function interval(rate, low, high, most) {
  if (!isThere(rate)) return "–";
  const cell = make("span", {}, figure(rate, 2));
  if (!isThere(low)) return cell;
  cell.append(make("span", { class: "soft" }, ` (${figure(low, 2)} to ${figure(high, 2)})`));
  const place = (value) => (4 + (112 * value) / most).toFixed(1);
  cell.append(draw("svg", { class: "interval", width: 120, height: 12, viewBox: "0 0 120 12", "aria-hidden": "true" },
    draw("line", { class: "grid", x1: 4, x2: 116, y1: 6, y2: 6 }),
    draw("line", { class: "bar", x1: place(low), x2: place(high), y1: 6, y2: 6 }),
    draw("circle", { class: "mark", cx: place(rate), cy: 6, r: 4 })));
  return cell;
}

const SHAPES = [
  () => draw("circle", { r: 6, class: "mark" }),
  () => draw("rect", { x: -6, y: -6, width: 12, height: 12, class: "mark" }),
  () => draw("path", { d: "M0 -8 L7 6 L-7 6 Z", class: "mark" }),
  () => draw("path", { d: "M0 -8 L8 0 L0 8 L-8 0 Z", class: "mark" }),
  () => draw("path", { d: "M-2 -7 h4 v5 h5 v4 h-5 v5 h-4 v-5 h-5 v-4 h5 Z", class: "mark" }),
];

/** The plot of error rates against speeds. `systems`: all of them, so that each keeps its shape. */
function plotOf(runs, systems, tell) {
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
  const taken = []; // places of labels, so that none covers another
  for (const run of [...runs].sort((one, other) => rateOf(one) - rateOf(other))) {
    const [low, high] = boundsOf(run);
    const label = `${titleOf(run)}: ${figure(rateOf(run), 2)} % (${figure(low, 2)} to ${figure(high, 2)}), ${figure(run.rtfx, 1)} x real time`;
    const place = [x(run.rtfx), y(rateOf(run))];
    const point = draw("g", { class: "point", tabindex: "0", role: "img", "aria-label": label }, draw("title", {}, label));
    if (isThere(low)) point.append(draw("line", { class: "bar", x1: place[0], x2: place[0], y1: y(low), y2: y(high) }));
    const shape = SHAPES[systems.indexOf(run.system) % SHAPES.length]();
    shape.setAttribute("transform", `translate(${place[0]} ${place[1]})`);
    const end = place[0] > (left + right) / 2;
    let height = place[1] + 4;
    while (taken.some((other) => Math.abs(other - height) < 14)) height -= 3;
    taken.push(height);
    point.append(shape, draw("text", { x: place[0] + (end ? -11 : 11), y: height, "text-anchor": end ? "end" : "start" }, run.system.slice(0, 40)));
    for (const event of ["focus", "mouseenter"]) point.addEventListener(event, () => tell(label));
    picture.append(point);
  }
  return picture;
}

function wordsOf(clip) {
  const paragraph = make("p", { class: "words" });
  for (const [kind, reference, hypothesis] of clip.differences) {
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

function factsOf(clip) {
  const list = make("dl");
  for (const [name, value] of [
    ["length", figure(clip.audio_s, 1, " s")], ["whole answer", figure(clip.seconds, 2, " s")],
    ["first word", figure(clip.first_word_ms, 0, " ms")], ["final", figure(clip.final_ms, 0, " ms")],
  ]) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  return list;
}

/** Errors and length of the reference in words, or in characters where words are not counted. */
function scoreOf(clip) {
  if (clip.error) return "failed";
  const [errors, length] = clip.words === null ? [clip.character_errors, clip.characters] : [clip.word_errors, clip.words];
  return length === null ? "no transcript" : `${errors}/${length} wrong`;
}

/**
 * Draws evaluations into an empty element.
 *
 * @param {HTMLElement} root
 * @param {EvaluationSource} source
 */
export function showEvaluations(root, source) {
  const { runs } = source;
  const select = (id, names) => make("select", { id }, ...names.map(([value, name]) => make("option", { value }, name)));
  const named = (names) => [["", "all"], ...[...new Set(names)].sort().map((name) => [name, name])];
  const control = (title, field) => make("label", {}, title, " ", field);
  const dataset = select("dataset", named(runs.map((run) => run.dataset)));
  const system = select("system", named(runs.map((run) => run.system)));
  const chosen = select("run", []);
  const order = select("order", Object.entries(ORDERS));
  const table = make("div", { class: "scroll", id: "runs", role: "region", "aria-labelledby": "runs-title", tabindex: "0" });
  const plot = make("div", { class: "plot", id: "plot" });
  const tip = make("p", { class: "soft", id: "tip", "aria-live": "polite" });
  const plotNote = make("p", { class: "soft", id: "plot-note" });
  const clips = make("div", { id: "clips" });
  const clipsNote = make("p", { class: "soft", id: "clips-note", role: "status" });
  root.append(
    make("div", { class: "controls" }, control("Dataset", dataset), control("System", system)),
    make("h2", { id: "runs-title" }, "Runs"), table,
    make("h2", {}, "Speed and accuracy"), plot, tip, plotNote,
    make("h2", {}, "Errors"),
    make("p", { class: "soft" }, "Normalized words: ", make("del", {}, "missing"), ", ", make("ins", {}, "added"),
      "; both in a box where one replaces the other."),
    make("div", { class: "controls" }, control("Run", chosen), control("Order", order)),
    clips, clipsNote);

  const systems = [...new Set(runs.map((run) => run.system))];
  const most = Math.max(...runs.map((run) => boundsOf(run)[1] || 0), 1e-9);
  /** Figures that no run has are left out. */
  const measured = COLUMNS.map(([, value]) => runs.some((run) => isThere(value(run))));
  let sorted = { column: BY_WER, down: false };
  let asked = 0; // number of the question whose clips are shown; answers to earlier ones are late

  const shown = () => runs.filter((run) => (!dataset.value || run.dataset === dataset.value) && (!system.value || run.system === system.value));

  function inOrder(wanted) {
    const value = COLUMNS[sorted.column][1];
    const sign = sorted.down ? -1 : 1;
    return [...wanted].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      if (a === b) return 0;
      if (!isThere(a)) return 1; // what was not measured comes last, either way
      if (!isThere(b)) return -1;
      return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
    });
  }

  function showTable() {
    const head = make("tr");
    COLUMNS.forEach(([title], column) => {
      if (!measured[column]) return;
      const button = make("button", { type: "button", "data-column": column }, title);
      button.addEventListener("click", () => {
        sorted = { column, down: sorted.column === column ? !sorted.down : false };
        showTable();
        table.querySelector(`thead button[data-column="${column}"]`).focus();
      });
      const direction = sorted.column !== column ? "none" : sorted.down ? "descending" : "ascending";
      head.append(make("th", { scope: "col", "aria-sort": direction }, button));
    });
    const body = make("tbody");
    for (const run of inOrder(shown())) {
      const row = make("tr");
      COLUMNS.forEach(([, , show], column) => {
        if (measured[column]) row.append(make(column ? "td" : "th", column ? {} : { scope: "row" }, show(run, most)));
      });
      body.append(row);
    }
    table.replaceChildren(make("table", {}, make("caption", { class: "hidden" }, "Runs"), make("thead", {}, head), body));
  }

  function showPlot() {
    const wanted = shown();
    const drawn = wanted.filter((run) => run.rtfx && rateOf(run) !== null);
    const without = wanted.length - drawn.length;
    tip.textContent = "";
    plotNote.textContent = without
      ? `${without} of ${wanted.length} runs have no speed of one whole pass, or no error rate, and are not shown.`
      : "";
    plot.replaceChildren(
      drawn.length
        ? plotOf(drawn, systems, (label) => (tip.textContent = label))
        : make("p", { class: "soft" }, "No run has both a speed and an error rate."));
  }

  async function showAudio(run, clip, place) {
    try {
      const address = await source.audio(run, clip);
      if (!place.isConnected) return URL.revokeObjectURL(address); // it was closed meanwhile
      place.replaceWith(address === null
        ? make("p", { class: "soft" }, "The recording is not here.")
        : make("audio", { controls: "", preload: "none", src: address, "aria-label": clip.path }));
    } catch (failure) {
      place.replaceWith(make("p", { class: "soft" }, source.words(failure)));
    }
  }

  /** Lets go of what is in an element: the memory of a recording too, where that is one's own. */
  function empty(element) {
    for (const audio of element.querySelectorAll("audio")) URL.revokeObjectURL(audio.src);
    element.replaceChildren();
  }

  function detailsOf(run, clip) {
    const inside = make("div", { class: "clip" });
    const details = make("details", {}, make("summary", {}, `${scoreOf(clip)}: ${clip.path}`), inside);
    details.addEventListener("toggle", () => {
      if (!details.open) return empty(inside);
      const place = make("p", { class: "soft" }, "Looking for the recording");
      inside.append(place);
      if (clip.error) inside.append(make("p", {}, clip.error));
      else if (clip.differences) inside.append(wordsOf(clip));
      else inside.append(make("p", { class: "words" }, clip.hypothesis || ""));
      inside.append(factsOf(clip));
      if (!clip.error && clip.differences) inside.append(make("p", { class: "soft" }, `as written: ${clip.hypothesis}`));
      void showAudio(run, clip, place);
    });
    return details;
  }

  /** Clips of the chosen run, from a place on: the first ones replace what is there. */
  async function showClips(offset) {
    const run = runs[Number(chosen.value)];
    if (!run) return empty(clips);
    const number = ++asked;
    try {
      const { data, total } = await source.clips(run, order.value, offset, SHOWN_CLIPS);
      if (number !== asked) return;
      const made = data.map((clip) => detailsOf(run, clip));
      const after = offset + data.length;
      if (after < total && data.length) {
        const more = make("button", { type: "button" }, `Show ${Math.min(SHOWN_CLIPS, total - after)} more of ${total}`);
        more.addEventListener("click", () => {
          more.remove();
          void showClips(after);
        });
        made.push(more);
      }
      if (!offset) empty(clips);
      clips.append(...made);
      if (offset) made[0]?.querySelector("summary")?.focus(); // where the button was
      const hidden = run.clips + run.failed - total;
      clipsNote.textContent = hidden > 0 ? `${hidden} clips with fewer errors are not in this page.` : "";
    } catch (failure) {
      if (number === asked) clipsNote.textContent = source.words(failure);
    }
  }

  function showAll() {
    showTable();
    showPlot();
    const before = chosen.value;
    const indices = shown().map((run) => String(runs.indexOf(run)));
    chosen.replaceChildren(...indices.map((index) => make("option", { value: index }, titleOf(runs[Number(index)]))));
    if (indices.includes(before)) chosen.value = before;
    void showClips(0);
  }

  for (const field of [dataset, system]) field.addEventListener("change", showAll);
  for (const field of [chosen, order]) field.addEventListener("change", () => void showClips(0));
  showAll();
}
