"use strict";
/* Cards with charts in them, for every page: what the reader has chosen, legends, the pointer, light and dark.

   A page lists its charts and calls makeCards. A chart has: id, section, title, size ("full", "wide", "medium",
   "narrow", "small"), along() -> {xDomain, xUnit, wholeX, marks, xText}, and either series() and unit for curves, or
   heat() and tip(chart, at, py) for a heat-map. It may have: note, height, tools (HTML), unit(), guides(), floor,
   loggable, plain (no legend). Charts with the same `along` share one cursor. */

const byId = (id) => document.getElementById(id);
const charts = [];

/* What the reader has chosen; it outlives a reload, not the tab. */
const stateKey = `report ${location.pathname}`;
const state = { x: "step", smoothing: 1, relative: false, live: false, log: {}, hidden: [], theme: null };
try {
  Object.assign(state, JSON.parse(sessionStorage.getItem(stateKey)));
} catch { /* a window that keeps nothing starts anew */ }
const hidden = new Set(state.hidden);

function keep(change = {}) {
  Object.assign(state, change, { hidden: [...hidden] });
  try {
    sessionStorage.setItem(stateKey, JSON.stringify(state));
  } catch { /* then it lasts until the reload */ }
}

/** An element with text put in as text, never as HTML. */
function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/* ---- cards ---- */

function makeCards(listed) {
  charts.push(...listed);
  charts.forEach(makeCard);
  let width = innerWidth, asked;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(drawAll);
  });
}

function makeCard(chart) {
  const heading = element("div", {}, element("h3", { textContent: chart.title }));
  if (chart.note) heading.append(element("p", { className: "note", textContent: chart.note }));
  chart.key = chart.id.replace(/\W/g, "-");
  chart.height ??= 230;
  chart.toolbox = element("div", { className: "tools" });
  chart.toolbox.innerHTML = chart.tools || "";
  chart.legend = element("div", { className: "legend" });
  chart.plot = element("div", { className: `plot${chart.heat ? " heat" : ""}` });
  chart.plot.style.height = `${chart.height}px`;
  if (chart.loggable) {
    chart.logButton = element("button", { type: "button", className: "quiet", textContent: "Log scale" });
    chart.logButton.addEventListener("click", () => {
      keep({ log: { ...state.log, [chart.id]: chart.logButton.getAttribute("aria-pressed") !== "true" } });
      draw(chart);
    });
    chart.toolbox.append(chart.logButton);
  }
  chart.legend.addEventListener("click", (event) => toggleCurve(chart, event.target.closest("button")));
  chart.plot.addEventListener("pointermove", (event) => point(chart, event));
  chart.plot.addEventListener("pointerdown", (event) => point(chart, event));
  chart.plot.addEventListener("pointerleave", unpoint);
  document.querySelector(`[data-cards="${chart.section}"]`).append(
    element("article", { className: `card ${chart.size}`, id: `card-${chart.key}` },
      element("header", {}, heading, chart.toolbox), chart.legend, chart.plot));
}

function toggleCurve(chart, button) {
  if (!button) return;
  const id = button.dataset.series;
  if (!hidden.delete(id)) hidden.add(id);
  keep();
  drawAll();
  chart.legend.querySelector(`[data-series="${CSS.escape(id)}"]`)?.focus();
}

/** A curve that falls by more than a factor of 20 is read better on a logarithmic axis. */
function logByDefault(series) {
  const values = series.filter((one) => !one.quiet).flatMap((one) => one.y).filter(isNumber);
  const low = Math.min(...values), high = Math.max(...values);
  return values.length > 1 && low > 0 && high / low > 20;
}

function draw(chart) {
  const along = chart.along(), width = Math.max(200, chart.plot.clientWidth);
  const place = { id: chart.key, title: chart.title, width, height: chart.height };
  if (chart.heat) {
    Object.assign(chart, heatMap({ ...place, ...along, ...chart.heat(along) }));
  } else {
    chart.drawn = chart.series();
    const log = chart.loggable ? state.log[chart.id] ?? logByDefault(chart.drawn) : false;
    Object.assign(chart, lineChart({ ...place, ...along, series: chart.drawn, hidden, log, yUnit: chart.unit(),
      floor: chart.floor, guides: chart.guides?.() }));
    chart.logButton?.setAttribute("aria-pressed", log);
    if (chart.drawn.length > 1 && !chart.plain) chart.legend.innerHTML = legend(chart.drawn, hidden);
  }
  chart.plot.innerHTML = chart.svg;
}

function drawAll() {
  charts.forEach(draw);
  document.querySelectorAll("[data-choice]").forEach((button) =>
    button.setAttribute("aria-pressed", String(state[button.dataset.choice]) === button.value));
}

/** A group of buttons that set `state[choice]`. Values: [[value, words], ...]. */
function choices(choice, values) {
  const buttons = values.map(([value, words]) => {
    const button = element("button", { type: "button", value: String(value), textContent: words });
    button.dataset.choice = choice;
    button.addEventListener("click", () => { keep({ [choice]: value }); drawAll(); });
    return button;
  });
  return element("div", { className: "switch", role: "group" }, ...buttons);
}

/* ---- the pointer: one tooltip, and one cursor in all charts along the same axis ---- */

function point(chart, event) {
  const box = chart.plot.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  const { x, y } = chart;
  if (px < x.from - 4 || px > x.to + 4 || py < y.to - 12 || py > y.from + 12) return unpoint();
  const at = Math.max(x.low, Math.min(x.high, x.invert(px)));
  setCursor(charts.filter((other) => other.along === chart.along), at);
  return showTooltip(event, chart.tip ? chart.tip(chart, at, py) : tipOfCurves(chart, at));
}

function tipOfCurves(chart, at) {
  const shown = chart.drawn.filter((series) => !hidden.has(series.id) && series.x.length)
    .map((series) => ({ ...series, index: nearest(series.x, at) }));
  const closest = shown.map((series) => series.x[series.index]).sort((a, b) => Math.abs(a - at) - Math.abs(b - at))[0];
  return tooltipText(chart.along().xText(closest ?? at), shown.map(({ name, colour, y, index }) =>
    ({ name, colour, value: formatNumber(y[index], 4) })));
}

function setCursor(over, at) {
  for (const chart of charts) {
    const cursor = chart.plot.querySelector(".cursor"), on = over.includes(chart);
    cursor.setAttribute("visibility", on ? "visible" : "hidden");
    if (on) ["x1", "x2"].forEach((end) => cursor.setAttribute(end, chart.x.at(at)));
  }
}

function showTooltip(event, text) {
  const tooltip = byId("tooltip"), gap = 16;
  tooltip.innerHTML = text;
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect(), room = event.clientX + gap + width < innerWidth;
  tooltip.style.left = `${Math.max(4, room ? event.clientX + gap : event.clientX - gap - width)}px`;
  tooltip.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY - height / 2))}px`;
}

function unpoint() {
  byId("tooltip").hidden = true;
  setCursor([], 0);
  document.querySelectorAll(".cell-mark").forEach((mark) => mark.setAttribute("visibility", "hidden"));
  charts.forEach((chart) => chart.unpoint?.());
}

/* ---- words ---- */

/** Rows of cells as a table. */
function table(head, rows) {
  const line = (tag, cells) => element("tr", {}, ...cells.map((cell) => element(tag, { textContent: cell })));
  return element("div", { className: "scroll" }, element("table", {}, element("thead", {}, line("th", head)),
    element("tbody", {}, ...rows.map((cells) => line("td", cells)))));
}

/** A figure in the strip on top; `share` adds a bar. */
function tile(name, value, unit, below, share) {
  const node = element("div", { className: "tile" }, element("h3", { textContent: name }),
    element("p", { className: "value" }, value, element("small", { textContent: unit ? ` ${unit}` : "" })),
    element("p", { className: "below", textContent: below || "\u00a0" }));
  if (isNumber(share)) {
    const bar = element("i");
    bar.style.width = `${100 * Math.min(1, share)}%`;
    node.append(element("div", { className: "progress" }, bar));
  }
  return node;
}

/** A command as it was given, broken between options, with a button that copies it. */
function commandCard(title, command) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Copy" });
  const words = element("pre", {},
    ...command.split(/(?<= )(?=--)/).map((part) => element("span", { textContent: part })));
  const card = element("article", { className: "card full" },
    element("header", {}, element("h3", { textContent: title }), button), words);
  button.addEventListener("click", () => {
    const area = element("textarea", { value: command });
    card.append(area);
    area.select();
    // navigator.clipboard is closed to pages from the file system in some browsers; this is open in all.
    button.textContent = document.execCommand("copy") ? "Copied" : "Select and copy";
    area.remove();
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return card;
}

/** Names and values; null is shown as none. */
function detailsCard(title, entries, size) {
  const show = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));
  const rows = entries.filter(([, value]) => value !== undefined).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }),
      element("dd", { textContent: value === null ? "none" : show(value), className: value === null ? "none" : "" })));
  return element("article", { className: `card ${size}` },
    element("header", {}, element("h3", { textContent: title })), element("dl", {}, ...rows));
}

/** Sections without anything in them are left out; the others are linked from the tool bar. */
function fillSections() {
  for (const section of document.querySelectorAll("main section")) {
    section.hidden = !section.querySelector("article, .picture");
    const textContent = section.querySelector("h2").textContent;
    if (!section.hidden) byId("sections").append(element("a", { href: `#${section.id}`, textContent }));
  }
}

/* ---- light and dark: the system's choice, ?theme=dark, or the button ---- */

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const theme = state.theme ?? new URLSearchParams(location.search).get("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = (theme ?? (systemDark.matches ? "dark" : "light")) === "dark" ? "Light" : "Dark";
}

function wireTheme() {
  byId("theme").addEventListener("click", () => {
    keep({ theme: byId("theme").textContent.toLowerCase() });
    showTheme();
  });
  systemDark.addEventListener("change", showTheme);
  showTheme();
}
