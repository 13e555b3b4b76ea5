// Every cell, and the history of the one that is chosen, whose id stands in the address behind "#cell=".
"use strict";

(function () {
  const { data, changesOf, element, EVIDENCE } = dashboard;
  const { revisionName, revisions, dateOf, timeOf, changeMark, colourOf, evidenceOf } = dashboard;
  const { cells, runs, histories, timelines, rules } = data;
  const AXES = [
    ["pass", "pass"], ["impl", "implementation"], ["seq", "seq"], ["head_dim", "head dim"], ["mix", "mix"],
    ["conv", "conv"], ["post_conv", "post conv"], ["norm", "norm"], ["gate", "gate"],
    ["dtype", "dtype"], ["batch", "batch"], ["heads", "heads"], ["kv_heads", "KV heads"], ["causal", "causal"],
    ["splits", "splits"], ["page_size", "page size"], ["op", "computes"], ["device", "device"],
  ];
  const STATES = { slower: "bad", "maybe slower": "warn", failing: "bad", faster: "good", "maybe faster": "good" };
  const placeOf = new Map(cells.id.map((id, cell) => [id, cell]));
  let shown = null; // the cell whose history is shown
  let redraw; // its chart

  // ---------------------------------------------------------------- all cells

  createTable(element("cells-table"), {
    caption: "Time now and history",
    noun: "cells",
    rows: cells.id.map((_, cell) => rowOf(cell)),
    sort: "label",
    pageSize: 40,
    columns: [
      { name: "find", label: "find", filter: "text", hidden: true },
      { name: "state", label: "state", filter: "choice", hidden: true },
      ...AXES.map(([name, label]) => ({ name, label, filter: "choice", hidden: true })),
      { name: "label", label: "cell", show: ({ cell }) => cellButton(cell) },
      { name: "now", label: "now", unit: "ms", kind: "number" },
      { name: "change", label: "last change", kind: "number", show: ({ last }) => last && changeMark([last]) },
      { name: "end", label: "state", show: ({ state }) => stateMark(state) },
    ],
  });

  function rowOf(cell) {
    const last = changesOf[cell].at(-1);
    const taps = (name) => (cells[`${name}_q`][cell] ? `${cells[`${name}_q`][cell]}x${cells[`${name}_k`][cell]}` : "");
    const pageSize = cells.page_size[cell] || (cells.pass[cell] === "decode" ? "none" : "");
    const typed = { conv: taps("conv"), post_conv: taps("post_conv"), page_size: pageSize };
    const state = cells.state[cell];
    return {
      ...Object.fromEntries(AXES.map(([name]) => [name, typed[name] ?? cells[name][cell]])),
      cell,
      label: cells.label[cell],
      find: ["name", "label", "device", "timer", "cache"].map((name) => cells[name][cell]).join(" "),
      now: histories[cell].median_ms.at(-1),
      last,
      change: last ? 100 * last.change : null,
      state,
      end: state,
    };
  }

  function stateMark(state) {
    return make("span", { text: state, className: STATES[state] ?? "quiet" });
  }

  function cellButton(cell) {
    const attributes = { type: "button", "data-cell": cell, title: cells.name[cell], "aria-pressed": String(cell === shown) };
    return make("button", { text: cells.label[cell], className: "cell", attributes, on: { click: () => choose(cell) } });
  }

  function choose(cell) {
    if (cell !== shown) history.pushState(null, "", `#cell=${cells.id[cell]}`);
    show(cell);
    const { top } = element("chosen").getBoundingClientRect();
    if (top < 0 || top > innerHeight / 2) element("chosen-title").focus(); // in a narrow window it is out of sight
  }

  // ---------------------------------------------------------------- the history of one cell

  function show(cell) {
    shown = cell;
    for (const button of document.querySelectorAll("button.cell")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.cell) === cell));
    }
    const history = histories[cell];
    const places = timelines[history.timeline];
    const points = places.map((run, i) => pointOf(history, run, i));
    const found = changesOf[cell];
    const marks = found.map((one) => ({ ...one, good: places.indexOf(one.good), bad: places.indexOf(one.bad), colour: colourOf([one]) }));
    const name = `Median time of ${cells.label[cell]} over ${plural(points.length, "run")}`;
    const facts = [cells.name[cell], cells.device[cell], `timer ${cells.timer[cell]}`, `cache ${cells.cache[cell]}`];
    element("chosen-title").textContent = cells.label[cell];
    element("chosen-facts").textContent = facts.join(", ");
    element("chosen-now").replaceChildren(...nowOf(points.at(-1)));
    element("chosen-changes").replaceChildren(...found.toReversed().map(changeLine));
    showRuns(points);
    redraw = () => drawHistory(element("chosen-chart"), points, marks, name);
    redraw();
  }

  function pointOf(history, run, i) {
    const [status, reason] = history.failed?.[i] ?? ["ok", ""];
    return {
      run, status, reason,
      ms: history.median_ms[i], low: history.ci95_low_ms[i], high: history.ci95_high_ms[i],
      half: history.median_ms[i] && (50 * (history.ci95_high_ms[i] - history.ci95_low_ms[i])) / history.median_ms[i],
      revision: revisionName(run) + (runs.git_dirty[run] ? " + changes" : ""),
      date: timeOf(run),
    };
  }

  function nowOf({ ms, half, status, reason, date, run }) {
    if (ms === null) return [make("span", { text: reason ? `${status}: ${reason}` : status, className: "bad given" })];
    return [
      make("strong", { text: `${formatNumber(ms)} ms` }),
      make("span", { text: ` ± ${formatNumber(half, 2)} % on ${date} at `, className: "quiet" }),
      revisions(null, run),
    ];
  }

  function changeLine(one) {
    const times = `${formatNumber(one.before_ms)} to ${formatNumber(one.after_ms)} ms`;
    const rest = make("span", { text: ` ${dateOf(one.bad)}, ${times}, ${evidenceOf(one)}`, className: "quiet" });
    return make("li", {}, changeMark([one]), " ", revisions(one.good, one.bad), rest);
  }

  // The chart once more as a table, made when it is opened.
  function showRuns(points) {
    const details = element("chosen-runs");
    const place = details.querySelector("div");
    details.querySelector("summary").textContent = `${plural(points.length, "run")} as a table`;
    place.replaceChildren();
    details.ontoggle = () => {
      if (!details.open || place.childElementCount) return;
      createTable(place, {
        caption: "Runs, the last first",
        noun: "runs",
        pageSize: 30,
        rows: points.toReversed(),
        columns: [
          { name: "date", label: "run", unit: "UTC", show: ({ date }) => date.replace(" UTC", "") },
          { name: "revision", label: "revision", show: revisionOf },
          { name: "ms", label: "median", unit: "ms", kind: "number" },
          { name: "half", label: "±", unit: "%", kind: "number", digits: 2 },
          { name: "status", label: "status" },
        ],
      });
    };
    details.ontoggle();
  }

  function revisionOf({ run }) {
    const changed = () => make("span", { className: "mono" }, revisionName(run), make("br"), "+ changes");
    return runs.git_dirty[run] ? changed() : revisions(null, run);
  }

  // ---------------------------------------------------------------- the cell in the address

  function restore() {
    show(placeOf.get(new URLSearchParams(location.hash.slice(1)).get("cell")) ?? firstToShow());
  }

  // Before a choice: the largest slowdown that is news and that a commit may explain, else another change or failure.
  function firstToShow() {
    const explained = data.events.filter((event) => !event.unexplained);
    const news = explained.filter(({ recent, lasting }) => recent && lasting);
    const slower = news.filter((event) => event.slower);
    const found = [slower, news, explained].find((events) => events.length);
    if (found) {
      const largest = found.reduce((a, b) => (Math.abs(Math.log1p(b.change)) > Math.abs(Math.log1p(a.change)) ? b : a));
      return data.changes[largest.changes[0]].cell;
    }
    return data.failures.length ? data.failures[0].cell : 0;
  }

  // ---------------------------------------------------------------- how to read it

  function showRules() {
    const [percent, fewPercent] = [rules.threshold, Math.max(rules.threshold, rules.few_least)]
      .map((share) => `${formatNumber(100 * share, 3)} %`);
    const meanings = {
      step: `A step of at least ${percent} that is significant beside the noise from run to run, holds for ` +
        `${rules.fewest_runs} runs or more, and is no slow drift.`,
      latest: `The last runs lie more than ${rules.reach} times the noise from the level before. More runs will confirm it, or ` +
        "show an outlier.",
      few: `With fewer than ${rules.few} runs, noise from run to run is unknown. Neighbouring runs then differ if ` +
        `their intervals do not overlap and the change is at least ${fewPercent}: a weaker sign, which another machine ` +
        "or another day can bring about as well.",
      drift: `No step explains it: the level slopes, and its end is at least ${percent} from its beginning.`,
    };
    for (const [kind, meaning] of Object.entries(meanings)) {
      element("rules").append(make("dt", { text: EVIDENCE[kind] }), make("dd", { text: meaning }));
    }
  }

  function showSources() {
    const { files, rows, repeated, skipped, broken, broken_files: brokenFiles } = data.read;
    const others = Object.entries(skipped).map(([what, number]) => `${what}: ${formatNumber(number)}`);
    if (repeated) others.push(`rows that another file had already: ${formatNumber(repeated)}`);
    const made = `Made ${data.made_utc} by mtabench ${data.mtabench}`;
    const from = `from ${plural(files, "file")} with ${plural(rows, "row")}`;
    element("made").textContent = `${made} ${from}${others.length ? `; left out: ${others.join(", ")}` : ""}.`;
    if (!brokenFiles) return;
    const lines = broken.map(({ file, reason }) => make("li", {}, make("code", { text: file }), ` ${reason}`));
    const title = make("h3", { text: `${plural(brokenFiles, "file")} could not be read` });
    element("broken").append(title, make("ul", {}, ...lines));
  }

  showNews(cellButton);
  showRules();
  showSources();
  addEventListener("popstate", restore);
  addEventListener("resize", () => redraw());
  restore();
  performance.mark("data-ready");
})();
