let charts = [], samples = [], right = [], above = 0, endings = {};  // what the page shows, as the server wrote it
let steps = [], rewards = [], columns = [], played = false, FIRST = 20, limit = FIRST;
const element = id => document.getElementById(id);
const shown = (value, share) => share ? +(100 * value).toPrecision(4) + "%" : String(+value.toPrecision(4));
const nearest = (steps, at) => steps.reduce((best, step, i) =>
  Math.abs(step - at) < Math.abs(steps[best] - at) ? i : best, 0);
const follow = () => document.querySelectorAll("svg.plot").forEach((plot, i) => {
  const chart = charts[i], guide = plot.querySelector(".guide"), told = plot.parentNode.querySelector("output");
  const mark = x => { guide.setAttribute("x1", x); guide.setAttribute("x2", x); };
  plot.addEventListener("pointermove", event => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse()).x;
    const scale = (chart.last - chart.first) / (chart.right - chart.left);
    const [, steps] = chart.lines.reduce((most, line) => line[1].length > most[1].length ? line : most);
    const step = steps[nearest(steps, chart.first + (x - chart.left) * scale)];
    const values = chart.lines.filter(line => line[1].includes(step))
      .map(([name, at, value]) => name + " " + shown(value[at.indexOf(step)], chart.share));
    told.textContent = "step " + step + ": " + values.join(", ");
    mark(chart.left + (step - chart.first) / scale);
  });
  plot.addEventListener("pointerleave", () => { told.textContent = ""; mark(-9); });
});

const number = value => value == null ? "–" : String(+value.toFixed(3));
const told = () => [
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
function browse() {
  if (!samples.length || !element("rows")) return;
  if (right.length && !played) add(element("head"), "th", "", "verdict");
  for (const [name, css] of played ? [] : columns) add(element("head"), "th", css, name);
  element("step").max = steps.length - 1;
  element("step").value = element("step").max;
  const refresh = () => { limit = FIRST; fill(); };
  for (const id of ["step", "all", "filter", "order"]) element(id).addEventListener("input", refresh);
  element("more").addEventListener("click", () => { limit += 100; fill(); });
  fill();
}
function show(data) {
  ({ charts, samples, right, above, endings } = data);
  steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
  rewards = [...new Set(samples.flatMap(sample => Object.keys(sample.rewards || {})))];
  columns = told();
  played = element("rows")?.className === "episodes";
  limit = FIRST = played ? 6 : 20;
  follow();
  browse();
}
if (element("data")) show(JSON.parse(element("data").textContent));
