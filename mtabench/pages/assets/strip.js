// The samples of one cell: a row of dots for each round, and a tick at the round's median. Slow is right.
"use strict";

// rounds: samples in ms by round; medians: of each round; spread: { low_ms, high_ms }. Returns an <svg>.
function makeStrip(rounds, medians, { low_ms: low, high_ms: high }, { width = 220, rowHeight = 0 } = {}) {
  const step = rowHeight || Math.max(2, Math.min(5, 60 / rounds.length));
  const height = Math.ceil(step * rounds.length) + 2;
  const margin = 4;
  const x = (ms) => (margin + ((ms - low) / (high - low || 1)) * (width - 2 * margin)).toFixed(1);
  const y = (round) => (1 + step * (round + 0.5)).toFixed(1);

  const label =
    `${plural(rounds.length, "round")}, from ${formatNumber(low)} to ${formatNumber(high)} ms; ` +
    `medians of rounds ${formatNumber(Math.min(...medians))} to ${formatNumber(Math.max(...medians))} ms`;
  const viewBox = `0 0 ${width} ${height}`;
  const strip = makeSvg("svg", { class: "strip", viewBox, width, height, role: "img", "aria-label": label });
  // A dot is a line of no length with round ends: one element for all samples.
  const dots = rounds.flatMap((samples, round) => samples.map((ms) => `M${x(ms)} ${y(round)}h0`));
  const half = Math.min(step / 2, 5);
  const ticks = medians.map((ms, round) => `M${x(ms)} ${(y(round) - half).toFixed(1)}v${(2 * half).toFixed(1)}`);
  const size = Math.min(step * 0.8, 5);
  strip.append(
    makeSvg("path", { class: "dots", d: dots.join(""), "stroke-width": size }),
    makeSvg("path", { class: "ticks", d: ticks.join("") }),
  );
  return strip;
}
