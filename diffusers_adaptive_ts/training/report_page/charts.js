"use strict";
/* Charts as pure functions: numbers in, SVG or HTML text out. A page places the text and wires the pointer, so that
   the same functions draw the report of one run and the comparison of several. Colours are CSS variables of page.css:
   switching between light and dark redraws nothing. */

const HEAT_LEVELS = 41;

function escapeText(text) {
  return String(text).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A number as people read it: 12,345 / 0.0312 / 1e-4. */
function formatNumber(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return shortExponential(value, digits);
  if (size >= 10 ** (digits - 1)) return groupThousands(Number.isInteger(value) ? value : Math.round(value));
  return String(Number(value.toPrecision(digits)));
}

function shortExponential(value, digits) {
  return value.toExponential(digits - 1).replace(/\.?0*e/, "e").replace("e+", "e");
}

function groupThousands(value) {
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

function formatMinutes(minutes) {
  if (!isNumber(minutes)) return "–";
  if (minutes < 1) return `${Math.round(minutes * 60)} s`;
  if (minutes < 10) return `${Number(minutes.toFixed(1))} min`;
  const whole = Math.round(minutes);
  if (whole < 60) return `${whole} min`;
  if (whole < 1440) return `${Math.floor(whole / 60)} h ${whole % 60} min`;
  return `${Math.floor(whole / 1440)} d ${Math.floor((whole % 1440) / 60)} h`;
}

/** Mean over about `window` values on both sides, near ones counting most: unlike a running mean it does not lag.
    Nulls stay null and are not counted. */
function smooth(values, window) {
  const keep = 1 - 2 / (Math.max(1, window) + 1);
  const sweep = (items) => {
    let sum = 0, mass = 0;
    return items.map((value) => {
      sum = keep * sum + (isNumber(value) ? value : 0);
      mass = keep * mass + (isNumber(value) ? 1 : 0);
      return { sum, mass };
    });
  };
  const before = sweep(values), after = sweep([...values].reverse()).reverse();
  return values.map((value, index) => (isNumber(value)
    ? (before[index].sum + after[index].sum - value) / (before[index].mass + after[index].mass - 1) : null));
}

/** Index of the number nearest to `target` in ascending `numbers`. */
function nearest(numbers, target) {
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= target) low = middle; else high = middle;
  }
  return target - numbers[low] <= numbers[high] - target ? low : high;
}

/** The q-quantile of ascending numbers. */
function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];
}

function roundSteps(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
}

function linearTicks(low, high, count, whole = false) {
  const step = Math.max(roundSteps(low, high, count), whole ? 1 : 0);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    const value = Number((index * step).toPrecision(12));
    const fixed = value.toFixed(Math.min(3, decimals)).replace(/^-?\d+/, groupThousands);
    const label = value === 0 ? "0" : decimals > 3 ? shortExponential(value, 3) : fixed.replace("-", "−");
    ticks.push({ value, label });
  }
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return linearTicks(low, high, count);
  const factors = decades * 3 < count + 3 ? [1, 2, 5] : [1], stride = Math.ceil(decades / count);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of power % stride === 0 ? factors : []) {
      const value = Number((factor * 10 ** power).toPrecision(6));
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, label: formatNumber(value) });
    }
  }
  return ticks;
}

/** Maps values in [low, high] to pixels in [from, to], and back. */
function axis({ low, high, from, to, count, log = false, whole = false }) {
  const turn = log ? Math.log : (value) => value, back = log ? Math.exp : (value) => value;
  const start = turn(low), factor = (to - from) / (turn(high) - start);
  return {
    low, high, from, to,
    at: (value) => from + (turn(value) - start) * factor,
    invert: (pixel) => back(start + (pixel - from) / factor),
    ticks: log ? logTicks(low, high, count) : linearTicks(low, high, count, whole),
  };
}

/** Lowest and highest value to show. A `quiet` series (raw, noisy) does not let its rare spikes flatten the rest. */
function extent(series, log, floor = null) {
  let low = Infinity, high = -Infinity;
  for (const { y, low: lows, high: highs, quiet } of series) {
    const values = [...y, ...(lows || []), ...(highs || [])]
      .filter((value) => isNumber(value) && (!log || value > 0)).sort((a, b) => a - b);
    if (!values.length) continue;
    low = Math.min(low, quiet ? quantile(values, 0.005) : values[0]);
    high = Math.max(high, quiet ? quantile(values, 0.995) : values[values.length - 1]);
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  if (floor !== null || (low >= 0 && low < 0.4 * high)) low = Math.min(low, floor ?? 0);
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const pad = (high - low) * 0.06;
  return [low === 0 ? 0 : low - pad, high + pad];
}

function points(series, x, y, values) {
  const found = [];
  let run = [];
  series.x.forEach((at, index) => {
    const value = values[index];
    if (isNumber(at) && isNumber(value) && isNumber(y.at(value))) run.push([x.at(at), y.at(value)]);
    else if (run.length) { found.push(run); run = []; }
  });
  if (run.length) found.push(run);
  return found;
}

const pixels = (number) => Number(number.toFixed(1));
const pathThrough = (run) => `M${run.map(([px, py]) => `${pixels(px)} ${pixels(py)}`).join("L")}`;

/** Path of a curve; it is broken where a value is missing, and a lone value becomes a dot. */
function linePath(series, x, y) {
  return points(series, x, y, series.y)
    .map((run) => (run.length > 1 ? pathThrough(run) : `M${pixels(run[0][0] - 1)} ${pixels(run[0][1])}h2`)).join("");
}

/** A dot at every value of a curve of few values, so that one sees where it was measured; else nothing. */
function dotPath(series, x, y) {
  if (series.x.length > Math.abs(x.to - x.from) / 12) return "";
  return points(series, x, y, series.y).flat().map(([px, py]) => `M${pixels(px)} ${pixels(py)}h0`).join("");
}

/** Area between `low` and `high`; where a logarithmic axis has no place for `low`, it reaches the floor. */
function bandPath(series, x, y) {
  const lows = series.low.map((low, index) =>
    (isNumber(low) && isNumber(series.high[index]) ? (isNumber(y.at(low)) ? low : y.low) : null));
  const highs = points(series, x, y, series.high.map((high, index) => (lows[index] === null ? null : high)));
  const floors = points(series, x, y, lows);
  return highs.map((run, index) => `${pathThrough([...run, ...floors[index].reverse()])}Z`).join("");
}

function frame({ width, height, left, xUnit, yUnit, x, y }) {
  const bottom = y.from, right = x.to;
  const rows = y.ticks.map(({ value, label }) => {
    const at = pixels(y.at(value));
    return `<line class="grid" x1="${left}" x2="${right}" y1="${at}" y2="${at}"/>`
      + `<text class="tick" x="${left - 7}" y="${at}" dy="0.32em" text-anchor="end">${escapeText(label)}</text>`;
  });
  const columns = x.ticks.map(({ value, label }) => {
    const at = pixels(x.at(value)), anchor = at > right - 12 ? "end" : "middle";
    return `<line class="mark" x1="${at}" x2="${at}" y1="${bottom}" y2="${bottom + 4}"/>`
      + `<text class="tick" x="${at}" y="${bottom + 17}" text-anchor="${anchor}">${escapeText(label)}</text>`;
  });
  return rows.join("") + columns.join("")
    + `<line class="base" x1="${left}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`
    + `<text class="unit" x="0" y="11">${escapeText(yUnit)}</text>`
    + `<text class="unit" x="${right}" y="${height - 3}" text-anchor="end">${escapeText(xUnit)}</text>`;
}

function layout({ width, height, xDomain, xUnit, yUnit, yDomain, log, wholeX }) {
  const top = 28, bottom = height - 38, right = width - 10;
  const y = axis({ low: yDomain[0], high: yDomain[1], from: bottom, to: top, log, count: (bottom - top) / 42 });
  const left = Math.ceil(Math.max(20, ...y.ticks.map(({ label }) => label.length * 6.7)) + 10);
  const x = axis({
    low: xDomain[0], high: xDomain[1] > xDomain[0] ? xDomain[1] : xDomain[0] + 1,
    from: left, to: right, whole: wholeX, count: (right - left) / 95,
  });
  return { x, y, left, top, bottom, right, axes: frame({ width, height, left, xUnit, yUnit, x, y }) };
}

function svg(width, height, label, content) {
  return `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img" `
    + `aria-label="${escapeText(label)}">${content}</svg>`;
}

/** Curves over one axis, the first on top: {id, name, colour, x, y, low?, high?, width?, dash?, faint?, quiet?}.
    marks: vertical lines {x, name}; guides: horizontal lines {y, name}. Gives the text and both axes. */
function lineChart(spec) {
  const { id, width, height, title, hidden = new Set(), marks = [], guides = [], log = false } = spec;
  const visible = spec.series.filter((series) => !hidden.has(series.id));
  const yDomain = spec.yDomain || extent(visible.length ? visible : spec.series, log, spec.floor ?? null);
  const place = layout({ ...spec, yDomain, log });
  const { x, y, left, top, bottom, right } = place;
  const inside = [];
  for (const guide of guides.filter((guide) => guide.y >= y.low && guide.y <= y.high)) {
    const at = pixels(y.at(guide.y)), below = at < top + 16;
    inside.push(`<line class="guide" x1="${left}" x2="${right}" y1="${at}" y2="${at}"/>`
      + `<text class="note" x="${right - 4}" y="${at + (below ? 14 : -5)}" text-anchor="end">`
      + `${escapeText(guide.name)}</text>`);
  }
  const names = [];
  let taken = spec.yUnit.length * 7;  // the names of marks stand above the curves, in the row of the unit
  for (const mark of marks.filter((mark) => mark.x > x.low && mark.x < x.high)) {
    const at = pixels(x.at(mark.x)), half = mark.name.length * 3.3;
    inside.push(`<line class="guide" x1="${at}" x2="${at}" y1="${top - 4}" y2="${bottom}"/>`);
    if (at - half < taken || at + half > width) continue;
    names.push(`<text class="note" x="${at}" y="14" text-anchor="middle">${escapeText(mark.name)}</text>`);
    taken = at + half + 8;
  }
  for (const series of [...visible].reverse()) {
    if (series.low) inside.push(`<path class="band" style="fill:${series.colour}" d="${bandPath(series, x, y)}"/>`);
    const dots = dotPath(series, x, y);
    if (dots) inside.push(`<path class="curve dots" style="stroke:${series.colour}" d="${dots}"/>`);
    inside.push(`<path class="curve${series.faint ? " faint" : ""}" data-series="${escapeText(series.id)}" `
      + `style="stroke:${series.colour};stroke-width:${series.width || 1.8}`
      + `${series.dash ? `;stroke-dasharray:${series.dash}` : ""}" d="${linePath(series, x, y)}"/>`);
  }
  const clip = `<clipPath id="clip-${escapeText(id)}"><rect x="${left - 3}" y="${top - 4}" `
    + `width="${Math.max(0, right - left + 6)}" height="${bottom - top + 7}"/></clipPath>`;
  const content = `${clip}${place.axes}<g clip-path="url(#clip-${escapeText(id)})">${inside.join("")}</g>`
    + `${names.join("")}<line class="cursor" y1="${top}" y2="${bottom}" visibility="hidden"/>`;
  return { svg: svg(width, height, title, content), x, y };
}

/** Ratio to the middle of the scale as a level in 0 … HEAT_LEVELS - 1; `limit` times more or less is the end. */
function heatLevel(ratio, limit) {
  const share = ratio > 0 ? Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(limit))) : -1;
  return Math.round(((share + 1) / 2) * (HEAT_LEVELS - 1));
}

function heatColour(level) {
  const share = (2 * level) / (HEAT_LEVELS - 1) - 1, side = share < 0 ? "less" : "more", far = Math.abs(share);
  const mix = (from, to, part) =>
    `color-mix(in oklab,var(--heat-${to}) ${Math.round(part * 100)}%,var(--heat-${from}))`;
  return far < 0.55 ? mix("even", side, far / 0.55) : mix(side, `${side}-end`, (far - 0.55) / 0.45);
}

/** The end of the colour scale that shows all but the highest hundredth of the ratios. */
function heatLimit(columns) {
  const cells = columns.flat().filter(isNumber).sort((a, b) => a - b), high = cells.length ? quantile(cells, 0.99) : 1;
  return [1.25, 1.5, 2, 4, 8].find((limit) => high <= limit) || 16;
}

/** Edges of columns drawn around their x; the last column reaches to `end`. */
function edgesAround(xs, end) {
  const between = xs.slice(1).map((value, index) => (value + xs[index]) / 2);
  return [xs[0], ...between, Math.max(end, xs[xs.length - 1])];
}

/** Cells of ratios: columns[i] holds the rows of column i, from the bottom up, between edges[i] and edges[i + 1]. */
function heatMap(spec) {
  const { width, height, title, columns, edges, yDomain, limit } = spec;
  const place = layout({ ...spec, log: false });
  const { x, y } = place, levels = Array.from({ length: HEAT_LEVELS }, () => []);
  columns.forEach((column, index) => {
    const from = pixels(x.at(edges[index])), wide = pixels(x.at(edges[index + 1]) - from);
    const rowAt = (row) => pixels(y.at(yDomain[0] + ((yDomain[1] - yDomain[0]) * row) / column.length));
    for (let row = 0, next; row < column.length; row = next) {
      const level = heatLevel(column[row], limit);
      for (next = row + 1; next < column.length && heatLevel(column[next], limit) === level;) next += 1;
      levels[level].push(`M${from} ${rowAt(next)}h${wide}V${rowAt(row)}h${-wide}z`);
    }
  });
  const cells = levels.map((paths, level) =>
    paths.length ? `<path style="fill:${heatColour(level)}" d="${paths.join("")}"/>` : "");
  const content = `${place.axes}<g class="cells">${cells.join("")}</g><rect class="cell-mark" visibility="hidden"/>`
    + `<line class="cursor" y1="${place.top}" y2="${place.bottom}" visibility="hidden"/>`;
  return { svg: svg(width, height, title, content), x, y };
}

/** The heat-map's scale as HTML, from `1/limit` to `limit` times. */
function colourBar(limit, middle) {
  const fields = Array.from({ length: HEAT_LEVELS }, (_, level) => `<i style="background:${heatColour(level)}"></i>`);
  const root = Math.sqrt(limit);
  const labels = [`≤ ${formatNumber(1 / limit)}×`, `${formatNumber(1 / root, 2)}×`, middle,
    `${formatNumber(root, 2)}×`, `≥ ${formatNumber(limit)}×`];
  const place = (label, index) =>
    `<span style="left:${25 * index}%;translate:${[0, -50, -50, -50, -100][index]}%">${escapeText(label)}</span>`;
  return `<div class="colour-bar"><div class="fields">${fields.join("")}</div>`
    + `<div class="labels">${labels.map(place).join("")}</div></div>`;
}

/** One button per curve; a page toggles `hidden` when it is pressed. */
function legend(series, hidden) {
  return series.map(({ id, name, colour, dash, faint }) =>
    `<button type="button" data-series="${escapeText(id)}" aria-pressed="${!hidden.has(id)}" title="Hide or show">`
    + `<i class="${faint ? "faint" : ""}" style="border-top:${dash ? "2px dashed" : "3px solid"} ${colour}"></i>`
    + `${escapeText(name)}</button>`).join("");
}

/** Colour of the index-th of several curves without an order; a dash tells the second dozen from the first. */
function seriesStyle(index) {
  return { colour: `var(--series-${index % 8})`, dash: ["", "6 3", "2 3"][Math.floor(index / 8) % 3] };
}

/** Colour of the index-th of `count` ordered curves, dark to bright. */
function orderedColour(index, count) {
  const share = count > 1 ? index / (count - 1) : 0;
  const [from, to, part] = share < 0.5 ? [0, 1, share * 2] : [1, 2, share * 2 - 1];
  return `color-mix(in oklab,var(--order-${to}) ${Math.round(part * 100)}%,var(--order-${from}))`;
}

function tooltipText(title, rows) {
  const lines = rows.map(({ name, colour, value }) => `<tr><td>${colour ? `<i style="background:${colour}"></i>` : ""}`
    + `${escapeText(name)}</td><td>${escapeText(value)}</td></tr>`);
  return `<b>${escapeText(title)}</b><table>${lines.join("")}</table>`;
}
