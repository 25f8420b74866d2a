// The load's charts: one per quantity, all over the same three minutes.

const SPAN_S = 180;
const GAP_S = 3;  // without a sample, nobody looked: lines end
const HEIGHT = 80;
// Steps between ticks.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];

const number = (value) => value.toFixed(0);
const decimal = (value) => value.toFixed(1);
const percent = (value) => `${Math.round(100 * value)} %`;
const seconds = (value) =>
  value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toFixed(2))} s`;

// A second series has the second colour. Sparse ones have no value while nothing happens: the last
// one stays.
const CHARTS = [
  { title: "Tokens per second", format: number, series: [["", "tokens_per_s"]], whole: true },
  {
    title: "Sequences", format: number, whole: true,
    series: [["running", "running"], ["waiting", "waiting"]],
  },
  { title: "KV cache in use", format: percent, series: [["", "cache"]], max: 1 },
  { title: "Step time", format: seconds, series: [["", "step_s"]], sparse: true },
  {
    title: "Time to first token", format: seconds, sparse: true, none: "none yet",
    series: [["", "first_token_s"]],
  },
  {
    title: "Accepted drafts per step", format: decimal, sparse: true,
    series: [["", "accepted_per_step"]],
  },
];

export class Charts {
  #samples = [];
  #charts;

  constructor(parent) {
    this.#charts = CHARTS.map((chart) => new Chart(parent, chart));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(samples, now) {
    for (const sample of samples) {
      const last = this.#samples.at(-1);
      if (last && sample.at - last.at > GAP_S) this.#samples.push({ at: last.at + 1 });
      this.#samples.push(sample);
    }
    this.#samples = this.#samples.filter((each) => each.at > now - SPAN_S);
    this.draw(now);
  }

  draw(now) {
    for (const chart of this.#charts) chart.draw(this.#samples, now);
  }
}

class Chart {
  #chart; #plot; #values;

  constructor(parent, chart) {
    this.#chart = chart;
    const figure = parent.appendChild(element("figure"));
    const caption = figure.appendChild(element("figcaption", { textContent: chart.title }));
    this.#values = chart.series.map(([label], index) => {
      const value = caption.appendChild(element("b"));
      const className = index ? "second" : "first";
      if (label) value.after(element("i", { textContent: label, className }));
      return value;
    });
    const area = figure.appendChild(element("div", { ariaHidden: "true" }));
    this.#plot = new uPlot(this.#options(area), [[], ...chart.series.map(() => [])], area);
    const fit = () => this.#plot.setSize({ width: area.clientWidth, height: HEIGHT });
    new ResizeObserver(fit).observe(area);
  }

  draw(samples, now) {
    if (now) {
      const columns = this.#chart.series.map(([, key]) => samples.map((each) => each[key] ?? null));
      this.#plot.setData([samples.map((each) => each.at - now), ...columns]);
      this.#show();
    } else this.#plot.redraw();
  }

  // Shows the values under the cursor, else the newest.
  #show() {
    const { data, cursor } = this.#plot;
    const { format, sparse, none = "–" } = this.#chart;
    data.slice(1).forEach((column, index) => {
      const value = cursor.idx == null ? newest(column, sparse) : column[cursor.idx];
      this.#values[index].textContent = value == null ? none : format(value);
    });
  }

  #options(area) {
    const { format, max, series, whole } = this.#chart;
    const font = "11px system-ui, sans-serif";
    const grid = { stroke: colour(area, "grid"), width: 1 };
    const axis = { stroke: colour(area, "muted"), font, grid, ticks: { show: false }, gap: 4 };
    const formatted = (_, ticks) => ticks.map(format);
    const ago = (_, ticks) => ticks.map((tick) => tick ? `${-tick / 60} min ago` : "now");
    return {
      width: 300, height: HEIGHT, padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "load" }, y: false, drag: { x: false }, points: { size: 5 } },
      hooks: { setCursor: [() => this.#plot && this.#show()] },
      scales: {
        x: { time: false, range: [-SPAN_S, 0] },
        y: { range: (_, low, high) => [0, max ?? (1.15 * high || 1)] },
      },
      axes: [
        { ...axis, size: 20, splits: () => [-SPAN_S, 0], values: ago },
        { ...axis, size: 48, space: 20, incrs: whole && WHOLE, values: formatted },
      ],
      series: [{}, ...series.map((_, index) => ({
        stroke: colour(area, index ? "second" : "first"), width: 1.5,
        points: { show: true, size: 4, filter: alone },
      }))],
    };
  }
}

function newest(column, sparse) {
  return sparse ? column.findLast((value) => value != null) : column.at(-1);
}

// Values without neighbours, which no line shows, get a dot.
function alone({ data }, index) {
  const column = data[index];
  const isAlone = (i) => column[i] != null && column[i - 1] == null && column[i + 1] == null;
  return [...column.keys()].filter(isAlone);
}

// The colour that a class has in this place, asked anew at each drawing: the theme may change.
function colour(area, name) {
  const probe = area.appendChild(element("span", { className: name }));
  return () => getComputedStyle(probe).color;
}

function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}
