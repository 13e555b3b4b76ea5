// The charts of `mtabench report`: pictures as `mtabench plot` draws them, whose parts name the rows that they show.
//
// makeReportCharts(data, cells) puts them on the page and returns show(shown), which hides what is not among the cells.
"use strict";

function makeReportCharts(data, cells) {
  const sections = data.kinds.map((kind) => makeSection(kind, data.charts.filter((chart) => chart.kind === kind)));

  function makeSection(kind, charts) {
    const section = document.getElementById(`${kind}-section`);
    const nothing = make("p", { className: "quiet", text: "No cell that the filters let through has one." });
    const made = charts.map(({ title, caption, panels }) => {
      const figures = panels.map(makeFigure);
      const words = caption.map((text) => make("p", { text, className: "given" }));
      const box = make("div", {}, make("h3", { text: title, className: "given" }), make("div", { className: "panels" }, ...figures));
      box.append(make("div", { className: "caption quiet" }, ...words));
      return { box, figures };
    });
    document.getElementById(kind).append(...made.map(({ box }) => box), nothing);
    section.hidden = !charts.length;
    return { made, nothing };
  }

  // The picture is parsed as XML, in which no text becomes an element, and no script of it would run.
  function makeFigure({ title, svg }) {
    const picture = document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true);
    picture.addEventListener("pointerover", ({ target, clientX, clientY }) => {
      const row = target.closest("[data-row]")?.dataset.row;
      showTooltip(row === undefined ? null : tooltipOf(cells[row]), clientX, clientY);
    });
    picture.addEventListener("pointerleave", () => showTooltip(null));
    return make("figure", {}, make("figcaption", { text: title, className: "given" }), make("div", { className: "chart" }, picture));
  }

  // What a point says of its cell: what the table does.
  function tooltipOf({ texts }) {
    return Object.fromEntries(data.columns.flatMap(({ label, unit }, i) => (texts[i] ? [[label, `${texts[i]} ${unit}`]] : [])));
  }

  // Plain attention alone makes no panel where conv attention makes one.
  function isFilled(figure, shown) {
    const rows = [...figure.querySelectorAll("[data-rows]")].flatMap(rowsOf);
    const own = rows.filter((row) => cells[row]?.op !== "attention");
    return (own.length ? own : rows).some((row) => shown.has(cells[row]));
  }

  function rowsOf({ dataset }) {
    return dataset.rows.split(" ").filter(Boolean);
  }

  return function show(given) {
    const shown = new Set(given);
    for (const { made, nothing } of sections) {
      for (const { box, figures } of made) {
        for (const figure of figures) {
          figure.hidden = !isFilled(figure, shown);
          for (const part of figure.querySelectorAll("[data-rows]")) {
            part.classList.toggle("left-out", !rowsOf(part).some((row) => shown.has(cells[row])));
          }
          for (const point of figure.querySelectorAll("[data-row]")) {
            point.classList.toggle("left-out", !shown.has(cells[point.dataset.row]));
          }
        }
        box.hidden = figures.every((figure) => figure.hidden);
      }
      nothing.hidden = made.some(({ box }) => !box.hidden);
    }
  };
}
