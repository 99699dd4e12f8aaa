"use strict";
// What a completion says is only ever set as text, never as markup.
const runs = JSON.parse(document.getElementById("data").textContent);
const space = document.getElementById("blank").namespaceURI;
const FIRST = ["reward", "loss", "objective/scores", "eval_loss", "kl", "entropy", "reward_std", "completions/mean_length",
  "frac_reward_zero_std", "mean_token_accuracy", "grad_norm", "learning_rate"];
const W = 300, H = 100;
const SHADES = { logps: ["log-prob", -6], entropies: ["entropy", 3] }; // and nats of the strongest colour

function make(parent, tag, attributes = {}, text) {
  const vector = ["svg", "path", "rect"].includes(tag);
  const element = vector ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function plot(list, name, width, height) {
  const figure = make(list, "figure"), caption = make(figure, "figcaption");
  make(caption, "strong", {}, name);
  const note = make(caption, "span", { class: "soft" });
  const svg = make(figure, "svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": name });
  return { name, figure, note, svg, ends: make(figure, "div", { class: "ends" }) };
}

// ---- curves: all show the range of steps of the controls, and the step below the pointer

const curveControls = document.getElementById("curve-controls"), { metric, smoothing, from, to, all } = curveControls.elements;
const charts = [];
function pointsOf({ steps, values }, weight) { // with means, which weigh the newest value most
  let mean = 0, mass = 0;
  return steps.map((step, at) => {
    mean = weight * mean + (1 - weight) * values[at];
    mass = weight * mass + (1 - weight);
    return { step, raw: values[at], mean: mean / mass };
  });
}
function draw(chart) {
  const [first, last] = [from, to].map((end) => Number(end.value)), weight = Number(smoothing.value);
  chart.figure.hidden = !chart.name.includes(metric.value);
  chart.lines = chart.curves.map(([run, curve]) => [run, pointsOf(curve, weight).filter(({ step }) => step >= first && step <= last)]);
  const values = chart.lines.flatMap(([, points]) => points.map(({ raw }) => raw));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const height = high - low, width = last - first || 1;
  chart.x = (step) => (W * (step - first)) / width;
  chart.step = (share) => first + Math.min(Math.max(share, 0), 1) * width;
  chart.svg.replaceChildren();
  for (const [run, points] of chart.lines) for (const kind of weight ? ["raw", "mean"] : ["mean"]) {
    const y = (value) => (height ? H - 4 - ((H - 8) * (value - low)) / height : H / 2);
    const places = points.map((point) => chart.x(point.step).toFixed(2) + " " + y(point[kind]).toFixed(2));
    make(chart.svg, "path", { class: kind + (run ? " other" : ""), d: places.length ? `M${places.join("L")}h0` : "" }); // of one point: a dot
  }
  chart.cursor = make(chart.svg, "rect", { class: "cursor", height: H });
  chart.ends.textContent = values.length ? number(low) + " to " + number(high) : "no value in this range";
  show(chart, null);
  chart.svg.setAttribute("aria-label", chart.name + ": " + chart.lines.map(([run, points]) => runs[run].name + " from " + number(points[0]?.raw) + " to " + number(points.at(-1)?.raw)).join("; "));
}
function show(chart, step, start = step) { // the values at a step, and the range that is dragged over
  const texts = chart.lines.filter(([, points]) => points.length).map(([, points]) => {
    const nearer = (a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a);
    const near = step === null ? points.at(-1) : points.reduce(nearer);
    return number(near.mean) + (step === null ? "" : " at " + near.step);
  });
  chart.note.textContent = texts.join(" | ");
  const [first, last] = [step, start].map((end) => chart.x(end ?? 0)).sort((a, b) => a - b);
  chart.cursor.setAttribute("x", first);
  chart.cursor.setAttribute("width", step === null ? 0 : Math.max(1, last - first));
}
function follow(chart) { // the pointer: all curves show its step, and zoom to the steps that it is dragged over
  let start = null;
  const on = (kind, react) => chart.svg.addEventListener(kind, (event) => {
    const box = chart.svg.getBoundingClientRect();
    react(chart.step((event.clientX - box.left) / box.width), event);
  });
  on("pointerdown", (step, event) => { start = step; chart.svg.setPointerCapture(event.pointerId); });
  on("pointermove", (step) => charts.forEach((other) => show(other, step, start ?? step)));
  on("pointerleave", () => charts.forEach((other) => show(other, null)));
  on("pointerup", (step) => {
    const [first, last] = [step, start ?? step].sort((a, b) => a - b);
    start = null;
    if (last - first > (to.value - from.value) / 50) zoom(Math.floor(first), Math.ceil(last));
  });
}
function zoom(first, last) {
  from.value = first;
  to.value = last;
  charts.forEach(draw);
}
function drawCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))], list = document.getElementById("curve-list");
  const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  for (const name of names.sort((a, b) => place(a) - place(b) || a.localeCompare(b))) {
    const chart = plot(list, name, W, H);
    chart.curves = runs.map((run, at) => [at, run.curves[name]]).filter(([, curve]) => curve);
    charts.push(chart);
    follow(chart);
  }
  const steps = runs.flatMap((run) => Object.values(run.curves).flatMap((curve) => [curve.steps[0], curve.steps.at(-1)]));
  const showAll = () => zoom(Math.min(...steps), Math.max(...steps));
  curveControls.addEventListener("input", () => charts.forEach(draw));
  all.addEventListener("click", showAll);
  showAll();
}

// ---- histograms

function drawHistograms() {
  for (const run of runs) for (const { kind, low, high, steps, counts } of run.histograms) {
    const title = (kind === "rewards" ? "Rewards" : "Tokens") + " of completions over time" + (runs.length > 1 ? ", " + run.name : "");
    const bins = counts[0].length, { note, svg, ends } = plot(document.getElementById("times"), title, counts.length, bins);
    note.textContent = `${number(low)} (bottom) to ${number(high)} (top); stronger colour: more often`;
    counts.forEach((column, x) => column.forEach((count, bin) => {
      if (count) make(svg, "rect", { x, y: bins - 1 - bin, width: 1, height: 1, "fill-opacity": 0.15 + (0.85 * count) / Math.max(...column) });
    }));
    for (const step of [steps[0], steps.at(-1)]) make(ends, "span", {}, "step " + step);
  }
}

// ---- completions

const plain = (content) => (typeof content === "string" ? content : JSON.stringify(content));
function drawText(parent, text) { // or messages: answers of tools hang below the message that called them
  if (typeof text === "string") { make(parent, "p", { class: "tokens" }, text); return; }
  const tree = make(parent, "ul", { class: "tree" });
  let last = null;
  for (const { role, content, tool_calls } of text) {
    const isAnswer = role === "tool" && last;
    const item = make(isAnswer ? make(last, "ul", { class: "tree" }) : tree, "li");
    make(item, "span", { class: "role" }, role);
    if (content) make(item, "p", { class: "tokens" }, plain(content));
    for (const call of tool_calls || []) {
      const { name, arguments: values } = call.function || call;
      make(item, "p", { class: "tokens tool" }, `calls ${name}(${JSON.stringify(values)})`);
    }
    if (!isAnswer) last = item;
  }
}
function drawCard(parent, row, title, shade) {
  const advantage = row.numbers.advantage || 0;
  const card = make(parent, "section", { class: "card" + (advantage > 0 ? " up" : advantage < 0 ? " down" : ""), tabindex: 0 });
  const numbers = make(card, "p", { class: "numbers" }, title);
  for (const [name, value] of Object.entries(row.numbers)) { make(numbers, "b", {}, name + " " + number(value)); numbers.append(" · "); }
  numbers.append(row.length + " tokens");
  if (!shade || !row.tokens.length) { drawText(card, row.completion); return; }
  const text = make(card, "p", { class: "tokens" });
  row.tokens.forEach((token, at) => {
    const span = make(text, "span", {}, token);
    if (row.tool.includes(at)) { span.className = "tool"; return; }
    span.title = Object.entries(SHADES).filter(([kind]) => at < row[kind].length).map(([kind, [name]]) => name + " " + number(row[kind][at])).join(", ");
    const strength = Math.min(1, row[shade][at] / SHADES[shade][1]);
    if (at < row[shade].length) span.style.background = `color-mix(in srgb, var(--second) ${Math.round(70 * strength)}%, transparent)`;
  });
  if (row.length > row.tokens.length) make(card, "p", { class: "soft" }, row.length - row.tokens.length + " tokens more");
}
const answerControls = document.getElementById("answer-controls"), { run, shown, part, step, shade } = answerControls.elements;
const having = runs.filter((run) => run.completions.length), keyOf = (row) => JSON.stringify(row.prompt);
function listPrompts() {
  const parts = having[run.selectedIndex].completions, steps = new Map();
  part.max = part.value = parts.length - 1;
  for (const { rows } of parts) for (const key of new Set(rows.map(keyOf))) steps.set(key, (steps.get(key) || 0) + 1);
  shown.replaceChildren();
  make(shown, "option", { value: "" }, "a step, its groups side by side");
  for (const [key, count] of [...steps].sort((a, b) => b[1] - a[1])) {
    const text = [JSON.parse(key)].flat().map((turn) => plain(turn.content ?? turn)).join(" ");
    make(shown, "option", { value: key }, `${text.slice(-60)} (${count} ${count > 1 ? "steps" : "step"})`);
  }
}
function drawAnswers() { // the groups of a step, or all completions of a prompt
  const parts = having[run.selectedIndex].completions, groups = new Map(), list = document.getElementById("answer-list");
  const add = (group, title, row) => groups.set(group, [...(groups.get(group) || []), [title, row]]);
  if (shown.value) for (const { step, rows } of parts) rows.filter((row) => keyOf(row) === shown.value).forEach((row) => add(0, `step ${step} · `, row));
  else for (const row of parts[part.value].rows) add(row.group, "", row);
  step.value = parts[part.value].step;
  part.parentElement.hidden = shown.value;
  list.replaceChildren();
  for (const rows of groups.values()) {
    make(list, "h3", {}, "Prompt");
    drawText(list, rows[0][1].prompt);
    const cards = make(list, "div", { class: "cards" });
    for (const [title, row] of rows) drawCard(cards, row, title, shade.value);
  }
}

drawCurves();
drawHistograms();
if (having.length) {
  run.parentElement.hidden = having.length < 2;
  run.addEventListener("input", listPrompts);
  answerControls.addEventListener("input", drawAnswers);
  listPrompts();
  drawAnswers();
}
