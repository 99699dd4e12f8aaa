"use strict";
// What a completion says is only ever set as text, never as markup.
const runs = JSON.parse(document.getElementById("data").textContent);
const space = document.getElementById("blank").namespaceURI;
const FIRST = ["reward", "loss", "objective/scores", "eval_loss", "kl", "entropy", "reward_std", "completions/mean_length",
  "frac_reward_zero_std", "mean_token_accuracy", "grad_norm", "learning_rate"];
const W = 300, H = 100;
const SHADES = { logps: ["log-prob", -6], entropies: ["entropy", 3] }; // and nats of the strongest colour

function make(parent, tag, attributes = {}, text) {
  const vector = ["svg", "path", "line", "rect", "title"].includes(tag);
  const element = vector ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
function labelled(parent, text, tag, attributes, onChange, options) {
  const label = make(parent, "label", {}, text), input = make(label, tag, attributes);
  for (const [value, name] of options || []) make(input, "option", { value }, name);
  input.addEventListener("input", onChange);
  return input;
}
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}

// ---- curves: all have the same range of steps, and the same cursor

const view = { from: null, to: null, smooth: 0 };
const charts = [];
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
function path(chart, points, kind) {
  let line = "", pen = "M";
  for (const point of points) {
    if (point[kind] !== null) line += pen + chart.x(point.step).toFixed(2) + " " + chart.y(point[kind]).toFixed(2) + (pen === "M" ? "h0" : ""); // a dot
    pen = point[kind] === null ? "M" : "L";
  }
  return line;
}
function draw(chart) {
  chart.lines = chart.curves.map(([run, curve]) => {
    const means = smoothed(curve.values, view.smooth), points = curve.steps.map((step, at) => ({ step, raw: curve.values[at], mean: means[at] }));
    return { run, points: points.filter(({ step }) => step >= view.from && step <= view.to) };
  });
  const values = chart.lines.flatMap(({ points }) => points.map(({ raw }) => raw)).filter((value) => value !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const height = high - low || 1, width = view.to - view.from || 1;
  chart.x = (step) => (W * (step - view.from)) / width;
  chart.y = (value) => (high === low ? H / 2 : H - 4 - ((H - 8) * (value - low)) / height);
  chart.svg.replaceChildren();
  for (const { run, points } of chart.lines) {
    const other = run ? " other" : "";
    if (view.smooth) make(chart.svg, "path", { class: "raw" + other, d: path(chart, points, "raw") });
    make(chart.svg, "path", { class: other, d: path(chart, points, "mean") });
  }
  chart.cursor = make(chart.svg, "line", { y1: 0, y2: H, visibility: "hidden" });
  chart.ends.textContent = values.length ? number(low) + " to " + number(high) : "no value in this range";
  show(chart, null);
  chart.svg.setAttribute("aria-label", chart.name + ": " + chart.lines.map(({ run, points }) => runs[run].name + " from " + number(points[0]?.raw) + " to " + number(points.at(-1)?.raw)).join("; "));
}
function show(chart, step) {
  const texts = chart.lines.filter(({ points }) => points.length).map(({ points }) => {
    const nearer = (a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a);
    const near = step === null ? points.at(-1) : points.reduce(nearer);
    return number(near.mean) + (step === null ? "" : " at " + near.step);
  });
  chart.value.textContent = texts.join(" | ");
  chart.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
  if (step !== null) for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(step));
}
function zoom(chart) {
  const stepAt = (event) => {
    const box = chart.svg.getBoundingClientRect();
    return view.from + Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * (view.to - view.from);
  };
  let start = null, mark = null;
  chart.svg.addEventListener("pointerdown", (event) => {
    start = stepAt(event);
    mark = make(chart.svg, "rect", { class: "zoom", y: 0, height: H, x: chart.x(start), width: 0 });
    chart.svg.setPointerCapture(event.pointerId);
  });
  chart.svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    for (const other of charts) show(other, step);
    if (mark) { mark.setAttribute("x", chart.x(Math.min(start, step))); mark.setAttribute("width", Math.abs(chart.x(step) - chart.x(start))); }
  });
  chart.svg.addEventListener("pointerleave", () => charts.forEach((other) => show(other, null)));
  chart.svg.addEventListener("pointerup", (event) => {
    const ends = [start, stepAt(event)].sort((a, b) => a - b);
    if (start !== null && ends[1] - ends[0] > (view.to - view.from) / 50) range(Math.floor(ends[0]), Math.ceil(ends[1]));
    else if (mark) mark.remove();
    start = mark = null;
  });
}
let range = () => {};
function drawCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  names.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  const list = document.getElementById("curve-list"), controls = document.getElementById("curve-controls");
  if (!names.length) { make(list, "p", {}, "Nothing was logged."); return; }
  for (const name of names) {
    const figure = make(list, "figure"), caption = make(figure, "figcaption");
    make(caption, "strong", {}, name);
    const chart = { name, figure, value: make(caption, "span", { class: "soft" }), svg: make(figure, "svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img" }) };
    chart.ends = make(figure, "div", { class: "ends" });
    chart.curves = runs.map((run, at) => [at, run.curves[name]]).filter(([, curve]) => curve);
    charts.push(chart);
    zoom(chart);
  }
  const steps = runs.flatMap((run) => Object.values(run.curves).flatMap((curve) => [curve.steps[0], curve.steps.at(-1)]));
  const whole = [Math.min(...steps), Math.max(...steps)];
  const fromTo = () => range(Number(from.value), Number(to.value));
  const filter = labelled(controls, "metric", "input", { type: "search", placeholder: "part of a name" }, () => {
    for (const chart of charts) chart.figure.hidden = !chart.name.includes(filter.value);
  });
  const smooth = labelled(controls, "smoothing", "input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0 }, () => { view.smooth = Number(smooth.value); charts.forEach(draw); });
  const from = labelled(controls, "steps from", "input", { type: "number" }, fromTo), to = labelled(controls, "to", "input", { type: "number" }, fromTo);
  make(controls, "button", { type: "button" }, "all steps").addEventListener("click", () => range(...whole));
  make(controls, "span", { class: "soft" }, "Drag over a curve to zoom all.");
  range = (first, last) => { if (!(first < last) && first !== whole[0]) return; view.from = first; view.to = last; from.value = first; to.value = last; charts.forEach(draw); };
  range(...whole);
}

// ---- histograms

function drawHistograms() {
  const place = document.getElementById("times");
  for (const run of runs) for (const histogram of run.histograms) {
    const columns = histogram.counts.length, bins = histogram.counts[0].length;
    const title = (histogram.kind === "rewards" ? "Rewards" : "Tokens") + " of completions over time" + (runs.length > 1 ? ", " + run.name : "");
    const figure = make(place, "figure"), caption = make(figure, "figcaption");
    make(caption, "strong", {}, title);
    make(caption, "span", { class: "soft" }, `${number(histogram.low)} (bottom) to ${number(histogram.high)} (top); stronger colour: more often`);
    const svg = make(figure, "svg", { viewBox: `0 0 ${columns} ${bins}`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", role: "img", "aria-label": title });
    histogram.counts.forEach((column, x) => {
      const most = Math.max(...column);
      column.forEach((count, bin) => { if (count) make(svg, "rect", { x, y: bins - 1 - bin, width: 1, height: 1, "fill-opacity": 0.15 + (0.85 * count) / most }); });
    });
    const ends = make(figure, "div", { class: "ends" });
    make(ends, "span", {}, "step " + histogram.steps[0]);
    make(ends, "span", {}, "step " + histogram.steps.at(-1));
  }
}

// ---- completions

function drawTurns(parent, turns) { // answers of tools hang below the turn that called them
  const tree = make(parent, "ul", { class: "tree" });
  let last = null;
  for (const turn of turns) {
    const isAnswer = turn.role === "tool" && last;
    const item = make(isAnswer ? make(last, "ul", { class: "tree" }) : tree, "li");
    make(item, "span", { class: "role" }, turn.role);
    if (turn.text) make(item, "p", { class: "tokens" }, turn.text);
    for (const call of turn.calls) make(item, "p", { class: "tokens tool" }, "calls " + call);
    if (!isAnswer) last = item;
  }
}
function drawText(parent, text) {
  if (typeof text === "string") make(parent, "p", { class: "tokens" }, text);
  else drawTurns(parent, text);
}
function drawCard(parent, row, pieces, title, shade) {
  const advantage = row.numbers.advantage || 0;
  const card = make(parent, "section", { class: "card" + (advantage > 0 ? " up" : advantage < 0 ? " down" : ""), tabindex: 0 });
  const numbers = make(card, "p", { class: "numbers" }, title ? title + " · " : "");
  for (const [name, value] of Object.entries(row.numbers)) { make(numbers, "b", {}, name + " " + number(value)); numbers.append(" · "); }
  numbers.append(row.length + " tokens");
  const tokens = (row.tokens || []).map((token) => pieces[token]);
  if (!shade || !row.tokens) { drawText(card, row.completion ?? tokens.join("")); return; }
  const text = make(card, "p", { class: "tokens" }), byTool = new Set(row.tool);
  tokens.forEach((token, at) => {
    const span = make(text, "span", {}, token);
    if (byTool.has(at)) { span.className = "tool"; return; }
    const known = Object.entries(SHADES).filter(([kind]) => at < row[kind].length);
    if (known.length) span.title = known.map(([kind, [name, full]]) => `${name} ${(Math.sign(full) * row[kind][at]) / 10}`).join(", ");
    if (at < row[shade].length) {
      const strength = Math.min(1, row[shade][at] / 10 / Math.abs(SHADES[shade][1]));
      span.style.background = `color-mix(in srgb, var(--second) ${Math.round(70 * strength)}%, transparent)`;
    }
  });
  if (row.length > row.tokens.length) make(card, "p", { class: "soft" }, row.length - row.tokens.length + " tokens more");
}
function drawAnswers() {
  const list = document.getElementById("answer-list"), controls = document.getElementById("answer-controls");
  const having = runs.map((run, at) => at).filter((at) => runs[at].completions.length);
  if (!having.length) { make(list, "p", {}, "No completions were written: the method does not generate, or the run wrote none."); return; }
  const redraw = () => {
    list.replaceChildren();
    for (const [text, rows] of order.value === "step" ? ofStep() : ofPrompt()) {
      make(list, "h3", {}, "Prompt");
      drawText(list, text);
      const cards = make(list, "div", { class: "cards", style: "margin-top: .6rem" });
      for (const [title, row] of rows) drawCard(cards, row, runs[run.value].pieces, title, shade.value);
    }
  };
  const choose = () => {
    const parts = runs[run.value].completions, seen = new Map();
    slider.max = parts.length - 1;
    slider.value = parts.length - 1;
    for (const part of parts) for (const row of part.rows) {
      const key = JSON.stringify(row.prompt);
      if (!seen.has(key)) seen.set(key, { row, steps: new Set() });
      seen.get(key).steps.add(part.step);
    }
    prompt.replaceChildren();
    for (const [key, { row, steps }] of [...seen].sort((a, b) => b[1].steps.size - a[1].steps.size)) {
      const text = typeof row.prompt === "string" ? row.prompt : row.prompt.map((turn) => turn.text).join(" ");
      make(prompt, "option", { value: key }, `${text.slice(-60)} (${steps.size} ${steps.size > 1 ? "steps" : "step"})`);
    }
    redraw();
  };
  const run = labelled(controls, "run", "select", {}, choose, having.map((at) => [at, runs[at].name]));
  run.parentElement.hidden = having.length < 2;
  const order = labelled(controls, "show", "select", {}, redraw, [["step", "a step, its groups side by side"], ["prompt", "a prompt over time"]]);
  const slider = labelled(controls, "step", "input", { type: "range", min: 0 }, redraw), step = make(slider.parentElement, "output");
  const prompt = labelled(controls, "prompt", "select", {}, redraw);
  const shades = Object.entries(SHADES).map(([kind, [name]]) => [kind, name]);
  const shade = labelled(controls, "shade tokens by", "select", {}, redraw, [["", "nothing"], ...shades]);
  const ofStep = () => { // prompts with their rows: those of a group
    const part = runs[run.value].completions[slider.value], groups = new Map();
    step.textContent = part.step;
    for (const row of part.rows) groups.set(row.group, [...(groups.get(row.group) || []), ["", row]]);
    return [...groups.values()].map((rows) => [rows[0][1].prompt, rows]);
  };
  const ofPrompt = () => {
    const same = (row) => JSON.stringify(row.prompt) === prompt.value;
    const rows = runs[run.value].completions.flatMap((part) => part.rows.filter(same).map((row) => ["step " + part.step, row]));
    return rows.length ? [[rows[0][1].prompt, rows]] : [];
  };
  order.addEventListener("input", () => {
    slider.parentElement.hidden = order.value !== "step";
    prompt.parentElement.hidden = order.value === "step";
  });
  prompt.parentElement.hidden = true;
  choose();
}

drawCurves();
drawHistograms();
drawAnswers();
