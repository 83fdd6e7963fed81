"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const said = document.getElementById("said");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const number = v => v == null ? "–" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(3).replace(/\.?0+e/, "e") : String(+v.toPrecision(5));
const charts = data.charts || [], marks = data.marks || {}, plots = [];
let at = [0, 0], whole = [Infinity, -Infinity];
for (const chart of charts) whole = [Math.min(whole[0], chart.x[0]), Math.max(whole[1], chart.x[chart.x.length - 1])];
const incidents = marks.incidents || [[], [], []];
for (const step of incidents[0]) whole = [Math.min(whole[0], step), Math.max(whole[1], step)];
if (whole[0] === whole[1]) whole = [whole[0] - 1, whole[1] + 1];
const order = incidents[0].map((_, n) => n).sort((a, b) => incidents[0][a] - incidents[0][b]);

function open(n) {
  const card = document.getElementById("card-" + incidents[1][n]);
  if (!card) return;
  document.querySelectorAll(".chosen").forEach(other => other.classList.remove("chosen"));
  card.open = true; card.classList.add("chosen");
  const line = card.querySelector(".chosen-step");
  line.hidden = false; line.textContent = "Selected on the timeline: step " + incidents[0][n] + ".";
  card.scrollIntoView({block: "start"}); card.querySelector("summary").focus({preventScroll: true});
}
function nearest(step, most) {
  let low = 0, high = order.length;
  while (low < high) { const middle = (low + high) >> 1; if (incidents[0][order[middle]] < step) low = middle + 1; else high = middle; }
  const found = [low - 1, low].filter(i => i >= 0 && i < order.length).map(i => order[i])
    .sort((a, b) => Math.abs(incidents[0][a] - step) - Math.abs(incidents[0][b] - step))[0];
  return found !== undefined && Math.abs(incidents[0][found] - step) <= most ? found : undefined;
}
function lines(u, steps, name, from, to, width, dash) {
  const c = u.ctx, {left, top, width: w, height: h} = u.bbox, seen = new Set();
  c.save(); c.strokeStyle = colour(name); c.lineWidth = width * devicePixelRatio; c.setLineDash((dash || []).map(d => d * devicePixelRatio));
  c.beginPath();
  for (const step of steps) {
    if (step < u.scales.x.min || step > u.scales.x.max) continue;
    const x = Math.round(u.valToPos(step, "x", true));
    if (seen.has(x) || x < left || x > left + w) continue;
    seen.add(x); c.moveTo(x, top + h * from); c.lineTo(x, top + h * to);
  }
  c.stroke(); c.restore();
}
function draw(u) {
  const c = u.ctx, {left, top, width: w, height: h} = u.bbox, [from, to] = [u.scales.x.min, u.scales.x.max];
  const back = (marks.rollbacks || []).filter(r => r[1] >= from && r[0] <= to), rates = (marks.rates || []).filter(r => r[0] >= from && r[0] <= to);
  const many = back.length + rates.length > w / devicePixelRatio / 12;  // lanes at the top then, so that the curve can be seen
  c.save(); c.fillStyle = colour("roll"); c.globalAlpha = many ? 0.5 : 0.16;
  for (const [first, last] of back) {
    const x = Math.max(u.valToPos(first, "x", true), left), end = Math.min(u.valToPos(last, "x", true), left + w);
    if (end >= x) c.fillRect(x, top, Math.max(end - x, 2), many ? h * 0.06 : h);
  }
  c.restore();
  if (!many) lines(u, back.map(r => r[1]), "roll", 0, 1, 1.5);
  lines(u, rates.map(r => r[0]), "good", many ? 0.08 : 0, many ? 0.14 : 1, 1.5, many ? [] : [5, 4]);
  lines(u, marks.overflows || [], "warn", 0.9, 1, 1);
  lines(u, marks.refused || [], "bad", 0.88, 1, 1);
  lines(u, incidents[0], "bad", 0.88, 1, 2);
}
function zoom(min, max) {
  const span = Math.max(max - min, 4), most = whole[1] - whole[0];
  if (span >= most) [min, max] = whole; else {
    const middle = (min + max) / 2; min = Math.max(whole[0], middle - span / 2); max = Math.min(whole[1], min + span); min = max - span;
  }
  at = [min, max];
  for (const u of plots) u.setScale("x", {min, max});
  if (said) said.textContent = "Steps " + Math.round(min) + " to " + Math.round(max) + ".";
}
function view() { return at; }
function follow(u, key) {
  const {min, max} = u.scales.x;
  if (key === "x" && plots.length === charts.length && Math.abs(min - at[0]) + Math.abs(max - at[1]) > (max - min) * 1e-6) zoom(min, max);
}
const moves = {
  in: () => { const [a, b] = view(); zoom(a + (b - a) / 4, b - (b - a) / 4); }, out: () => { const [a, b] = view(); zoom(a - (b - a) / 2, b + (b - a) / 2); },
  left: () => { const [a, b] = view(); zoom(a - (b - a) / 3, b - (b - a) / 3); }, right: () => { const [a, b] = view(); zoom(a + (b - a) / 3, b + (b - a) / 3); },
  all: () => zoom(...whole),
};
function plot(chart, box) {
  const axis = {stroke: () => colour("dim"), grid: {stroke: () => colour("line"), width: 1}, ticks: {stroke: () => colour("line")}};
  const value = (u, v) => number(v), every = Math.ceil(chart.decades / 6), points = {show: chart.x.length < 60}, undone = chart.undone ? [chart.undone] : [];
  const powers = (u, splits) => splits.map(v => {
    const power = Math.log10(v);
    return Math.abs(power - Math.round(power)) < 1e-6 && Math.round(power) % every === 0 ? v : null;
  });
  const sparse = chart.log ? {filter: powers, grid: {...axis.grid, filter: powers}, ticks: {...axis.ticks, filter: powers}} : {};
  const u = new uPlot({
    width: box.clientWidth || 300, height: 170, cursor: {sync: {key: "steps", scales: ["x", null]}, drag: {x: true, y: false}},
    scales: {x: {time: false, range: (u, a, b) => a == null ? whole : [a, b]}, y: chart.log ? {distr: 3} : {}},
    padding: [8, 26, 0, 0], axes: [{...axis, size: 30, space: 90, values: (u, ticks) => ticks.map(t => Number.isInteger(t) ? t.toLocaleString("en") : "")}, {...axis, ...sparse, size: 66, values: (u, ticks) => ticks.map(t => t == null ? "" : number(t))}],
    series: [{label: "step", value: (u, v) => v == null ? "–" : String(v)},
      {label: "highest", stroke: () => colour("accent"), width: 1.2, value, points},
      {label: "lowest", stroke: () => colour("accent"), width: 1.2, value, points},
      ...undone.map(() => ({label: "undone", stroke: () => colour("roll"), width: 1.2, value, points}))],
    bands: [{series: [1, 2], fill: () => colour("band")}],
    hooks: {drawAxes: [draw], setScale: [follow],
      ready: [u => {
        u.over.addEventListener("click", () => {
          if (u.cursor.left < 0) return;
          const [a, b] = view(), n = nearest(u.posToVal(u.cursor.left, "x"), (b - a) / u.over.clientWidth * 8);
          if (n !== undefined) open(n);
        });
        u.over.addEventListener("dblclick", moves.all);
      }]},
  }, [chart.x, chart.high, chart.low, ...undone], box);
  box.addEventListener("keydown", event => {
    const here = u.cursor.idx ?? 0, go = n => {
      const i = Math.max(0, Math.min(chart.x.length - 1, n));
      u.setCursor({left: u.valToPos(chart.x[i], "x"), top: u.valToPos(chart.high[i] ?? chart.undone?.[i] ?? 0, "y")});
      const near = nearest(chart.x[i], (view()[1] - view()[0]) / 200);
      said.textContent = "Step " + chart.x[i] + ": " + chart.title + " " + number(chart.low[i]) + (chart.low[i] === chart.high[i] ? "" : " to " + number(chart.high[i])) + (chart.undone?.[i] == null ? "" : ", undone " + number(chart.undone[i])) + (near === undefined ? "" : ". Incident at step " + incidents[0][near] + "; Enter opens it");
    };
    const fast = event.shiftKey ? 20 : 1;
    const keys = {ArrowRight: () => go(here + fast), ArrowLeft: () => go(here - fast), Home: () => go(0), End: () => go(chart.x.length - 1), "+": moves.in, "=": moves.in, "-": moves.out, "0": moves.all,
      Enter: () => { const n = nearest(chart.x[here], whole[1]); if (n !== undefined) open(n); }};
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
  });
  return u;
}
function legend() {
  const list = document.getElementById("legend");
  if (!list) return;
  list.textContent = "";
  for (const [name, text, count] of [["bad", "skipped or reported", incidents[0].length + (marks.refused || []).length], ["warn", "float16 overflow", marks.overflow_count],
    ["roll", "rolled back", (marks.rollbacks || []).length], ["good", "learning rate changed", (marks.rates || []).length]]) {
    if (!count) continue;
    const item = document.createElement("li"), square = document.createElement("i");
    square.style.background = colour(name); item.append(square, text + ": " + count.toLocaleString("en")); list.append(item);
  }
}
const boxes = document.querySelectorAll(".plot");
charts.forEach((chart, n) => plots.push(plot(chart, boxes[n])));
if (plots.length) { zoom(...whole); said.textContent = ""; }
legend();
document.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", moves[button.dataset.zoom]));
document.querySelectorAll("[data-copy]").forEach(button => button.addEventListener("click", async () => {
  const code = button.previousElementSibling;
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); button.textContent = "Selected: press Ctrl+C"; }
}));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; plots.forEach((u, n) => u.setSize({width: boxes[n].clientWidth, height: 170})); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { plots.forEach(u => u.redraw()); legend(); });
document.documentElement.dataset.ready = "yes";
})();
