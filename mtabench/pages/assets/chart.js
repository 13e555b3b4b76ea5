// Vega-Lite charts in the colours of the page.
//
// drawChart(element, spec, { renderer }) draws a Vega-Lite spec into an element of the class "chart", in place of what
// it showed before, and draws it again when light turns to dark. A function as spec is called for each drawing, and may
// take colours from chartColour("accent"). spec.description says the chart in words; the width "container" is the
// element's. Data go in as values, never into an expression. The renderer is "svg" if not given; "canvas" is quicker
// for thousands of marks. Returns a promise of Vega's view, or of null if another spec came before this one was drawn.
"use strict";

// A colour as Vega takes it, of the palette's name or of a pair for light and dark: light-dark() is resolved by a real
// property of a real element.
function chartColour(given) {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = typeof given === "string" ? `var(--${given})` : `light-dark(${given.join(", ")})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

const drawChart = (function () {
  const charts = new Map(); // element -> { spec, renderer, result, turn }

  function config() {
    const ink = chartColour("ink");
    const quiet = chartColour("quiet");
    const font = getComputedStyle(document.body).fontFamily;
    const text = { labelFont: font, titleFont: font, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      background: "transparent",
      font,
      axis: {
        ...text, labelColor: quiet, titleColor: quiet, domainColor: chartColour("line"), tickColor: chartColour("line"),
        gridColor: chartColour("faint"), labelPadding: 6, titlePadding: 10,
      },
      header: { ...text, labelColor: ink, titleColor: quiet, labelFontSize: 13 },
      title: { font, color: ink, fontSize: 13, fontWeight: 600, anchor: "start" },
      text: { color: ink },
      rule: { color: quiet },
      line: { strokeWidth: 2 },
      point: { size: 55 },
      view: { stroke: null },
    };
  }

  // Vega's own tooltip sets HTML; this one sets text.
  function tooltip(_handler, event, _item, value) {
    let box = document.getElementById("tooltip");
    if (!box) box = document.body.appendChild(make("div", { attributes: { id: "tooltip", "aria-hidden": "true" } }));
    box.hidden = value === null || value === undefined || value === "";
    if (box.hidden) return;
    box.replaceChildren();
    const pairs = typeof value === "object" ? Object.entries(value) : [["", value]];
    for (const [name, shown] of pairs) box.append(make("span", { text: name }), make("b", { text: String(shown) }));
    const { clientWidth: width, clientHeight: height } = document.documentElement;
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, width - box.offsetWidth - 4))}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 14, height - box.offsetHeight - 4))}px`;
  }

  // Nothing that a chart names is ever fetched.
  function refuse() {
    return Promise.reject(new Error("charts load nothing"));
  }

  async function draw(element) {
    const chart = charts.get(element);
    const turn = ++chart.turn;
    const spec = typeof chart.spec === "function" ? chart.spec() : chart.spec;
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", spec.description ?? "chart");
    const stage = make("div", { className: "chart-stage" });
    if (chart.result) {
      stage.classList.add("coming");
      stage.style.width = `${element.clientWidth}px`;
    }
    element.append(stage);
    const result = await window.vegaEmbed(stage, structuredClone(spec), {
      actions: false,
      ast: true, // an interpreter: the page's policy forbids to make functions from text
      config: config(),
      defaultStyle: false,
      loader: { load: refuse, sanitize: refuse, http: refuse, file: refuse },
      mode: "vega-lite",
      renderer: chart.renderer,
      tooltip,
    });
    if (turn !== chart.turn) {
      result.finalize();
      stage.remove();
      return null;
    }
    chart.result?.finalize();
    chart.result = result;
    stage.classList.remove("coming");
    stage.style.width = "";
    element.replaceChildren(stage);
    return result.view;
  }

  document.addEventListener("themechange", () => {
    for (const element of charts.keys()) if (element.isConnected) draw(element);
  });

  return function drawChart(element, spec, { renderer = "svg" } = {}) {
    const chart = charts.get(element) ?? { result: null, turn: 0 };
    chart.spec = spec;
    chart.renderer = renderer;
    charts.set(element, chart);
    return draw(element);
  };
})();
