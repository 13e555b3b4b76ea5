// The page of `mtabench report`: one set of filters for charts and tables.
"use strict";

(function () {
  const data = pageData();
  const cells = data.cells.rows.map((values) => Object.fromEntries(data.cells.names.map((name, i) => [name, values[i]])));
  const place = (id) => document.getElementById(id);
  const showCharts = makeReportCharts(data, cells);

  function drawAll(shown) {
    showCharts(shown);
    spreadTable?.setRows(withSpread(shown));
  }

  let drawnFor = "{}";

  function drawIfFiltered(shown, { filters: chosen }) {
    if (JSON.stringify(chosen) === drawnFor) return; // only the order of the table changed
    drawnFor = JSON.stringify(chosen);
    drawAll(shown);
  }

  // A command to read first and then to copy.
  function copyButton(text, label) {
    const button = make("button", { text: "Copy", className: "copy", attributes: { type: "button", "aria-label": label } });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Select the text to copy it";
      }
    });
    return button;
  }

  function command(text, label) {
    const code = make("code");
    for (const part of text.split(/(\S*-\S*)/)) { // a browser breaks words at hyphens, and options begin with two
      code.append(part.includes("-") ? make("span", { text: part, className: "word" }) : part);
    }
    return make("div", { className: "command" }, make("pre", { attributes: { tabindex: "0" } }, code), copyButton(text, label));
  }

  function definitions(pairs) {
    const list = make("dl");
    for (const [name, value] of pairs) list.append(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
    return list;
  }

  const UNITS = [["_ms", "ms", 1], ["_mhz", "MHz", 1], ["_tflops", ...data.rate]];
  function detailText(name, value) {
    if (typeof value !== "number") return [name.replaceAll("_", " "), value];
    const [ending, unit, factor] = UNITS.find(([one]) => name.endsWith(one)) ?? ["", "", 1];
    return [name.slice(0, name.length - ending.length).replaceAll("_", " "), `${formatNumber(value * factor)} ${unit}`];
  }

  function cellDetail(cell) {
    const parts = make("div", { className: "cell-detail" });
    if (cell.reason) parts.append(make("p", { text: cell.reason, className: "given" }));
    if (cell.spread) parts.append(make("p", { className: "quiet", text: "Samples by round" }), makeStrip(cell.drawn, cell.medians, cell.spread, { width: 560, rowHeight: 9 }));
    parts.append(definitions(data.details.filter((name) => cell[name] !== null && cell[name] !== "").map((name) => detailText(name, cell[name]))));
    if (cell.command) parts.append(command(cell.command, "Copy the command that measures this cell"));
    else parts.append(make("p", { className: "quiet", text: "The file holds no command that mtabench would write for this cell." }));
    return parts;
  }

  function statusText(cell) {
    const className = cell.status === "ok" ? "good" : cell.status === "unsupported" ? "quiet" : "bad";
    return make("span", { text: cell.status, className });
  }

  function medianText(cell) {
    return `${cell.settled === false ? "~" : ""}${formatNumber(cell.median_ms)}`;
  }

  function withSpread(shown) {
    return shown.filter((cell) => cell.spread).map((cell) => ({ ...cell, ...cell.spread }));
  }

  function showFailures() {
    if (!data.failed.length) {
      place("failed").append(make("p", { text: "Nothing: every cell has a time." }));
      return;
    }
    for (const { status, reason, count, cells: labels } of data.failed) {
      const head = make("summary", {}, make("b", { text: status }), make("span", { text: ` ${reason}`, className: "given" }));
      head.append(make("span", { className: "quiet", text: ` · ${plural(count, "cell")}` }));
      const list = make("ul", {}, ...labels.map((text) => make("li", { text, className: "given" })));
      if (count > labels.length) list.append(make("li", { text: `and ${formatNumber(count - labels.length)} more` }));
      place("failed").append(make("details", {}, head, list));
    }
  }

  function valuesText(values) {
    if (values.length === 1) return values[0][0];
    return values.map(([value, count]) => (count ? `${value} (${plural(count, "cell")})` : value)).join(", ");
  }

  function showCommands() {
    const commands = cells.map((cell) => cell.command).filter(Boolean);
    if (!commands.length) {
      place("repeat").append(make("p", { text: "The file holds no command that mtabench would write." }));
      return;
    }
    place("repeat").append(
      make("p", { text: `${plural(commands.length, "command")}, one for each cell; a cell's own is in its details above.` }),
      command(commands.join("\n"), "Copy all commands"),
    );
  }

  const filters = new Set(data.filters);
  const columns = data.columns.map((column) => ({
    ...column,
    filter: filters.has(column.name) || ["impl", "status"].includes(column.name) ? "choice" : undefined,
    emptyPasses: ["mix", "conv", "post_conv", "norm", "gate", "splits", "page_size"].includes(column.name), // plain attention has none, and stays to be compared with
    show: { status: statusText, median_ms: medianText }[column.name],
  }));

  place("facts").textContent = data.facts;
  for (const { value, words, interval } of data.figures) {
    const number = make("dd", { text: value }, make("small", { text: interval ? ` ${interval}` : "" }));
    place("figures").append(make("div", {}, make("dt", { text: words, className: "given" }), number));
  }
  place("overhead-words").textContent =
    `Medians over those of ${data.yardstick}, plain attention, at the same shape: what ${data.computed} costs.`;
  place("summary").append(...data.summary.map((text) => make("li", { text, className: "given" })));
  place("notes").append(...data.notes.map((text) => make("p", { text, className: "note" })));

  const baselines = [...new Set(cells.map(({ baseline }) => baseline).filter(Boolean))];
  place("speedup-words").textContent = `Over ${baselines.join(", ")} at the same shape; the dotted line is as fast as that.`;

  let spreadTable = null;
  if (data.noSamples) {
    place("spread-words").textContent = `Samples are not shown: ${data.noSamples}.`;
  } else {
    place("spread-words").textContent =
      "A line of dots is a round, a tick its median; each cell has a scale of its own, from its lowest to its highest sample on the right. " +
      "Rounds whose medians lie apart tell of drift.";
    const strip = (cell) => makeStrip(cell.drawn, cell.medians, cell.spread, { width: 90 });
    spreadTable = createTable(place("spread"), {
      caption: "Samples of each cell",
      noun: "cells",
      columns: data.spreadColumns.flatMap((column) =>
        column.name === "median_ms" ? [{ name: "drawn", label: "spread", show: strip, sortable: false }, column] : [column],
      ),
      rows: withSpread(cells),
      pageSize: 50,
    });
  }

  createTable(place("cells"), {
    caption: "One row for each cell that was measured or failed",
    noun: "cells",
    columns,
    rows: cells,
    filtersIn: place("filters"),
    detail: cellDetail,
    nameOf: (cell) => cell.label,
    onChange: drawIfFiltered,
  });
  drawAll(cells);
  showFailures();
  place("environment").replaceWith(definitions(data.environment.map(([name, values]) => [name, valuesText(values)])));
  showCommands();
})();
