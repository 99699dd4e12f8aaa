"use strict";
// What a completion says is only ever set as text, never as markup.
const runs = JSON.parse(document.getElementById("data").textContent);
const space = new DOMParser().parseFromString("<svg>", "text/html").body.firstChild.namespaceURI;
const FIRST = ["reward", "loss", "objective/scores", "eval_loss", "kl", "entropy", "reward_std", "completions/mean_length",
  "frac_reward_zero_std", "mean_token_accuracy", "grad_norm", "learning_rate"];
const SHADES = { logps: ["log-prob", -6], entropies: ["entropy", 3] }; // and nats of the strongest colour

function make(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS(tag === "svg" ? space : parent.namespaceURI, tag); // HTML in HTML, SVG in SVG
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function plot(list, name) {
  const figure = make(list, "figure"), caption = make(figure, "figcaption");
  make(caption, "strong", {}, name);
  const note = make(caption, "span", { class: "soft" });
  const svg = make(figure, "svg", { preserveAspectRatio: "none", role: "img", "aria-label": name });
  return { name, figure, note, svg, ends: make(figure, "div", { class: "ends" }) };
}

// ---- curves: all show the range of steps of the controls, and the step below the pointer

const curveControls = document.getElementById("curve-controls"), { metric, smoothing, from, to, all } = curveControls.elements;
const charts = [];
function pointsOf(curve, weight) { // with means, which weigh the newest value most
  let sum = 0;
  return curve.map(([step, raw], at) => {
    sum = weight * sum + (1 - weight) * raw;
    return { step, raw, mean: sum / (1 - weight ** (at + 1)) };
  });
}
function drawCurves() { // steps are coordinates of the pictures; values, which may be too small for that, are scaled
  const [first, last] = [from, to].map((end) => Number(end.value)), weight = Number(smoothing.value);
  for (const chart of charts) {
    chart.figure.hidden = !chart.name.includes(metric.value);
    chart.lines = chart.curves.map((curve) => pointsOf(curve, weight).filter(({ step }) => step >= first && step <= last));
    const values = chart.lines.flat().map(({ raw }) => raw);
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 0];
    const y = (value) => (high > low ? 4 + (92 * (high - value)) / (high - low) : 50).toFixed(2);
    chart.svg.setAttribute("viewBox", [first, 0, Math.max(last - first, 1), 100].join(" "));
    chart.svg.replaceChildren();
    chart.lines.forEach((points, run) => {
      for (const kind of weight ? ["raw", "mean"] : ["mean"]) {
        const d = points.map((point, at) => `${at ? "L" : "M"}${point.step} ${y(point[kind])}h0`).join(""); // of one point: a dot
        make(chart.svg, "path", { class: kind + (run ? " other" : ""), d });
      }
    });
    chart.cursor = make(chart.svg, "rect", { class: "cursor", height: 100 });
    chart.ends.textContent = values.length ? number(low) + " to " + number(high) : "no value in this range";
  }
  show(last);
}
function show(step, start = step) { // the values at a step, and the range that is dragged over
  const nearer = (a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a);
  for (const { lines, note, cursor } of charts) {
    const points = lines.filter((line) => line.length).map((line) => line.reduce(nearer));
    note.textContent = points.map((point) => number(point.mean) + (step < to.value ? " at " + point.step : "")).join(" | ");
    cursor.setAttribute("x", Math.min(step, start));
    cursor.setAttribute("width", Math.abs(step - start) || (to.value - from.value) / 300);
  }
}
function follow(svg) { // the pointer: all curves show its step, and zoom to the steps that it is dragged over
  let start;
  const on = (kind, react) => svg.addEventListener(kind, (event) => {
    const { x } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    react(Math.min(Math.max(x, from.value), to.value), event);
  });
  on("pointerdown", (step, event) => { start = step; svg.setPointerCapture(event.pointerId); });
  on("pointermove", (step) => show(step, start));
  on("pointerleave", () => show(Number(to.value)));
  on("pointerup", (step) => {
    const [first, last] = [step, start ?? step].sort((a, b) => a - b);
    start = undefined;
    if (last - first > (to.value - from.value) / 50) zoom(Math.floor(first), Math.ceil(last));
  });
}
function zoom(first, last) {
  [from.value, to.value] = [first, last];
  drawCurves();
}
const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
for (const name of names.sort((a, b) => place(a) - place(b) || a.localeCompare(b))) {
  const chart = plot(document.getElementById("curve-list"), name);
  charts.push(chart);
  chart.curves = runs.map((run) => run.curves[name] || []);
  follow(chart.svg);
}
const steps = charts.flatMap(({ curves }) => curves.flat().map(([step]) => step));
const showAll = () => zoom(steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), 0));
curveControls.addEventListener("input", drawCurves);
all.addEventListener("click", showAll);
showAll();

// ---- histograms

for (const { name, histograms } of runs) for (const [kind, { low, high, steps, counts }] of Object.entries(histograms)) {
  const title = { rewards: "Rewards", lengths: "Tokens" }[kind] + " of completions over time, " + name;
  const { note, svg, ends } = plot(document.getElementById("times"), title);
  note.textContent = `${number(low)} (bottom) to ${number(high)} (top); stronger colour: more often`;
  svg.setAttribute("viewBox", `0 0 ${counts.length} ${counts[0].length}`);
  counts.forEach((column, x) => column.reverse().forEach((count, y) => {
    if (count) make(svg, "rect", { x, y, width: 1, height: 1, "fill-opacity": 0.15 + (0.85 * count) / Math.max(...column) });
  }));
  for (const step of [steps[0], steps.at(-1)]) make(ends, "span", {}, "step " + step);
}

// ---- completions

const answerControls = document.getElementById("answer-controls"), { shown, shade } = answerControls.elements;
const plain = (content) => (typeof content === "string" ? content : JSON.stringify(content));
function drawText(parent, text) { // or messages: answers of tools hang below the message that called them
  if (typeof text === "string") { make(parent, "p", { class: "tokens" }, text); return; }
  const tree = make(parent, "ul", { class: "tree" });
  let last = parent;
  for (const { role, content, tool_calls } of text) {
    const item = make(role === "tool" ? make(last, "ul", { class: "tree" }) : tree, "li");
    make(item, "span", { class: "role" }, role);
    if (content) make(item, "p", { class: "tokens" }, plain(content));
    for (const call of tool_calls || []) {
      const { name, arguments: values } = call.function || call;
      make(item, "p", { class: "tokens tool" }, `calls ${name}(${JSON.stringify(values)})`);
    }
    if (role !== "tool") last = item;
  }
}
function drawCard(parent, row) {
  const { advantage } = row.numbers;
  const card = make(parent, "section", { class: "card" + (advantage > 0 ? " up" : advantage < 0 ? " down" : ""), tabindex: 0 });
  const numbers = make(card, "p", { class: "numbers" }, `step ${row.step} · `);
  for (const [name, value] of Object.entries(row.numbers)) { make(numbers, "b", {}, name + " " + number(value)); numbers.append(" · "); }
  numbers.append(row.length + " tokens");
  if (!shade.value) { drawText(card, row.completion); return; }
  const text = make(card, "p", { class: "tokens" });
  row.texts.forEach((token, at) => {
    const span = make(text, "span", {}, token), value = row[shade.value][at];
    if (row.tool[at]) { span.className = "tool"; return; }
    span.title = Object.entries(SHADES).map(([kind, [name]]) => name + " " + number(row[kind][at])).join(", ");
    const strength = Math.min(1, value / SHADES[shade.value][1]);
    if (value !== undefined) span.style.background = `color-mix(in srgb, var(--second) ${Math.round(70 * strength)}%, transparent)`;
  });
  if (row.length > row.texts.length) make(card, "p", { class: "soft" }, row.length - row.texts.length + " tokens more");
}
for (const { name, completions } of runs) { // options: a step with its groups side by side, or all that a prompt got
  const add = (title, groups) => Object.assign(make(shown, "option", {}, `${name}: ${title}`), { groups });
  for (const [step, rows] of [...Map.groupBy(completions, (row) => row.step)].reverse())
    add("step " + step, [...Map.groupBy(rows, (row) => row.group).values()]);
  const prompts = Map.groupBy(completions, (row) => JSON.stringify(row.prompt));
  for (const rows of [...prompts.values()].sort((a, b) => b.length - a.length)) {
    const text = [rows[0].prompt].flat().map((turn) => plain(turn.content ?? turn)).join(" ");
    add(`${text.slice(-60)} (${rows.length} completions)`, [rows]);
  }
}
function drawAnswers() {
  const list = document.getElementById("answer-list");
  list.replaceChildren();
  for (const rows of shown.selectedOptions[0]?.groups || []) {
    make(list, "h3", {}, "Prompt");
    drawText(list, rows[0].prompt);
    const cards = make(list, "div", { class: "cards" });
    for (const row of rows) drawCard(cards, row);
  }
}
answerControls.addEventListener("input", drawAnswers);
drawAnswers();
