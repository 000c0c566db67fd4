let charts = [], samples = [], right = [], above = 0, endings = {};  // what the page shows, as the server wrote it
let steps = [], rewards = [], columns = [], played = false, FIRST = 20, limit = 0;
const element = id => document.getElementById(id);
const shown = (value, share) => share ? +(100 * value).toPrecision(4) + "%" : String(+value.toPrecision(4));

// Curves: uPlot draws each figure when it comes into view, in place of the drawing that is there without a script.
const plots = new Map(), waiting = new Set(), HEIGHT = 210;
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const figures = () => [...document.querySelectorAll("#curves figure")];
const ONE_TWO_FIVE = low => Array.from({ length: 16 }, (_, power) => [1, 2, 5].map(n => +(n + "e" + (power + low)))).flat();
const placed = line => "--line" + line % 6;
function drawn(chart) {  // columns of uPlot's data, how each is drawn, and the areas between two of them
  const tables = [], series = [{}], bands = [], first = [];
  const add = (steps, values, how) => { tables.push([steps, values]); return series.push(how) - 1; };
  chart.lines.forEach(([name, steps, values], place) => {
    const { kind, bold, low, high } = chart.more[place], stroke = colour(placed(place));
    const curve = kind === "curve", few = steps.length < 30 && !bold;
    if (curve && low) {
      const edges = [high, low].map(edge => add(steps, edge, { width: 0, points: { show: false }, spanGaps: true }));
      bands.push({ series: edges, fill: stroke + "2a" });
    }
    first.push(add(steps, values, {
      stroke: bold ? stroke + "59" : stroke, width: bold ? 1 : 2, spanGaps: true, dash: kind === "level" ? [6, 4] : [],
      paths: kind === "dots" ? () => null : undefined,
      points: { show: kind === "dots" || curve && few, size: kind === "dots" ? 8 : 4, fill: stroke, stroke, width: 0 } }));
    if (bold) add(steps, bold, { stroke, width: 2, spanGaps: true, points: { show: false } });
  });
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands, first };
}
function stacked(chart) {  // shares on top of each other
  const data = uPlot.join(chart.lines.map(([, steps, values]) => [steps, values])), raw = data.slice(1);
  const most = chart.share ? 1 : Infinity;
  const sums = raw.map((_, place) => data[0].map((_, at) =>
    Math.min(most, raw.slice(0, place + 1).reduce((sum, values) => sum + (values[at] ?? 0), 0))));
  const fill = place => colour(placed(place)) + "c0";
  const series = [{}, ...raw.map((_, place) => ({ width: 0, points: { show: false }, fill: place ? undefined : fill(0) }))];
  const bands = raw.slice(1).map((_, place) => ({ series: [place + 2, place + 1], fill: fill(place + 1) }));
  return { data: [data[0], ...sums], series, bands, raw };
}
function range(chart, low, high) {
  if (low == null) return [0, 1];
  if (chart.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (chart.stacked && chart.share) return [0, 1];
  if (low === high) return low ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [0, 1];
  const room = (high - low) * 0.06;
  return [chart.zero && low === 0 ? 0 : low - room, chart.share && high <= 1 ? Math.min(1, high + room) : high + room];
}
function label(chart, value, step) {
  const digits = size => Math.min(12, Math.max(0, -Math.floor(Math.log10(size) + 1e-9)));
  if (chart.share) return (100 * value).toFixed(digits(100 * step)) + "%";
  const size = Math.abs(value);
  if (size >= 1e6 || step < 1e-4) return value ? (+value.toPrecision(4)).toExponential() : "0";
  return value.toLocaleString("en", { minimumFractionDigits: digits(step), maximumFractionDigits: digits(step) });
}
function bars(plot, chart, found) {  // intervals through dots
  chart.more.forEach(({ kind, low, high }, place) => {
    if (kind !== "dots" || !low) return;
    const at = value => plot.valToPos(value, "y", true), pen = plot.ctx;
    pen.save();
    pen.strokeStyle = colour(placed(place));
    pen.lineWidth = 2 * devicePixelRatio;
    chart.lines[place][1].slice(0, low.length).forEach((step, i) => {
      const x = plot.valToPos(step, "x", true);
      pen.beginPath(); pen.moveTo(x, at(low[i])); pen.lineTo(x, at(high[i])); pen.stroke();
    });
    pen.restore();
  });
}
function told(plot, figure) {  // the values at the pointer, in words
  const { chart, found } = plots.get(figure) || {}, at = plot.cursor.idx, output = figure.querySelector("output");
  if (!chart || at == null || plot.cursor.left < 0) { output.textContent = ""; return; }
  const values = found.raw || found.first.map(place => plot.data[place]);
  const words = chart.lines.map(([name], place) => values[place][at] == null ? null
    : name + " " + shown(values[place][at], chart.share)).filter(Boolean);
  output.textContent = words.length ? "step " + plot.data[0][at] + ": " + words.join(", ") : "";
}
function plot(figure, chart) {
  const svg = figure.querySelector("svg.plot"), found = chart.stacked ? stacked(chart) : drawn(chart);
  const quiet = colour("--quiet"), grid = { stroke: colour("--edge"), width: 1 }, font = "11px system-ui, sans-serif";
  const axis = { stroke: quiet, grid, ticks: { show: false }, font };
  const highest = () => Math.max(...plots.get(figure).chart.lines.flatMap(([, steps]) => steps.at(-1) ?? 0));
  const drawing = new uPlot({
    width: figure.clientWidth - 28, height: svg ? svg.clientHeight || HEIGHT : HEIGHT,
    padding: [8, 12, 0, 0], legend: { show: false }, series: found.series, bands: found.bands,
    scales: { x: { time: false, range: (u, low, high) => low === high ? [low - 0.5, high + 0.5] : [low, high] },
      y: { range: (u, low, high) => range(chart, low, high) } },
    axes: [{ ...axis, size: 26, incrs: ONE_TWO_FIVE(0),
      values: (u, ticks) => ticks.map(tick => tick.toLocaleString("en")) },
    { ...axis, incrs: ONE_TWO_FIVE(-9).concat(ONE_TWO_FIVE(7)), label: chart.axis, labelFont: font, labelSize: 18, labelGap: 2,
      size: (u, texts) => 10 + 6.4 * Math.max(2, ...(texts || []).map(text => text.length)),
      values: (u, ticks, i, space, step) => ticks.map(tick => label(chart, tick, step)) }],
    cursor: { sync: { key: "steps" }, points: { size: 6 }, y: false, drag: { x: true, y: false } },
    hooks: { setCursor: [u => told(u, figure)], draw: [u => bars(u, plots.get(figure)?.chart || chart)] },
  }, found.data, (self, ready) => {
    figure.insertBefore(self.root, figure.querySelector("output"));
    plots.set(figure, { chart, found, plot: self });
    ready();
  });
  figure.classList.add("drawn");
  return drawing;
}
function redraw(figure, chart) {  // new values; what was zoomed into stays
  const held = plots.get(figure), found = chart.stacked ? stacked(chart) : drawn(chart);
  if (found.series.length !== held.found.series.length) { remove(figure); plot(figure, chart); return; }
  const { min, max } = held.plot.scales.x, old = held.plot.data[0];
  const whole = min == null || min <= old[0] && max >= old.at(-1);
  Object.assign(held, { chart, found });
  held.plot.setData(found.data, whole);
  if (!whole) held.plot.setScale("x", { min, max });
}
function remove(figure) {
  plots.get(figure)?.plot.destroy();
  plots.delete(figure);
  figure.classList.remove("drawn");
}
const seen = new Set(), observer = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) { seen.add(target); waiting.add(target); } else seen.delete(target);
  }
  work();
}, { rootMargin: "150px" });
const sizes = new ResizeObserver(entries => entries.forEach(({ target }) => {
  const held = plots.get(target), width = target.clientWidth - 28;
  if (held && width > 0 && width !== held.plot.width) held.plot.setSize({ width, height: held.plot.height });
}));
let working = false;
function work() {  // one figure a frame, so that the page moves smoothly
  if (working || !waiting.size) return;
  working = true;
  requestAnimationFrame(() => {
    const [figure] = waiting, chart = charts[figures().indexOf(figure)];
    waiting.delete(figure);
    working = false;
    if (chart && figure.isConnected) plots.has(figure) ? redraw(figure, chart) : plot(figure, chart);
    work();
  });
}
function follow() {  // of the figures that are there now
  for (const figure of [...plots.keys()]) if (!figure.isConnected) remove(figure);
  for (const figure of seen) if (!figure.isConnected) { seen.delete(figure); observer.unobserve(figure); }
  figures().forEach(figure => { observer.observe(figure); sizes.observe(figure); });
}
const named = list => JSON.stringify(list.map(({ title, lines }) => [title, lines.map(([name]) => name)]));
function renew(found) {  // newer data; false where there are other charts than on the page
  const same = named(found) === named(charts);
  if (same) { charts = found; seen.forEach(figure => waiting.add(figure)); work(); }
  return same;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const figure of [...plots.keys()]) { remove(figure); if (seen.has(figure)) waiting.add(figure); }
  work();
});

// Samples: a step at a time, or those with a word.
const number = value => value == null ? "–" : String(+value.toFixed(3));
const fields = () => [
  ["step", "n", s => s.step], ["prompt", "prompt", s => s.prompt], ["completion", "completion", s => s.completion],
  ...rewards.map(name => [name, "n", s => number((s.rewards || {})[name])]), ["total", "n", s => number(s.reward)],
  ["advantage", "n", s => number(s.advantage)], ["tokens", "n", s => s.tokens], ["ended by", "", s => s.finish_reason]];
const verdict = sample => right.length && (sample.rewards || {})[right[0]] != null
  ? sample.rewards[right[0]] > above : null;
function add(parent, tag, css, content) {
  const child = parent.appendChild(document.createElement(tag));
  child.className = css;
  child.textContent = content ?? "";
  return child;
}
function chosen() {
  const step = steps[element("step").value], every = element("all").checked, order = +element("order").value;
  const wanted = element("filter").value.toLowerCase();
  const texts = turn => [turn.text, ...(turn.calls || []), ...(turn.replies || []).map(reply => reply.content)];
  const matches = s => [s.prompt, s.completion, ...(s.turns || []).flatMap(texts)]
    .some(text => (text ?? "").toLowerCase().includes(wanted));
  const found = samples.filter(s => (every || s.step === step) && matches(s));
  const rank = s => s.reward ?? (order > 0 ? Infinity : -Infinity);
  return order ? found.sort((a, b) => order * (rank(a) > rank(b) ? 1 : rank(a) < rank(b) ? -1 : 0)) : found;
}
function judged(parent, tag, sample) {
  const good = verdict(sample);
  if (right.length) add(parent, tag, good == null ? "" : good ? "right" : "wrong",
    good == null ? "\u2013" : good ? "\u2713 right" : "\u2717 wrong");
}
function answer(rows, sample) {
  const row = rows.appendChild(document.createElement("tr"));
  judged(row, "td", sample);
  for (const [name, css, value] of columns)
    name === "prompt" || name === "completion" ? add(add(row, "td", css), "pre", "", value(sample))
      : add(row, "td", css, value(sample));
}
const counted = (count, one) => count + " " + one + (count === 1 ? "" : "s");
function said(parent, css, who, text, told = []) {
  const block = add(parent, "div", "said " + css), head = add(block, "div", "who");
  add(head, "b", "", (css === "sampled" ? "\u25cf " : "\u25cb ") + who);
  for (const [kind, words] of told) if (words) add(head, "span", kind, words);
  if (text) add(block, "pre", "", text);
  return block;
}
function episode(rows, sample) {
  const card = add(rows, "article", "card"), facts = add(card, "div", "facts"), turns = sample.turns || [];
  judged(facts, "span", sample);
  add(facts, "b", "", "reward " + number(sample.reward));
  const drawn = sample.sampled_tokens ?? sample.tokens;
  const told = ["step " + sample.step, ...rewards.map(name => name + " " + number((sample.rewards || {})[name])),
    "advantage " + number(sample.advantage), counted(sample.num_turns || 0, "turn"),
    counted(drawn, "sampled token"), counted(sample.tokens - drawn, "token") + " of context",
    sample.sequences && counted(sample.sequences, "sequence")];
  for (const words of told.filter(Boolean)) add(facts, "span", "quiet", words);
  if (sample.prompt) said(card, "context", "prompt", sample.prompt);
  let last = 0;
  for (const turn of turns) {
    if (turn.number > last + 1) add(card, "p", "quiet", "... " + counted(turn.number - last - 1, "turn") + " left out");
    last = turn.number;
    shownTurn(card, turn);
  }
  const over = add(card, "p", "over", "\u25a0 ended by ");
  add(over, "b", "", sample.ending || sample.finish_reason);
  if (endings[sample.ending]) over.append(": " + endings[sample.ending]);
}
function shownTurn(card, turn) {
  const read = turn.rewritten ? "the template rewrote the history: " + counted(turn.context, "token") + " of a new prompt"
    : turn.context && "after " + counted(turn.context, "token") + " of context";
  const told = [["paid", turn.reward != null && "reward " + number(turn.reward)],
    ["wrong", turn.failures && "\u2717 " + counted(turn.failures, "call") + " failed"],
    ["wrong", turn.cut_off && "\u2717 cut off"], ["quiet", counted(turn.tokens, "token")], ["quiet", read],
    ["quiet", turn.cached && turn.cached + " of " + turn.prompt_tokens + " prompt tokens cached"],
    ["quiet", turn.seconds && "waited " + turn.seconds + " s"]];
  const block = said(card, "sampled", turn.number + ". assistant", turn.text, told);
  for (const call of turn.calls || []) add(block, "div", "call", "\u2192 calls " + call);
  for (const reply of turn.replies || [])
    said(card, "context", reply.name ? reply.role + " " + reply.name : reply.role, reply.content);
}
function fill() {
  const found = chosen(), rows = element("rows");
  rows.replaceChildren();
  for (const sample of found.slice(0, limit)) (played ? episode : answer)(rows, sample);
  element("at").textContent = element("all").checked ? "all" : steps[element("step").value];
  element("step").disabled = element("all").checked;
  element("count").textContent = found.length + (found.length === 1 ? " sample" : " samples");
  element("more").hidden = found.length <= limit;
}
function browse(step) {  // at this step; at the newest without one
  if (!samples.length || !element("rows")) return;
  element("head")?.replaceChildren();
  if (right.length && !played) add(element("head"), "th", "", "verdict");
  for (const [name, css] of played ? [] : columns) add(element("head"), "th", css, name);
  element("step").max = steps.length - 1;
  element("step").value = steps.includes(step) ? steps.indexOf(step) : steps.length - 1;
  const refresh = () => { limit = FIRST; fill(); };
  for (const id of ["step", "all", "filter", "order"]) element(id).oninput = refresh;
  element("more").onclick = () => { limit += 100; fill(); };
  fill();
}
function take(data) {  // samples, of which those at the chosen step are shown, or the newest ones
  const at = element("step") ? +element("step").value : -1, step = at < steps.length - 1 ? steps[at] : undefined;
  ({ samples, right, above, endings } = data);
  steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
  rewards = [...new Set(samples.flatMap(sample => Object.keys(sample.rewards || {})))];
  columns = fields();
  const now = element("rows")?.className === "episodes";
  if (now !== played || !limit) limit = now ? 6 : 20;
  [played, FIRST] = [now, now ? 6 : 20];
  browse(step);
}
if (element("data")) {
  const data = JSON.parse(element("data").textContent);
  charts = data.charts;
  take(data);
  follow();
}
