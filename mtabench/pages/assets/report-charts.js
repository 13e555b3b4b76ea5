// The charts of `mtabench report`: small multiples against sequence length, each line named at its end.
//
// makeReportCharts(data, cells) returns draw(shown), which draws those of the cells.
"use strict";

function makeReportCharts(data, cells) {
  const [rateUnit, rateFactor] = data.rate; // of arithmetic, from TFLOP/s
  const MOST_PANELS = 12;
  const MOST_TICKS = 7;
  const PANEL_HEIGHT = 280;
  const NAME_HEIGHT = 15; // pixels that the name of a line takes
  const NAME_GAP = 10; // between a line's end and its name
  const AXIS_WIDTH = 70; // about what the vertical axis takes
  const MOST_NAME = 150; // pixels; longer names lose their middle

  const place = (id) => document.getElementById(id);

  function shortLength(value) {
    return value % 1024 === 0 ? `${value / 1024}k` : String(value);
  }

  // 1, 2, 5, 10, ... within two bounds; every decade alone where there are many, and even steps where hardly any is.
  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const steps = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil(decades / 8));
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
      for (const step of steps) ticks.push(Number(`${step}e${power}`));
    }
    const within = ticks.filter((tick) => tick >= low && tick <= high);
    return within.length > 2 ? within : evenTicks(low, high);
  }

  function evenTicks(low, high) {
    const least = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
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
    if (cell.useful_tflops !== null) facts.useful = `${formatNumber(cell.useful_tflops * rateFactor, 3)} ${rateUnit}`;
    if (cell.roofline_percent !== null) facts["of roofline"] = `${formatNumber(cell.roofline_percent, 3)} %`;
    if (cell.splits) facts.splits = cell.splits_used || cell.splits;
    return facts;
  }

  const pen = document.createElement("canvas").getContext("2d");

  function nameWidth(name) {
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(name).width;
  }

  function fittedName(name) {
    for (let length = name.length - 1; nameWidth(name) > MOST_NAME && length > 2; length -= 1) {
      const head = Math.ceil((2 * length) / 3);
      name = `${name.slice(0, head)}…${name.slice(name.length - (length - head) + 1)}`;
    }
    return name;
  }

  // Heights as near to those wanted (from the top, sorted) as they can be so far apart; neighbours form blocks.
  function spreadOut(wanted, gap, height) {
    const blocks = [];
    const top = ([total, count]) => total / count;
    for (const place of wanted) {
      blocks.push([place, 1]);
      while (blocks.length > 1 && top(blocks.at(-2)) + blocks.at(-2)[1] * gap > top(blocks.at(-1))) {
        const [total, count] = blocks.pop();
        const last = blocks.at(-1);
        last[0] += total - last[1] * gap * count;
        last[1] += count;
      }
    }
    const places = blocks.flatMap((block) => Array.from({ length: block[1] }, (_, i) => top(block) + i * gap));
    places.forEach((place, i) => { places[i] = Math.max(place, i * gap); });
    places.forEach((_, i) => {
      const j = places.length - 1 - i;
      places[j] = Math.min(places[j], height - i * gap);
    });
    return places;
  }

  // Whether no other line runs where the name of one that ends inside would stand; `across` is its width in octaves.
  function isFree(end, lines, heightOf, across) {
    return [...lines].every(([impl, points]) => {
      if (impl === end.impl) return true;
      return points.every((point, i) => {
        const next = points[i + 1] ?? point;
        for (let step = 0; step <= 16; step += 1) {
          const share = step / 16;
          const past = Math.log2(point.seq / end.seq) + share * Math.log2(next.seq / point.seq);
          const height = (1 - share) * heightOf(point.y) + share * heightOf(next.y);
          if (past > 0 && past < across && Math.abs(height - heightOf(end.y)) < NAME_HEIGHT) return false;
        }
        return true;
      });
    });
  }

  // Layers that name the lines at their ends: beyond the right edge, or inside where a line ends early and nothing is
  // in the way. A name that had to move has a thin line from its line's end.
  function nameLayers(points, frame, x, width) {
    const [low, high] = frame.y;
    const heightOf = (y) => (frame.height * Math.log(high / y)) / Math.log(high / low);
    const lines = Map.groupBy(points.toSorted((a, b) => a.seq - b.seq), ({ impl }) => impl);
    const octaves = Math.log2(frame.x[1] / frame.x[0]) / Math.max(width, 1);
    const ends = [...lines.values()].map((line) => line.at(-1)).sort((a, b) => b.y - a.y);
    const inside = ends.filter((end) => {
      const across = octaves * (nameWidth(fittedName(end.impl)) + 2 * NAME_GAP);
      return end.seq < frame.last && isFree(end, lines, heightOf, across);
    });
    const beside = ends.filter((end) => !inside.includes(end));
    const places = spreadOut(beside.map(({ y }) => heightOf(y)), NAME_HEIGHT, frame.height);
    const colours = new Map(data.implementations.map((one) => [one.name, one]));
    const named = ({ impl, seq }, across, height) => ({
      data: { values: [{ name: fittedName(impl), seq }] },
      mark: { type: "text", align: "left", baseline: "middle", dx: NAME_GAP, fontSize: 12, color: chartColour(colours.get(impl).text) },
      encoding: { x: across, y: { value: height }, text: { field: "name" } },
    });
    const leaders = beside.flatMap(({ impl, seq, y }, i) => {
      if (seq === frame.last && Math.abs(places[i] - heightOf(y)) <= 3) return [];
      const mark = { type: "rule", strokeWidth: 1, strokeDash: [1, 2], color: chartColour(colours.get(impl).colour), x2Offset: NAME_GAP - 3 };
      const encoding = { x, x2: { value: "width" }, y: { value: heightOf(y) }, y2: { value: places[i] } };
      return [{ data: { values: [{ seq }] }, mark, encoding }];
    });
    return [
      ...leaders,
      ...inside.map((end) => named(end, x, heightOf(end.y))),
      ...beside.map((end, i) => named(end, { value: "width" }, places[i])),
    ];
  }

  // The same points, each with the number of its part of a line, which breaks at a length without a value of its own.
  function inParts(points, lengths) {
    return [...Map.groupBy(points.toSorted((a, b) => a.seq - b.seq), ({ impl }) => impl).values()].flatMap((line) => {
      let part = 0;
      return line.map((point, i) => {
        if (i && lengths.some((length) => line[i - 1].seq < length && length < point.seq)) part += 1;
        return { ...point, part };
      });
    });
  }

  // One panel: lines of implementations against sequence length. What failed is said below, for a mark would read as a
  // value.
  function panelSpec(panel, kind, frame, width) {
    const timed = panel.cells.filter((cell) => kind.value(cell) > 0);
    const points = timed.map((cell) => ({
      impl: cell.impl, seq: cell.seq, y: kind.value(cell), low: kind.low(cell), high: kind.high(cell), tip: tooltipOf(cell),
      settled: !kind.unsettled(cell),
    }));
    const solid = points.filter(({ settled }) => settled);
    const hollow = points.filter(({ settled }) => !settled);
    const names = data.implementations.map(({ name }) => name);
    const cached = panel.cells.every((cell) => data.cached.includes(cell.pass));
    const x = {
      field: "seq", type: "quantitative", title: `${cached ? "cache" : "sequence"} length (tokens)`,
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
      scale: { domain: names, range: data.implementations.map(({ colour }) => chartColour(colour)) },
    };
    const dash = {
      field: "impl", type: "nominal", legend: null,
      scale: { domain: names, range: data.implementations.map((one) => (one.dash.length ? one.dash : [1, 0])) },
    };
    const tooltip = { field: "tip", type: "nominal" };
    const layer = [
      {
        data: { values: inParts(points, panel.cells.map(({ seq }) => seq)) }, mark: { type: "line", clip: true },
        encoding: { x, y, color, strokeDash: dash, detail: [{ field: "impl" }, { field: "part" }] },
      },
      { mark: { type: "rule", strokeWidth: 1.5 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color } },
      { data: { values: solid }, mark: { type: "point", filled: true, opacity: 1 }, encoding: { x, y, color, tooltip } },
      {
        data: { values: hollow },
        mark: { type: "point", filled: false, fill: chartColour("paper"), strokeWidth: 2, opacity: 1 },
        encoding: { x, y, color, tooltip },
      },
    ];
    if (kind.rule) layer.unshift({ data: { values: [{ y: kind.rule }] }, mark: { type: "rule", strokeDash: [2, 3] }, encoding: { y } });
    layer.push(...nameLayers(points, frame, x, width - AXIS_WIDTH - frame.names));
    const ranges = points.length ? plural(points.length, "cell") : "no cell";
    const description = `${kind.words}; ${panel.title}: ${ranges} of ${[...new Set(points.map(({ impl }) => impl))].join(", ")}`;
    const padding = { left: 0, top: 4, bottom: 4, right: frame.names + NAME_GAP };
    return { description, data: { values: points }, width: "container", height: frame.height, padding, layer };
  }

  // What has no valid time, in words below the panel.
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
    const values = timed.flatMap((cell) => [kind.low(cell), kind.high(cell)]).concat(kind.rule ?? []);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity) / 1.25;
    const high = values.reduce((a, b) => Math.max(a, b), 0) * 1.25;
    const names = [...new Set(timed.map(({ impl }) => impl))];
    const margin = lengths.length > 1 ? (lengths[lengths.length - 1] / lengths[0]) ** 0.04 : 1.5;
    return {
      lengths: thinnedLengths(lengths), last: lengths.at(-1), y: [low, high], ticks: logTicks(low, high),
      names: Math.max(0, ...names.map((name) => nameWidth(fittedName(name)))),
      height: Math.max(PANEL_HEIGHT, NAME_HEIGHT * names.length),
      x: [lengths[0] / margin, lengths[lengths.length - 1] * margin], empty: !timed.length,
    };
  }

  // The cell that a speedup refers to: of the same shape, and measured in the same run.
  const SAME = [
    "run_id", "pass", "device", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "mix", "conv", "post_conv",
    "norm", "gate", "page_size", "causal",
  ];
  const placeOf = (cell, impl) => JSON.stringify([impl, ...SAME.map((name) => cell[name])]);
  const byPlace = new Map(cells.map((cell) => [placeOf(cell, cell.impl), cell]));
  const baselineOf = (cell) => byPlace.get(placeOf(cell, cell.baseline));

  // The plain attention that times are held against, at the shape of a cell.
  const SHAPE = ["pass", "device", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "causal"];
  const shapeOf = (cell) => JSON.stringify(SHAPE.map((name) => cell[name]));
  const yardsticks = new Map(
    cells.filter((cell) => cell.impl === data.yardstick && cell.op === "attention" && cell.timed && cell.charted)
      .map((cell) => [shapeOf(cell), cell]),
  );
  const hasConv = cells.some(({ op }) => op !== "attention");
  function overhead(cell, ms) {
    const other = yardsticks.get(shapeOf(cell));
    return hasConv && other && cell.timed ? ms / other.median_ms : 0;
  }

  const KINDS = {
    overhead: {
      words: `Time over that of ${data.yardstick} against sequence length`, title: `time over ${data.yardstick}'s`,
      failures: false, rule: 1,
      value: (cell) => overhead(cell, cell.median_ms),
      unsettled: (cell) => cell.settled === false || yardsticks.get(shapeOf(cell))?.settled === false,
      low: (cell) => overhead(cell, cell.ci95_low_ms || cell.median_ms),
      high: (cell) => overhead(cell, cell.ci95_high_ms || cell.median_ms),
    },
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

  const figures = { overhead: [], time: [], speedup: [] }; // of each chart: its panels, made once and used again

  function figure(name, number) {
    while (figures[name].length <= number) {
      const chart = make("div", { className: "chart" });
      const title = make("figcaption", { className: "given" });
      const failed = make("p", { className: "failed quiet given" });
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
      const words = cells.some((cell) => kind.value(cell) > 0) ? `No cell that the filters let through has ${name === "overhead" ? "one" : `a ${name}`}.` : "";
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
      drawChart(chart, () => panelSpec(panel, kind, frame, chart.clientWidth));
    }
  }

  return function draw(shown) {
    for (const name of Object.keys(KINDS)) {
      const some = cells.some((cell) => KINDS[name].value(cell) > 0);
      if (name !== "time") place(`${name}-section`).hidden = !some;
      if (some || name === "time") drawPanels(name, shown);
    }
  };
}
