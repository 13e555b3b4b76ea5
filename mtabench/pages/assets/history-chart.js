// The history of one cell: as a Vega-Lite chart, and as a line of the height of a text.
"use strict";

const TICK_WIDTH = 80; // pixels of a date under the axis
const LINE_HEIGHT = 20;
const LINE_WIDTH = 96;
const LINE_POINTS = 48;
const LEAST_RANGE = Math.log(1.04); // so that noise does not look like change

// points: [{ ms, low, high, revision, date, status, reason }], oldest first, ms null where it failed.
// changes: [{ good, bad (places in points), change, evidence, colour }]
// To be called at each drawing, for the colours are those of the theme at that time.
function historySpec(points, changes, description, width) {
  const colours = Object.fromEntries(["accent", "bad", "warn", "good", "quiet"].map((name) => [name, chartColour(name)]));
  let part = 0; // of the line, which breaks at a run without a time
  const placed = points.map((point, x) => ({ ...point, x, part: point.ms === null ? ++part : part }));
  const timed = placed.filter(({ ms }) => ms !== null);
  const failed = placed.filter(({ ms }) => ms === null);
  const height = 240;
  const last = points.length - 1;
  const domain = last ? [-0.03 * last, 1.03 * last] : [-1, 1];
  const x = { field: "x", type: "quantitative", scale: { domain, nice: false } };
  const y = { type: "quantitative", scale: { zero: false, nice: true } };
  const ticks = tickPlaces(points, Math.max(2, Math.floor((width - 60) / TICK_WIDTH)));
  const tooltip = [
    { field: "revision", title: "revision" }, { field: "date", title: "run" },
    { field: "median", title: "median" }, { field: "interval", title: "95 % interval" },
  ];
  const shown = timed.map((point) => ({
    ...point,
    median: `${formatNumber(point.ms)} ms`,
    interval: `${formatNumber(point.low)} to ${formatNumber(point.high)} ms`,
  }));
  const layers = [
    {
      data: { values: ticks },
      mark: { type: "text", baseline: "top", fontSize: 11, color: colours.quiet },
      encoding: {
        x, y: { value: height + 8 }, text: { field: "label" },
      },
    },
    {
      data: { values: shown },
      mark: { type: "area", opacity: 0.22, color: colours.accent },
      encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, detail: { field: "part" } },
    },
    {
      data: { values: shown },
      mark: { type: "line", strokeWidth: 1.5, color: colours.accent },
      encoding: { x, y: { ...y, field: "ms" }, detail: { field: "part" } },
    },
    {
      data: { values: shown },
      mark: { type: "point", filled: true, opacity: 1, color: colours.accent, size: timed.length > 80 ? 10 : 36 },
      encoding: { x, y: { ...y, field: "ms" } },
    },
    {
      data: { values: marksOf(changes, colours) },
      mark: { type: "rule", strokeWidth: 1.5, strokeDash: [4, 3] },
      encoding: { x, color: { field: "colour", scale: null } },
    },
    {
      data: { values: marksOf(changes, colours) },
      mark: { type: "text", baseline: "bottom", fontSize: 12, fontWeight: 600 },
      encoding: { x, y: { value: -4 }, text: { field: "label" }, color: { field: "colour", scale: null } },
    },
    { // a run without a time: a line over all heights, for a mark at one would read as a value
      data: { values: failed },
      mark: { type: "rule", strokeWidth: 6, color: colours.bad, opacity: 0.3 },
      encoding: {
        x,
        tooltip: [...tooltip.slice(0, 2), { field: "status", title: "status" }, { field: "reason", title: "reason" }],
      },
    },
    { // what the pointer meets
      data: { values: shown },
      mark: { type: "point", filled: true, size: 260, opacity: 0 },
      encoding: { x, y: { ...y, field: "ms" }, tooltip },
    },
  ];
  return {
    description,
    width: "container",
    height,
    padding: { top: 4, right: 8, bottom: 4, left: 0 },
    layer: layers,
    encoding: {
      x: { axis: { title: null, labels: false, values: ticks.map((tick) => tick.x), grid: false } },
      y: { axis: { title: "median, ms", tickCount: 5 } },
    },
  };
}

// Where a change is, halfway between the last run before it and the first after; a drift has no place.
function marksOf(changes, colours) {
  return changes
    .filter(({ evidence }) => evidence !== "drift")
    .map(({ good, bad, change, evidence, colour }) => ({
      x: (good + bad) / 2,
      label: formatChange(change) + (evidence === "step" ? "" : " ?"),
      colour: colours[colour],
    }));
}

// The runs that are named under the axis, at most so many: the first, the last, and some between.
function tickPlaces(points, most) {
  const count = Math.min(points.length, most, 5);
  const step = (points.length - 1) / Math.max(count - 1, 1);
  const places = Array.from({ length: count }, (_, i) => Math.round(i * step));
  return [...new Set(places)].map((x) => ({ x, label: [points[x].revision.slice(0, 7), points[x].date.slice(0, 10)] }));
}

// Signed percent, with one digit where it is small: "+5.2 %".
function formatChange(change) {
  const percent = 100 * change;
  const digits = Math.abs(percent) < 99.95 ? 1 : 0;
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(digits)} %`;
}

// A line of text height; decorative, for its numbers stand beside it.
function sparkline(medians, state) {
  const size = { width: LINE_WIDTH, height: LINE_HEIGHT, viewBox: `0 0 ${LINE_WIDTH} ${LINE_HEIGHT}` };
  const svg = makeSvg("svg", { ...size, class: `spark ${state}`, "aria-hidden": "true" });
  const step = Math.max(1, (medians.length - 1) / (LINE_POINTS - 1));
  const chosen = [];
  for (let place = 0; Math.round(place) < medians.length; place += step) chosen.push(Math.round(place));
  const logs = chosen.map((place) => (medians[place] === null ? null : Math.log(medians[place])));
  const known = logs.filter((value) => value !== null);
  if (!known.length) return svg;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const range = Math.max(high - low, LEAST_RANGE);
  const at = (value) => 2 + (LINE_HEIGHT - 4) * (0.5 - (value - (low + high) / 2) / range);
  const across = (i) => (logs.length > 1 ? 2 + ((LINE_WIDTH - 6) * i) / (logs.length - 1) : LINE_WIDTH - 4);
  let path = "";
  let end = null;
  logs.forEach((value, i) => {
    if (value === null) return;
    path += `${path && logs[i - 1] !== null ? "L" : "M"}${across(i).toFixed(1)} ${at(value).toFixed(1)}`;
    end = [across(i), at(value)];
  });
  svg.append(
    makeSvg("path", { d: path, fill: "none" }),
    makeSvg("circle", { cx: end[0].toFixed(1), cy: end[1].toFixed(1), r: 2 }),
  );
  return svg;
}
