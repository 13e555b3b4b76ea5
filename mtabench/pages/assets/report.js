// The page of `mtabench report`: one set of filters for charts and table.
"use strict";

(function () {
  const data = pageData();
  const cells = data.cells.rows.map((values) => Object.fromEntries(data.cells.names.map((name, i) => [name, values[i]])));
  const place = (id) => document.getElementById(id);
  const showCharts = makeReportCharts(data, cells);
  // Plain attention has none of these, and stays to be compared with.
  const STEPS = ["mix", "conv", "post_conv", "norm", "gate", "splits", "page_size"];

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

  // All that the file says of a cell.
  function cellDetail({ texts, reason, command: typed, ...known }) {
    const parts = make("div", { className: "cell-detail" });
    if (reason) parts.append(make("p", { text: reason, className: "given" }));
    const list = make("dl");
    for (const [name, value] of Object.entries(known).filter(([, one]) => one !== null && one !== "")) {
      const text = typeof value === "number" ? formatNumber(value) : String(value);
      list.append(make("div", {}, make("dt", { text: name.replaceAll("_", " ") }), make("dd", { text })));
    }
    parts.append(list);
    if (typed) parts.append(command(typed, "Copy the command that measures this cell"));
    else parts.append(make("p", { className: "quiet", text: "The file holds no command that mtabench would write for this cell." }));
    return parts;
  }

  function shownText({ name }, text, { status }) {
    if (name !== "status") return text;
    return make("span", { text, className: status === "ok" ? "good" : status === "unsupported" ? "quiet" : "bad" });
  }

  place("facts").append(...data.facts.map((text) => make("div", { text })));
  for (const { value, words, interval } of data.figures) {
    const number = make("dd", { text: value }, make("small", { text: interval ? ` ${interval}` : "" }));
    place("figures").append(make("div", {}, make("dt", { text: words, className: "given" }), number));
  }
  place("summary").append(make("ul", { className: "plain" }, ...data.summary.map((text) => make("li", { text, className: "given" }))));
  place("notes").append(...data.notes.map((text) => make("p", { text, className: "note" })));
  createTable(place("cells"), {
    caption: "One row for each cell that was measured or failed",
    noun: "cells",
    columns: data.columns.map((column, i) => ({
      ...column,
      filter: column.filtered ? "choice" : undefined,
      emptyPasses: STEPS.includes(column.name),
      show: (cell) => shownText(column, cell.texts[i], cell),
    })),
    rows: cells,
    filtersIn: place("filters"),
    detail: cellDetail,
    nameOf: ({ impl, texts }) => [impl, ...data.columns.flatMap(({ label, filtered }, i) => (filtered ? [`${label} ${texts[i]}`] : []))].join(", "),
    onFilter: showCharts,
  });
  place("cells").append(...data.legends.map((text) => make("p", { text, className: "quiet" })));
  showCharts(cells);
  const commands = cells.map((cell) => cell.command).filter(Boolean);
  if (commands.length) place("commands").append(command(commands.join("\n"), "Copy all commands"));
  else place("commands").append(make("p", { text: "The file holds no command that mtabench would write." }));
})();
