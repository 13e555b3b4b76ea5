// What every page has: its data, and elements made of text.
"use strict";

// The data of the page, as build_page embedded them.
function pageData() {
  return JSON.parse(document.getElementById("data").textContent);
}

// An element with text and children. Text goes in as text, whatever it holds; attributes are ours alone.
function make(tag, { text, className, attributes = {}, on = {} } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  element.append(...children);
  return element;
}

// An element of an SVG picture.
function makeSvg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// A number for people: no digit before the point is lost, others are shown up to `digits` significant ones; "" where
// there is none.
function formatNumber(value, digits = 4) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(digits - 1);
  const places = Number.isInteger(value) || size >= 10 ** (digits - 1)
    ? { maximumFractionDigits: 0 }
    : { minimumSignificantDigits: digits, maximumSignificantDigits: digits };
  return value.toLocaleString("en", places);
}

// Facts beside the pointer, as text; null hides them.
function showTooltip(facts, x, y) {
  let box = document.getElementById("tooltip");
  if (!box) box = document.body.appendChild(make("div", { attributes: { id: "tooltip", "aria-hidden": "true" } }));
  box.hidden = !facts;
  if (!facts) return;
  box.replaceChildren(...Object.entries(facts).flatMap(([name, text]) => [make("span", { text: name }), make("b", { text })]));
  const { clientWidth: width, clientHeight: height } = document.documentElement;
  box.style.left = `${Math.max(4, Math.min(x + 14, width - box.offsetWidth - 4))}px`;
  box.style.top = `${Math.max(4, Math.min(y + 14, height - box.offsetHeight - 4))}px`;
}

function plural(number, noun) {
  return `${formatNumber(number)} ${noun}${number === 1 ? "" : "s"}`;
}
