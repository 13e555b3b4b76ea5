// The charts of `mtabench report`: small multiples of time and speedup against sequence length.
//
// makeReportCharts(data, cells) returns draw(shown), which draws those of the cells.
"use strict";

function makeReportCharts(data, cells) {
  const MOST_PANELS = 12;
  const MOST_TICKS = 7;
  const PANEL_HEIGHT = 260;
  const FAILURE_HEIGHT = 13; // pixels of a panel for the failures of one implementation

  const place = (id) => document.getElementById(id);

  function shortLength(value) {
    return value % 1024 === 0 ? `${value / 1024}k` : String(value);
  }

  // 1, 2, 5, 10, ... within two bounds; every decade alone where there are many.
  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const steps = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil(decades / 8));
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
      for (const step of steps) ticks.push(Number(`${step}e${power}`));
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  function thinnedLengths(lengths) {
    const every = Math.ceil(lengths.length / MOST_TICKS);
    return lengths.filter((_, index) => index % every === 0);
  }

  // What a point says of its cell, in this order.
  function tooltipOf(cell) {
    const interval = cell.half_interval_percent === null ? "" : ` ± ${formatNumber(cell.half_interval_percent, 2)} %`;
    const facts = { implementation: cell.impl, "sequence length": formatNumber(cell.seq), status: cell.status };
    if (!cell.timed) facts.reason = cell.reason;
    else delete facts.status;
    if (cell.median_ms !== null) facts.median = `${cell.settled === false ? "~" : ""}${formatNumber(cell.median_ms)} ms${interval}`;
    if (cell.speedup !== null) facts.speedup = `${formatNumber(cell.speedup, 3)} × ${cell.baseline}`;
    if (cell.useful_tflops !== null) facts.useful = `${formatNumber(cell.useful_tflops, 3)} TFLOP/s`;
    if (cell.roofline_percent !== null) facts["of roofline"] = `${formatNumber(cell.roofline_percent, 3)} %`;
    if (cell.splits) facts.splits = cell.splits_used || cell.splits;
    return facts;
  }

  // One panel: lines of implementations against sequence length, failures as crosses along the top.
  function panelSpec(panel, kind, frame) {
    const timed = panel.cells.filter((cell) => kind.value(cell) > 0);
    const failed = kind.failures ? panel.cells.filter((cell) => !cell.timed) : [];
    const points = timed.map((cell) => ({
      impl: cell.impl, seq: cell.seq, y: kind.value(cell), low: kind.low(cell), high: kind.high(cell), tip: tooltipOf(cell),
      settled: !kind.unsettled(cell),
    }));
    const solid = points.filter(({ settled }) => settled);
    const hollow = points.filter(({ settled }) => !settled);
    const names = data.implementations.map(({ name }) => name);
    const x = {
      field: "seq", type: "quantitative", title: "sequence length (tokens)",
      scale: { type: "log", base: 2, domain: frame.x, nice: false },
      axis: {
        values: frame.lengths, grid: false,
        labelExpr: "datum.value % 1024 === 0 ? datum.value / 1024 + 'k' : format(datum.value, 'd')",
      },
    };
    const y = {
      field: "y", type: "quantitative", title: kind.title,
      scale: { type: "log", domain: frame.y, nice: false },
      axis: { values: frame.ticks, format: ",.4~g" },
    };
    const color = {
      field: "impl", type: "nominal", legend: null,
      scale: { domain: names, range: data.implementations.map(({ series }) => chartColour(`series-${series}`)) },
    };
    const dash = {
      field: "impl", type: "nominal", legend: null,
      scale: { domain: names, range: data.implementations.map((one) => (one.plain ? one.dash.split(" ").map(Number) : [1, 0])) },
    };
    const tooltip = { field: "tip", type: "nominal" };
    const layer = [
      { mark: { type: "line", clip: true }, encoding: { x, y, color, strokeDash: dash, detail: { field: "impl" } } },
      { mark: { type: "rule", strokeWidth: 1.5 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
      { data: { values: solid }, mark: { type: "point", filled: true, opacity: 1 }, encoding: { x, y, color, tooltip } },
      {
        data: { values: hollow },
        mark: { type: "point", filled: false, fill: chartColour("paper"), strokeWidth: 2, opacity: 1 },
        encoding: { x, y, color, tooltip },
      },
    ];
    if (kind.rule) layer.unshift({ data: { values: [{ y: kind.rule }] }, mark: { type: "rule", strokeDash: [2, 3] }, encoding: { y } });
    frame.failing.forEach((name, row) => {
      const crosses = failed.filter((cell) => cell.impl === name);
      if (!crosses.length) return;
      const values = crosses.map((cell) => ({ impl: name, seq: cell.seq, tip: tooltipOf(cell) }));
      const height = { value: FAILURE_HEIGHT * (row + 0.5) };
      layer.push({
        data: { values },
        mark: { type: "point", shape: "M-1,-1L1,1M1,-1L-1,1", size: 40, strokeWidth: 2, opacity: 1 },
        encoding: { x, y: height, color, tooltip },
      });
    });
    const ranges = points.length ? `${points.length} cells` : "no cell";
    const description = `${kind.words}; ${panel.title}: ${ranges} of ${[...new Set(points.map(({ impl }) => impl))].join(", ")}`;
    return { description, data: { values: points }, width: "container", height: PANEL_HEIGHT, layer };
  }

  // Which crosses stand for what, in words below the panel.
  function failureWords(panel) {
    const words = new Map();
    for (const cell of panel.cells.filter(({ timed }) => !timed)) {
      const why = `${cell.impl}: ${cell.status === "oom" ? "out of memory" : cell.status}`;
      words.set(why, [...(words.get(why) ?? []), shortLength(cell.seq)]);
    }
    return [...words].map(([why, lengths]) => `${why} at ${lengths.join(", ")}`).join(" · ");
  }

  // The panels among these cells. Plain attention alone makes no panel where conv attention makes another.
  function panelsOf(shown) {
    const panels = data.panels.map((title, number) => ({ title, cells: shown.filter((cell) => cell.charted && cell.panels.includes(number)) }));
    const filled = panels.filter((panel) => panel.cells.length);
    const own = filled.filter((panel) => panel.cells.some((cell) => cell.op !== "attention"));
    return own.length ? own : filled;
  }

  // What all panels of a chart share, so that they can be compared.
  function frameOf(panels, kind) {
    const all = panels.flatMap((panel) => panel.cells);
    const timed = all.filter((cell) => kind.value(cell) > 0);
    const lengths = [...new Set(all.map((cell) => cell.seq))].sort((a, b) => a - b);
    const failing = kind.failures ? [...new Set(all.filter((cell) => !cell.timed).map((cell) => cell.impl))] : [];
    const values = timed.flatMap((cell) => [kind.low(cell), kind.high(cell)]).concat(kind.rule ?? []);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity) / 1.25;
    const high = values.reduce((a, b) => Math.max(a, b), 0) * 1.25;
    const share = Math.min(0.5, (failing.length * FAILURE_HEIGHT) / PANEL_HEIGHT);
    const top = high * (high / low) ** (share / (1 - share));
    const margin = lengths.length > 1 ? (lengths[lengths.length - 1] / lengths[0]) ** 0.04 : 1.5;
    return {
      lengths: thinnedLengths(lengths), failing, y: [low, top], ticks: logTicks(low, high),
      x: [lengths[0] / margin, lengths[lengths.length - 1] * margin], empty: !timed.length,
    };
  }

  // The cell that a speedup refers to: of the same shape, and measured in the same run.
  const SAME = [
    "run_id", "pass", "device", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "mix", "conv", "post_conv",
    "causal",
  ];
  const placeOf = (cell, impl) => JSON.stringify([impl, ...SAME.map((name) => cell[name])]);
  const byPlace = new Map(cells.map((cell) => [placeOf(cell, cell.impl), cell]));
  const baselineOf = (cell) => byPlace.get(placeOf(cell, cell.baseline));

  const KINDS = {
    time: {
      words: "Time against sequence length", title: "time (ms)", failures: true,
      value: (cell) => (cell.timed ? cell.median_ms : 0),
      unsettled: (cell) => cell.settled === false,
      low: (cell) => cell.ci95_low_ms || cell.median_ms,
      high: (cell) => cell.ci95_high_ms || cell.median_ms,
    },
    speedup: {
      words: "Speedup against sequence length", title: "speedup", failures: false, rule: 1,
      value: (cell) => (cell.timed && cell.impl !== cell.baseline && cell.speedup) || 0,
      unsettled: (cell) => cell.settled === false || baselineOf(cell)?.settled === false,
      low: (cell) => cell.speedup,
      high: (cell) => cell.speedup,
    },
  };

  const figures = { time: [], speedup: [] }; // of each chart: its panels, made once and used again

  function figure(name, number) {
    while (figures[name].length <= number) {
      const chart = make("div", { className: "chart" });
      const title = make("figcaption", { className: "given" });
      const failed = make("p", { className: "crosses quiet given" });
      figures[name].push({ figure: make("figure", {}, title, chart, failed), title, chart, failed });
    }
    return figures[name][number];
  }

  function drawPanels(name, shown) {
    const kind = KINDS[name];
    const found = panelsOf(shown).filter((panel) => kind.failures || panel.cells.some((cell) => kind.value(cell) > 0));
    const panels = found.slice(0, MOST_PANELS);
    const frame = frameOf(panels, kind);
    const target = place(name);
    if (frame.empty) {
      const words = cells.some((cell) => kind.value(cell) > 0) ? `No cell that the filters let through has a ${name}.` : "";
      target.replaceChildren(make("p", { className: "quiet", text: words }));
      return;
    }
    const used = panels.map((panel, number) => ({ panel, ...figure(name, number) }));
    const more = found.length - panels.length;
    const words = `${more} more panels are not drawn; choose with the filters.`;
    target.replaceChildren(...used.map((one) => one.figure), ...(more ? [make("p", { className: "quiet", text: words })] : []));
    for (const { panel, title, chart, failed } of used) {
      title.textContent = panel.title;
      failed.textContent = kind.failures ? failureWords(panel) : "";
      drawChart(chart, () => panelSpec(panel, kind, frame));
    }
  }

  function drawLegend(shown) {
    const names = new Set(shown.map(({ impl }) => impl));
    const lines = data.implementations.filter(({ name }) => names.has(name));
    place("legend").replaceChildren(
      ...lines.map(({ name, series, plain, dash }) => {
        const swatch = makeSvg("svg", { class: "swatch", width: "28", height: "4", "aria-hidden": "true" });
        swatch.append(makeSvg("path", { d: "M0 2h28", stroke: `var(--series-${series})`, "stroke-width": "2", "stroke-dasharray": dash }));
        return make("li", { className: "given" }, swatch, plain ? `${name} (plain attention)` : name);
      }),
    );
  }

  return function draw(shown) {
    drawLegend(shown);
    drawPanels("time", shown);
    drawPanels("speedup", shown);
  };
}
