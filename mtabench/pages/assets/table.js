// Tables that sort, filter and say how many rows they show. Cells are text, whatever a results file holds. A column
// that is the same in every row becomes one sentence above the table. In a narrow window a row is a few lines.
//
// createTable(element, {
//   caption,             what the table holds; shown above it
//   noun,                what a row is, in the plural: "34 of 51 cells"
//   columns: [{
//     name,              the property of a row
//     label, unit,       the header
//     kind,              "text" (the default) or "number" (right-aligned, sorted as numbers)
//     digits,            significant digits of a number, 4 if not given
//     filter,            "choice" or "text": a filter above the table; a choice of one value is not shown
//     emptyPasses,       true: rows without a value pass the filter, whatever is chosen
//     show,              row => text or Node, instead of the value
//     hidden,            true: a filter without a column
//   }],
//   rows,                an array of objects; null and undefined are empty and sort last
//   sort,                the column that is sorted at first; the order of the rows if not given
//   filtersIn,           an element for the filters; above the table if not given
//   detail,              row => Node, shown below a row when its button is pressed
//   nameOf,              row => what the button calls the row, for those who hear it
//   pageSize,            rows shown before "Show all"; 200 if not given
//   onFilter,            (rows that pass the filters) => after each choice of a filter
// })
"use strict";

const createTable = (function () {
  const collator = new Intl.Collator("en", { numeric: true });
  const LONG = 48; // characters; longer texts wrap
  let count = 0;

  function isEmpty(value) {
    return value === null || value === undefined || value === "";
  }

  function valueText(value) {
    return isEmpty(value) ? "" : String(value);
  }

  function compare(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
  }

  // A stable order; rows without a value come last in either direction.
  function sorted(rows, name, descending) {
    if (!name) return rows;
    const filled = rows.filter((row) => !isEmpty(row[name]));
    filled.sort((a, b) => (descending ? compare(b[name], a[name]) : compare(a[name], b[name])));
    return filled.concat(rows.filter((row) => isEmpty(row[name])));
  }

  function passes(row, columns, filters) {
    return columns.every(({ name, filter, emptyPasses }) => {
      const wanted = filters[name];
      if (!filter || isEmpty(wanted) || (emptyPasses && isEmpty(row[name]))) return true;
      const text = valueText(row[name]);
      return filter === "choice" ? text === wanted : text.toLowerCase().includes(wanted.toLowerCase());
    });
  }

  // The filters above a table; `changed` is called with the name and the text of one.
  function makeFilters(columns, rows, changed) {
    const bar = make("div", { className: "filters", attributes: { role: "group", "aria-label": "Filters" } });
    for (const column of columns.filter(({ filter }) => filter)) {
      const { name, label, filter } = column;
      let input;
      if (filter === "choice") {
        const values = [...new Set(rows.map((row) => valueText(row[name])))].filter(Boolean).sort(collator.compare);
        if (values.length < 2) continue;
        input = make("select");
        input.append(new Option("all", ""), ...values.map((value) => new Option(value, value)));
      } else {
        input = make("input", { attributes: { type: "search", autocomplete: "off", spellcheck: "false" } });
      }
      input.name = name;
      input.addEventListener("input", () => changed(name, input.value));
      bar.append(make("label", {}, make("span", { text: label }), input));
    }
    return bar;
  }

  function makeHead(columns, withDetail, pressed) {
    const line = make("tr");
    if (withDetail) line.append(make("td", { className: "opener" }));
    const headers = new Map();
    for (const { name, label, unit, kind } of columns) {
      const words = make("span", { text: label });
      if (unit) words.append(" ", make("span", { text: unit, className: "unit" }));
      const header = make("th", { className: kind === "number" ? "number" : "", attributes: { scope: "col" } });
      const arrow = make("span", { className: "arrow", attributes: { "aria-hidden": "true" } });
      header.append(make("button", { attributes: { type: "button" }, on: { click: () => pressed(name) } }, words, arrow));
      headers.set(name, header);
      line.append(header);
    }
    return { head: make("thead", {}, line), headers };
  }

  function makeCell(row, { name, label, unit, kind, digits, show }, isFirst) {
    const cell = make("td", { className: kind === "number" ? "number" : "" });
    if (!isFirst) cell.dataset.label = label; // shown where the row is no line of a table
    if (unit) cell.dataset.unit = unit;
    const shown = show ? show(row) : kind === "number" ? formatNumber(row[name], digits) : valueText(row[name]);
    if (shown instanceof Node) cell.append(shown);
    else cell.textContent = shown ?? "";
    if (cell.textContent.length > LONG) cell.classList.add("wrap");
    return cell;
  }

  function makeLines(row, columns, { detail, nameOf }) {
    const line = make("tr");
    if (!detail) {
      line.append(...columns.map((column, i) => makeCell(row, column, i === 0)));
      return line;
    }
    const label = nameOf ? `Details of ${nameOf(row)}` : "Details";
    const button = make("button", { attributes: { type: "button", "aria-expanded": "false", "aria-label": label } });
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) {
        line.nextElementSibling.remove();
        return;
      }
      const cell = make("td", { attributes: { colspan: String(columns.length + 1) } }, detail(row));
      line.after(make("tr", { className: "detail" }, cell));
    });
    line.append(make("td", { className: "opener" }, button), ...columns.map((column, i) => makeCell(row, column, i === 0)));
    return line;
  }

  // What every row shows in a column, if that is the same text; null if rows differ, or if it is a picture.
  function constantText(column, rows) {
    const { name, unit } = column;
    if (rows.length < 2 || rows.some((row) => valueText(row[name]) !== valueText(rows[0][name]))) return null;
    const cells = (column.show ? rows : rows.slice(0, 1)).map((row) => makeCell(row, column, true));
    const text = cells[0].textContent;
    if (cells.some((cell) => cell.querySelector("svg") || cell.textContent !== text)) return null;
    return text && unit ? `${text} ${unit}` : text;
  }

  return function createTable(element, options) {
    const { caption, noun = "rows", columns, rows, detail, pageSize = 200, onFilter = () => {} } = options;
    const state = { sort: options.sort ?? null, descending: false, filters: {} };
    let limit = pageSize;

    // Columns that say the same in every row become one sentence above the table, but never the first.
    const constants = [];
    const visible = columns.filter(({ hidden }) => !hidden).filter((column, i) => {
      const text = i ? constantText(column, rows) : null;
      if (text) constants.push(`${column.label}: ${text}`);
      return text === null;
    });
    const id = `table-${++count}`;
    const filterPlace = options.filtersIn ?? element.appendChild(make("div"));
    const title = make("p", { className: "table-title", text: caption, attributes: { id } });
    const status = make("p", { className: "table-count", attributes: { role: "status", "aria-live": "polite" } });
    const once = make("p", { className: "table-once quiet", text: `In every row ${constants.join(", ")}.` });
    once.hidden = !constants.length;
    const { head, headers } = makeHead(visible, Boolean(detail), sortBy);
    const body = make("tbody");
    const table = make("table", { attributes: { "aria-labelledby": id } }, head, body);
    const region = { role: "region", "aria-labelledby": id, tabindex: "0" };
    const more = make("button", { className: "more", attributes: { type: "button" }, on: { click: showAll } });
    filterPlace.append(makeFilters(columns, rows, filterBy));
    element.append(
      make("div", { className: "table-head" }, title, status),
      once,
      make("div", { className: "table-scroll", attributes: region }, table),
      more,
    );

    function sortBy(name) {
      state.descending = state.sort === name && !state.descending;
      state.sort = name;
      update();
    }

    function filterBy(name, text) {
      if (text) state.filters[name] = text;
      else delete state.filters[name];
      limit = pageSize;
      onFilter(update());
    }

    function showAll() {
      const next = body.rows.length;
      limit = Infinity;
      update();
      body.rows[next]?.querySelector("button, a")?.focus();
    }

    function update() {
      const shown = sorted(rows.filter((row) => passes(row, columns, state.filters)), state.sort, state.descending);
      for (const [name, header] of headers) {
        if (name === state.sort) header.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
        else header.removeAttribute("aria-sort");
      }
      body.replaceChildren(...shown.slice(0, limit).map((row) => makeLines(row, visible, options)));
      const total = formatNumber(rows.length);
      status.textContent = shown.length === rows.length ? `${total} ${noun}` : `${formatNumber(shown.length)} of ${total} ${noun}`;
      more.hidden = shown.length <= limit;
      more.textContent = `Show all ${formatNumber(shown.length)}`;
      return shown;
    }

    update();
  };
})();
