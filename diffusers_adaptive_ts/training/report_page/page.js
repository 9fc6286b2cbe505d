"use strict";
/* The report of one run: which charts there are, and the words around them. */

const data = JSON.parse(byId("data").textContent);
const { train, samples, validation: validations, density: densities } = data;
const { policy: policies, evaluation: evaluations } = data;
const lastOf = (items) => items[items.length - 1];
const lastNumber = (values) => lastOf((values || []).filter(isNumber));
const run = lastOf(data.runs) || {};
const has = (key) => (train[key] || []).some(isNumber);
const percent = (share, digits) => `${formatNumber(100 * share, digits)} %`;
const stepText = (step) => `step ${groupThousands(Math.round(step))}`;

/** All values of "step" or "minutes" in the log. */
const everywhere = (key) => [train[key], ...[validations, densities, policies, evaluations, samples, data.runs]
  .map((rows) => rows.map((row) => row[key]))].flat().filter(isNumber);
const lastStep = Math.max(0, ...everywhere("step"));
const finished = isNumber(run.max_train_steps) && lastStep >= run.max_train_steps;
const lastRange = lastOf(lastOf(validations)?.ranges || []);
const timesteps = [run.arguments?.ddpm_num_steps, lastRange?.to + 1, 1000].find(isNumber);
const firstValidation = stepText(validations[0]?.step ?? 0);

/* ---- what lies along the horizontal axes ---- */

const atX = (rows) => rows.map((row) => row[state.x]);
const smoothingWindow = () => (state.smoothing / 100) * train.step.length;

function alongTraining() {
  const steps = state.x === "step";
  return {
    xDomain: [0, Math.max(1e-9, ...everywhere(state.x))], wholeX: steps,
    xUnit: steps ? "optimizer steps" : "minutes of training",
    xText: (value) => (steps ? stepText(value) : `${formatNumber(value)} min`),
    marks: data.runs.filter((one) => one.resumed).map((one) => ({ x: one[state.x], name: "resumed" })),
  };
}

function alongTimesteps() {
  return { xDomain: [0, timesteps], xUnit: "timestep t", wholeX: true, xText: (value) => `t ≈ ${Math.round(value)}` };
}

/* ---- series, for the axis chosen now ---- */

const scaled = (values, scale) => values.map((value) => (isNumber(value) ? value * scale : null));

/** A noisy figure of the training rows: smoothed, above the raw one. Many rows in one point show as a band. */
function noisySeries(key, colour, scale = 1) {
  const size = train.rows_per_point, x = train[state.x], y = scaled(train[key], scale);
  const raw = { id: `${key} raw`, name: size > 1 ? `mean of ${size} log lines` : "as logged", colour, x, y, width: 1,
    faint: true, quiet: true };
  if (key === "loss" && size > 1) {
    Object.assign(raw, { name: `mean and range of ${size} log lines`, low: train.lowest, high: train.highest });
  }
  return [{ id: `${key} smoothed`, name: "smoothed", colour, width: 2.2, x, y: smooth(y, smoothingWindow()) }, raw];
}

function plainSeries(key, name, colour) {
  return [{ id: key, name, colour, x: train[state.x], y: train[key] }];
}

/** Total and every range of one validation figure, absolute or relative to the first validation. */
function validationSeries(key, relativeKey) {
  const x = atX(validations), ranges = lastOf(validations).ranges || [];
  const share = (value, start) => (isNumber(value) && isNumber(start) && start !== 0 ? value / start : null);
  const shown = (values) => (state.relative ? values.map((value) => share(value, values[0])) : values);
  const parts = ranges.map(({ from, to }, index) => ({
    id: `range ${from}-${to}`, name: `t ${from}–${to}`, colour: orderedColour(index, ranges.length), width: 1.6, x,
    y: shown(validations.map((row) => rangeOf(row, from, to)[key])),
  }));
  const logged = state.relative && validations.every((row) => isNumber(row[relativeKey]));
  const total = logged ? validations.map((row) => row[relativeKey]) : shown(validations.map((row) => row[key]));
  return [{ id: "all timesteps", name: "all timesteps", colour: "var(--ink)", width: 2.6, x, y: total }, ...parts];
}

function rangeOf(validation, from, to) {
  return (validation.ranges || []).find((range) => range.from === from && range.to === to) || {};
}

function policySeries() {
  const names = [...new Set(policies.flatMap((row) => Object.keys(row.policy || {})))];
  return names.map((name, index) => ({ id: `policy ${name}`, name, ...seriesStyle(index), x: atX(policies),
    y: policies.map((row) => row.policy?.[name] ?? null) }));
}

/* ---- the density: draws compared with uniform sampling ---- */

const ratios = densities.map((row) => scaled(row.density, row.density.length));
let pointedColumn;

function profileSeries() {
  const line = (index, style) => ({ ...style, y: ratios[index],
    x: ratios[index].map((_, bin) => ((bin + 0.5) * timesteps) / ratios[index].length) });
  const last = densities.length - 1;
  const lines = [line(0, { id: "first density", name: stepText(densities[0].step), colour: "var(--series-5)" })];
  if (last > 0) {
    const name = stepText(densities[last].step);
    lines.push(line(last, { id: "last density", name, colour: "var(--series-1)", width: 2.2 }));
  }
  const style = { id: "pointed density", colour: "var(--ink)", width: 1.4, dash: "4 3" };
  // Named before it is there, so that the legend does not jump when the pointer comes.
  return [...lines, pointedColumn === undefined ? { ...style, name: "pointed at", x: [], y: [] }
    : line(pointedColumn, { ...style, name: stepText(densities[pointedColumn].step) })];
}

function showProfile(column) {
  if (pointedColumn === column) return;
  pointedColumn = column;
  draw(charts.find((chart) => chart.id === "profile"));
}

function densityHeat(along) {
  return { columns: ratios, edges: edgesAround(atX(densities), along.xDomain[1]), yDomain: [0, timesteps],
    yUnit: "timestep t", limit: heatLimit(ratios) };
}

function densityTip(chart, at, py) {
  const edges = edgesAround(atX(densities), chart.x.high);
  let column = 0;
  while (column < ratios.length - 1 && at > edges[column + 1]) column += 1;
  const row = densities[column], bins = row.density.length, high = (bin) => (bin * timesteps) / bins;
  const bin = Math.max(0, Math.min(bins - 1, Math.floor((chart.y.invert(py) / timesteps) * bins)));
  const from = Math.ceil(high(bin)), to = Math.max(from, Math.ceil(high(bin + 1)) - 1);
  const left = chart.x.at(edges[column]), top = chart.y.at(high(bin + 1));
  const cell = { x: left, y: top, width: chart.x.at(edges[column + 1]) - left, height: chart.y.at(high(bin)) - top };
  const mark = chart.plot.querySelector(".cell-mark");
  Object.entries({ ...cell, visibility: "visible" }).forEach(([key, value]) => mark.setAttribute(key, value));
  showProfile(column);
  return tooltipText(`${stepText(row.step)} · ${formatMinutes(row.minutes)}`, [
    { name: "timesteps", value: from < to ? `${from}–${to}` : `${from}` },
    { name: "density", value: `${percent(row.density[bin], 3)} of draws` },
    { name: "against uniform", value: `${formatNumber(ratios[column][bin])}×` },
  ]);
}

/* ---- the charts ---- */

const relativeOr = (unit) => () => (state.relative ? `relative to ${firstValidation}` : unit);
const startGuide = () => (state.relative ? [{ y: 1, name: firstValidation }] : []);
const metrics = [...new Set(evaluations.flatMap((row) => Object.keys(row)))]
  .filter((key) => !["step", "minutes"].includes(key) && evaluations.some((row) => isNumber(row[key])));

const listed = [
  has("loss") && { id: "loss", section: "training", title: "Training loss", unit: () => "weighted loss", size: "full",
    height: 300, loggable: true, series: () => noisySeries("loss", "var(--series-0)") },
  has("lr") && { id: "lr", section: "training", title: "Learning rate", unit: () => "learning rate", size: "small",
    floor: 0, series: () => plainSeries("lr", "learning rate", "var(--series-3)") },
  has("steps_per_second") && { id: "speed", section: "training", title: "Speed", unit: () => "optimizer steps / s",
    size: "small", floor: 0, plain: true, series: () => noisySeries("steps_per_second", "var(--series-2)") },
  has("ema_decay") && { id: "ema", section: "training", title: "EMA decay", size: "small",
    unit: () => "share of the average kept per step",
    series: () => plainSeries("ema_decay", "decay", "var(--series-4)") },
  validations.length && { id: "simple", section: "validation", title: "Simple loss", size: "medium", height: 300,
    loggable: true, unit: relativeOr("mean squared error"), guides: startGuide,
    series: () => validationSeries("simple", "simple_relative") },
  validations.some((row) => isNumber(row.vlb_bits)) && { id: "vlb", section: "validation", size: "medium", height: 300,
    title: "Variational bound (VLB)", loggable: true, unit: relativeOr("bits"), guides: startGuide,
    series: () => validationSeries("vlb_bits", "vlb_relative") },
  densities.length && { id: "density", section: "sampler", size: "wide", height: 340,
    title: "Which timesteps are drawn",
    note: "Draws compared with uniform sampling. t = 0 is nearly the image, the highest t is noise.",
    tools: colourBar(heatLimit(ratios), "uniform"), heat: densityHeat, tip: densityTip, unpoint: () => showProfile() },
  densities.length && { id: "profile", section: "sampler", title: "Density", size: "narrow", height: 340, floor: 0,
    note: "First and latest; point at the map to see any other step.", unit: () => "× uniform", along: alongTimesteps,
    guides: () => [{ y: 1, name: "uniform" }], series: profileSeries },
  policies.some((row) => isNumber(row.entropy)) && { id: "entropy", section: "sampler", size: "small",
    title: "Entropy of the density", unit: () => "nats, 0 = uniform", guides: () => [{ y: 0, name: "uniform" }],
    series: () => [{ id: "entropy", name: "entropy", colour: "var(--series-1)", x: atX(policies),
      y: policies.map((row) => row.entropy) }] },
  policies.some((row) => Object.keys(row.policy || {}).length) && { id: "policy", section: "sampler", size: "small",
    title: "Policy parameters", unit: () => "value", loggable: true, series: policySeries },
  has("sampler_overhead") && { id: "overhead", section: "sampler", title: "Sampler overhead", size: "small", floor: 0,
    unit: () => "% of step time", plain: true, series: () => noisySeries("sampler_overhead", "var(--series-4)", 100) },
  ...metrics.map((key, index) => ({ id: `metric ${index}`, section: "evaluation", title: key.replaceAll("_", " "),
    size: "small", unit: () => "value", loggable: true,
    series: () => [{ id: key, name: key, ...seriesStyle(index), x: atX(evaluations),
      y: evaluations.map((row) => row[key]) }] })),
].filter(Boolean).map((chart) => ({ along: alongTraining, ...chart }));

/* ---- the words ---- */

function fillHead() {
  const date = (text) => new Date(text).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const facts = [run.weighting && `weighting ${run.weighting}`,
    isNumber(run.parameters) && `${formatNumber(run.parameters / 1e6)} M parameters`,
    isNumber(run.images) && `${groupThousands(run.images)} images`,
    isNumber(run.effective_batch) && `batch of ${run.effective_batch}`, run.machine,
    data.runs[0]?.started && `started ${date(data.runs[0].started)}`];
  byId("facts").replaceChildren(...facts.filter(Boolean).map((fact) => element("span", { textContent: fact })));
  const [textContent, className] = finished ? ["finished", "done"] : ["not finished", "going"];
  Object.assign(byId("status"), { textContent, className, hidden: !isNumber(run.max_train_steps) });
  const age = (Date.now() - new Date(data.written)) / 60000;
  const before = !finished && age > 0.1 ? ` (${formatMinutes(age)} before this page was opened)` : "";
  byId("footer").textContent = `Drawn ${date(data.written)}${before} from training_log.jsonl by diffusers-adaptive-ts`;
}

function fillNotices() {
  const notices = [], bad = data.not_finite;
  if (bad) {
    notices.push(`The loss is not a finite number in ${bad.count} log ${bad.count === 1 ? "line" : "lines"} `
      + `(${stepText(bad.first)} to ${groupThousands(bad.last)}). A lower learning rate, a lower max_grad_norm or `
      + "bf16 instead of fp16 often helps.");
  }
  if (!train.step.length) notices.push("No training step has been logged yet. Reload this page in a moment.");
  byId("notices").replaceChildren(...notices.map((text) => element("p", { className: "notice", textContent: text })));
}

function fillSummary() {
  const recent = (key) => lastNumber(smooth(train[key] || [], 0.01 * train.step.length));
  // Steps over seconds of the last log lines: a measured step of the sampler is slow, and falls into one line.
  const rates = (train.steps_per_second || []).filter((rate) => rate > 0).slice(-20);
  const speed = rates.length / rates.reduce((seconds, rate) => seconds + 1 / rate, 0), validation = lastOf(validations) || {}, last = run.max_train_steps;
  const validated = (name, value, unit, relative) => isNumber(value) && tile(name, formatNumber(value), unit,
    isNumber(relative) && validations.length > 1
      ? `${relative <= 1 ? "−" : "+"}${percent(Math.abs(relative - 1))} since ${firstValidation}`
      : `at ${stepText(validation.step)}`);
  const left = isNumber(last) && speed > 0 ? `about ${formatMinutes((last - lastStep) / speed / 60)} left` : "";
  const overheads = (train.sampler_overhead || []).filter(isNumber);
  const overhead = overheads.reduce((sum, share) => sum + share, 0) / overheads.length;
  const diverged = data.not_finite && data.not_finite.last === lastOf(train.step);
  const tiles = [
    tile("Step", groupThousands(lastStep), "", isNumber(last) ? `of ${groupThousands(last)}` : "", lastStep / last),
    has("loss") && tile("Training loss", diverged ? "not finite" : formatNumber(recent("loss")), "",
      `${diverged ? "before" : "smoothed; last"} ${formatNumber(lastNumber(train.loss))}`),
    validated("Validation loss", validation.simple, "", validation.simple_relative),
    validated("Validation VLB", validation.vlb_bits, "bits", validation.vlb_relative),
    isNumber(speed) && tile("Speed", formatNumber(speed), "steps/s",
      isNumber(run.effective_batch) ? `${formatNumber(speed * run.effective_batch)} images/s` : ""),
    isNumber(overhead) && tile("Sampler overhead", formatNumber(100 * overhead, 2), "%", "of step time, mean"),
    tile("Time", formatMinutes(Math.max(0, ...everywhere("minutes"))), "", finished ? "finished" : left),
  ];
  byId("summary").replaceChildren(...tiles.filter(Boolean));
}

function fillValidationTable() {
  if (!validations.length) return;
  const last = lastOf(validations), first = validations[0];
  const pair = (now, start) =>
    [formatNumber(now, 4), isNumber(now) && isNumber(start) && start !== 0 ? percent(now / start) : "–"];
  const row = (name, now, start) => [name, ...pair(now.simple, start.simple), ...pair(now.vlb_bits, start.vlb_bits)];
  const rows = (last.ranges || []).map((now) => row(`t ${now.from}–${now.to}`, now, rangeOf(first, now.from, now.to)));
  const head = ["timesteps", "simple loss", `of ${firstValidation}`, "VLB, bits", `of ${firstValidation}`];
  document.querySelector('[data-cards="validation"]').append(element("article", { className: "card full figures" },
    element("header", {}, element("h3", { textContent: `Latest validation, ${stepText(last.step)}` })),
    table(head, [...rows, row("all timesteps", last, first)])));
  document.querySelector("#validation h2").after(
    choices("relative", [[false, "Absolute"], [true, `Relative to ${firstValidation}`]]));
}

function fillPictures() {
  const viewer = byId("viewer");
  byId("pictures").replaceChildren(...samples.map((sample) => {
    const words = `Step ${groupThousands(sample.step)} · ${formatMinutes(sample.minutes)}`;
    const { width, height, source: src } = sample;
    const shape = { src, width, height, alt: `Samples at step ${sample.step}`, className: width < 300 ? "pixelated" : "" };
    const button = element("button", { type: "button", className: "picture", title: "Enlarge" },
      element("img", shape), element("span", { textContent: words }));
    button.addEventListener("click", () => {
      Object.assign(viewer.querySelector("img"), shape);
      viewer.querySelector("p").textContent = `${words} · ${sample.file}`;
      viewer.showModal();
    });
    return button;
  }));
  viewer.addEventListener("click", () => viewer.close());
}

function fillRun() {
  const commands = data.runs.filter((one) => one.command).map((one) =>
    commandCard(one.resumed ? `Command that resumed at ${stepText(one.step)}` : "Command", one.command));
  const byName = Object.entries(run.arguments || {}).sort(([a], [b]) => (a < b ? -1 : 1));
  const chosen = [["sampler", run.sampler], ["weighting", run.weighting]];
  const details = [
    ["Sampler", [...chosen, ...Object.entries(run.sampler_options || {})], "small"],
    ["Versions", Object.entries(run.versions || {}), "small"],
    ["Arguments", byName, "full columns"],
  ].filter(([, entries]) => entries.some(([, value]) => value !== undefined));
  document.querySelector('[data-cards="run"]').append(...commands, ...details.map((one) => detailsCard(...one)));
}

function wireToolbar() {
  byId("x-axis").append(choices("x", [["step", "Steps"], ["minutes", "Minutes"]]));
  byId("smoothing-control").hidden = !has("loss");
  byId("smoothing").value = state.smoothing;
  byId("smoothing").addEventListener("input", (event) => {
    keep({ smoothing: Number(event.target.value) });
    drawAll();
  });
  byId("live-control").hidden = finished;
  byId("live").checked = state.live;
  byId("live").addEventListener("change", (event) => keep({ live: event.target.checked }));
  if (!finished) setInterval(() => { if (state.live && !byId("viewer").open) location.reload(); }, 30000);
  wireTheme();
}

wireToolbar();
fillHead();
fillNotices();
fillSummary();
makeCards(listed);
fillValidationTable();
fillPictures();
fillRun();
fillSections();
drawAll();
