import { make } from "../page/dom";
import { clock, delay } from "../page/words";
import type { Chart, Line } from "./charts";

/** Plot and margins, in CSS pixels. */
const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 4;
const BOTTOM = 22;
const TOP = 8;
const SHORTEST_S = 60;
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 4"];
const SVG = "http://www.w3.org/2000/svg";

interface Point {
  atS: number;
  values: Map<string, number | undefined>;
}

/** A chart on the page: the drawing for eyes, its numbers as legend and table for everybody. */
export class ChartView {
  readonly element: HTMLElement;
  readonly #plot = document.createElementNS(SVG, "svg");
  readonly #legend = make("ul", { class: "legend" });
  readonly #empty = make("p", { class: "none" });
  readonly #rows = make("tbody");
  readonly #when = make("span", { class: "when num" });
  readonly #points: Point[] = [];
  readonly #names: string[] = [];
  #looked: Point | undefined;

  constructor(
    private readonly chart: Chart,
    private readonly keptS: number,
  ) {
    const { id, title, note, empty } = chart;
    this.#plot.setAttribute("aria-hidden", "true");
    this.#empty.textContent = empty;
    const head = ["", "Now", "Lowest", "Highest"].map((name) => make("th", { scope: "col" }, name || "Line"));
    const table = make(
      "table",
      {},
      make("caption", { class: "unseen" }, `${title}: now, and since this page was opened, up to ten minutes`),
      make("thead", {}, make("tr", {}, ...head)),
      this.#rows,
    );
    this.element = make(
      "section",
      { class: "chart", "aria-labelledby": `chart-${id}` },
      make("div", { class: "chart-top" }, make("h2", { id: `chart-${id}` }, title), this.#when),
      make("p", { class: "soft fine" }, note),
      make("div", { class: "plot" }, this.#plot, this.#empty),
      this.#legend,
      make("details", {}, make("summary", {}, "Table", make("span", { class: "unseen" }, ` of ${title}`)), table),
    );
    new ResizeObserver(() => this.#draw()).observe(this.#plot);
    this.#plot.addEventListener("pointermove", (event) => this.#look(event));
    this.#plot.addEventListener("pointerleave", () => this.#look(undefined));
  }

  add(atS: number, lines: Line[]): void {
    for (const { name } of lines) if (!this.#names.includes(name)) this.#names.push(name);
    this.#points.push({ atS, values: new Map(lines.map(({ name, value }) => [name, value])) });
    while (this.#points[0]!.atS < atS - this.keptS) this.#points.shift();
    this.#draw();
  }

  /** Lines that ever had something to show; a chart of zeros shows them too, if that is all it ever shows:
   * nobody waits, say. That nothing was refused needs no list of reasons. */
  #shown(): string[] {
    const said = this.#names.filter((name) => this.#points.some(({ values }) => values.get(name)));
    if (said.length || this.chart.unit === "s" || this.chart.unit === "/min") return said;
    return this.#names.filter((name) => this.#now(name) !== undefined);
  }

  #now(name: string): number | undefined {
    return this.#points.at(-1)?.values.get(name);
  }

  #draw(): void {
    const last = this.#points.at(-1);
    const width = this.#plot.clientWidth;
    if (!last || !width) return;
    const names = this.#shown();
    const most = Math.max(0, ...this.#points.flatMap(({ values }) => names.map((name) => values.get(name) ?? 0)));
    const top = roof(most, this.chart.unit);
    const right = width - RIGHT;
    const x = (atS: number): number => LEFT + (right - LEFT) * (1 - (last.atS - atS) / this.#spanS());
    const y = (value: number): number => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    this.#empty.hidden = most > 0;
    this.#tell(names);
    const drawn = [
      svg("text", { x: LEFT, y: HEIGHT - 4 }, `${clock(this.#spanS())} ago`),
      svg("text", { x: right, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
    ];
    for (const value of [0, top / 2, top]) {
      drawn.push(svg("line", { class: "grid", x1: LEFT, x2: right, y1: y(value), y2: y(value) }));
      if (!most) continue;
      drawn.push(svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, brief(this.#told(value))));
    }
    for (const name of names) {
      const style = this.#style(name);
      for (const run of this.#runs(name)) {
        const points = this.#corners(run).map(([atS, value]) => `${x(atS).toFixed(1)},${y(value).toFixed(1)}`);
        drawn.push(svg("polyline", { ...style, points: points.join(" ") }));
      }
    }
    if (this.#looked) {
      const at = x(this.#looked.atS);
      drawn.push(svg("line", { class: "look", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.#plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#plot.replaceChildren(...drawn);
  }

  #spanS(): number {
    return Math.max(SHORTEST_S, this.#points.at(-1)!.atS - this.#points[0]!.atS);
  }

  /** Colour and dashes of a line: whoever does not see the one sees the other. */
  #style(name: string): Record<string, string> {
    const at = this.#names.indexOf(name) % DASHES.length;
    return { class: `line line-${at}`, "stroke-dasharray": DASHES[at]! };
  }

  /** What is counted at a moment stays until it is counted again. A single value is a dot. */
  #corners(run: [number, number][]): [number, number][] {
    if (run.length === 1) return [run[0]!, run[0]!];
    if (!this.chart.counted) return run;
    return run.flatMap(([atS, value], n) => (n ? [[atS, run[n - 1]![1]], [atS, value]] : [[atS, value]]));
  }

  /** The stretches of a line that have values. */
  #runs(name: string): [number, number][][] {
    const runs: [number, number][][] = [];
    let open: [number, number][] | undefined;
    for (const { atS, values } of this.#points) {
      const value = values.get(name);
      if (value === undefined) open = undefined;
      else if (open) open.push([atS, value]);
      else runs.push((open = [[atS, value]]));
    }
    return runs;
  }

  #tell(names: string[]): void {
    const last = this.#points.at(-1)!;
    const point = this.#looked ?? last;
    this.#when.textContent = this.#looked ? `${clock(last.atS - this.#looked.atS)} ago` : "";
    this.#legend.replaceChildren(
      ...names.map((name) => {
        const swatch = svg("svg", { class: "swatch", viewBox: "0 0 18 8", "aria-hidden": "true" });
        swatch.append(svg("line", { ...this.#style(name), x1: 1, x2: 17, y1: 4, y2: 4 }));
        return make("li", {}, swatch, `${name} `, make("b", { class: "num" }, this.#told(point.values.get(name))));
      }),
    );
    const rows = this.#names.map((name) => {
      const known = this.#points.map(({ values }) => values.get(name)).filter((value) => value !== undefined);
      const range = known.length ? [Math.min(...known), Math.max(...known)] : [undefined, undefined];
      const cells = [this.#now(name), ...range].map((cell) => make("td", { class: "num" }, this.#told(cell)));
      return make("tr", {}, make("th", { scope: "row" }, name), ...cells);
    });
    const none = make("tr", {}, make("td", { colspan: "4" }, this.chart.empty));
    this.#rows.replaceChildren(...(rows.length ? rows : [none]));
  }

  #told(value: number | undefined): string {
    if (value === undefined) return "–";
    switch (this.chart.unit) {
      case "s":
        return value === 0 ? "0" : value < 10 ? delay(value * 1_000) : `${short(value)} s`;
      case "×":
        return `${short(value)}×`;
      case "%":
        return `${short(value)} %`;
      case "/min":
        return short(value);
      default:
        return short(value);
    }
  }

  #look(event: PointerEvent | undefined): void {
    this.#looked = undefined;
    const [first, last] = [this.#points[0], this.#points.at(-1)];
    if (event && first && last) {
      const { left, width } = this.#plot.getBoundingClientRect();
      const atS = last.atS - this.#spanS() * (1 - (event.clientX - left - LEFT) / (width - LEFT - RIGHT));
      this.#looked = this.#points.reduce((near, point) =>
        Math.abs(point.atS - atS) < Math.abs(near.atS - atS) ? point : near,
      );
    }
    this.#draw();
  }
}

function svg(tag: string, attributes: Record<string, string | number>, text = ""): SVGElement {
  const made = document.createElementNS(SVG, tag) as SVGElement;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.textContent = text;
  return made;
}

/** `1.50 s` -> `1.5 s`: for the axis. */
function brief(told: string): string {
  return told.replace(/\.(\d*?)0+ s$/, (_, rest: string) => (rest ? `.${rest} s` : " s"));
}

/** A round number at or above `most`, whose half is round too. */
function roof(most: number, unit: Chart["unit"]): number {
  const least = unit === "s" ? 0.01 : unit === "" ? 2 : 1;
  const wanted = Math.max(most, least);
  const power = 10 ** Math.floor(Math.log10(wanted));
  return [1, 2, 4, 6, 10].map((step) => step * power).find((step) => step >= wanted * 0.999) ?? wanted;
}

function short(value: number): string {
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toPrecision(2);
}
