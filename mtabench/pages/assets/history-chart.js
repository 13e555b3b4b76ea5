// The history of one cell as a chart.
"use strict";

const TICK_WIDTH = 80; // pixels of a date under the axis
const PLOT = { left: 62, right: 34, top: 22, height: 240, below: 40 };

// Draws into an element, in place of what it showed before.
// points: [{ ms, low, high, revision, date, status, reason }], oldest first, ms null where it failed.
// changes: [{ good, bad (places in points), change, evidence, colour }]
function drawHistory(element, points, changes, description) {
  const width = Math.max(element.clientWidth, 240);
  const { left, right, top, height, below } = PLOT;
  const viewBox = `0 0 ${width} ${top + height + below}`;
  const svg = makeSvg("svg", { viewBox, class: "history", role: "img", "aria-label": description });
  const add = (tag, attributes, text) => {
    const part = svg.appendChild(makeSvg(tag, attributes));
    if (text !== undefined) part.textContent = text;
    return part;
  };
  const timed = points.map((point, i) => ({ ...point, i })).filter(({ ms }) => ms !== null);
  const last = Math.max(points.length - 1, 1);
  const x = (i) => left + (width - left - right) * (points.length > 1 ? 0.03 + (0.94 * i) / last : 0.5);
  const ends = timed.flatMap(({ low, high }) => [low, high]);
  const margin = 0.08 * (Math.max(...ends) - Math.min(...ends)) || 0.02 * ends[0];
  const [least, most] = [Math.min(...ends) - margin, Math.max(...ends) + margin];
  const y = (ms) => top + (height * (most - ms)) / (most - least);

  for (const tick of timed.length ? evenTicks(least, most) : []) {
    add("path", { class: "grid", d: `M${left} ${y(tick)}H${width - right}` });
    add("text", { x: left - 6, y: y(tick) + 4, class: "quiet end" }, tick.toLocaleString("en", { maximumSignificantDigits: 6 }));
  }
  add("text", { x: 0, y: 12, class: "quiet axis-label" }, "median, ms");
  for (const { i, label } of tickPlaces(points, Math.max(2, Math.floor((width - left) / TICK_WIDTH)))) {
    label.forEach((text, line) => add("text", { x: x(i), y: top + height + 18 + 14 * line, class: "quiet middle" }, text));
  }
  for (const run of unbroken(timed)) {
    const there = run.map(({ i, high }) => `${x(i)} ${y(high)}`);
    const back = run.map(({ i, low }) => `${x(i)} ${y(low)}`).reverse();
    add("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` });
    add("path", { class: "line", d: `M${run.map(({ i, ms }) => `${x(i)} ${y(ms)}`).join("L")}` });
  }
  for (const { i, ms } of timed) add("circle", { class: "point", cx: x(i), cy: y(ms), r: timed.length > 80 ? 1.8 : 3.4 });
  for (const { good, bad, change, evidence, colour } of changes) {
    if (evidence === "drift") continue; // it has no place
    const at = x((good + bad) / 2);
    add("path", { class: `change ${colour}`, d: `M${at} ${top}V${top + height}` });
    const side = at < left + 30 ? "start" : at > width - right - 30 ? "end" : "middle";
    add("text", { x: at, y: top - 6, class: `${colour} strong ${side}` }, formatChange(change) + (evidence === "step" ? "" : " ?"));
  }
  points.forEach((point, i) => {
    const { ms, low, high, revision, date, status, reason } = point;
    const facts = { revision, run: date };
    // A run without a time is a line over all heights, for a mark at one would read as a value.
    if (ms === null) Object.assign(facts, { status, reason });
    else Object.assign(facts, { median: `${formatNumber(ms)} ms`, "95 % interval": `${formatNumber(low)} to ${formatNumber(high)} ms` });
    const met = ms === null
      ? add("path", { class: "failed-run", d: `M${x(i)} ${top}V${top + height}` })
      : add("circle", { class: "met", cx: x(i), cy: y(ms), r: 9 });
    met.addEventListener("pointerenter", ({ clientX, clientY }) => showTooltip(facts, clientX, clientY));
    met.addEventListener("pointerleave", () => showTooltip(null));
  });
  element.replaceChildren(svg);
}

// The runs with a time, in pieces between runs that failed.
function unbroken(timed) {
  const pieces = [];
  for (const point of timed) {
    if (pieces.at(-1)?.at(-1).i === point.i - 1) pieces.at(-1).push(point);
    else pieces.push([point]);
  }
  return pieces;
}

// At most eight even steps of 1, 2 or 5 between two bounds.
function evenTicks(low, high) {
  const least = (high - low) / 8;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

// The runs that are named under the axis, at most so many: the first, the last, and some between.
function tickPlaces(points, most) {
  const count = Math.min(points.length, most, 5);
  const step = (points.length - 1) / Math.max(count - 1, 1);
  const places = Array.from({ length: count }, (_, i) => Math.round(i * step));
  return [...new Set(places)].map((i) => ({ i, label: [points[i].revision.slice(0, 7), points[i].date.slice(0, 10)] }));
}

// Signed percent, with one digit where it is small: "+5.2 %".
function formatChange(change) {
  const percent = 100 * change;
  const digits = Math.abs(percent) < 99.95 ? 1 : 0;
  return `${percent < 0 ? "−" : "+"}${Math.abs(percent).toFixed(digits)} %`;
}
