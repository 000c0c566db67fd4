const { charts, samples, right } = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const shown = (value, share) => share ? +(100 * value).toPrecision(4) + "%" : String(+value.toPrecision(4));
const nearest = (steps, at) => steps.reduce((best, step, i) =>
  Math.abs(step - at) < Math.abs(steps[best] - at) ? i : best, 0);
document.querySelectorAll("svg.plot").forEach((plot, i) => {
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

const steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
const rewards = [...new Set(samples.flatMap(sample => Object.keys(sample.rewards || {})))];
const number = value => value == null ? "–" : String(+value.toFixed(3));
const columns = [
  ["step", "n", s => s.step], ["prompt", "prompt", s => s.prompt], ["completion", "completion", s => s.completion],
  ...rewards.map(name => [name, "n", s => number((s.rewards || {})[name])]), ["total", "n", s => number(s.reward)],
  ["advantage", "n", s => number(s.advantage)], ["tokens", "n", s => s.tokens], ["ended by", "", s => s.finish_reason]];
const verdict = sample => right.length && (sample.rewards || {})[right[0]] != null
  ? sample.rewards[right[0]] > 0 : null;
let limit = 20;
function add(parent, tag, css, content) {
  const child = parent.appendChild(document.createElement(tag));
  child.className = css;
  child.textContent = content ?? "";
  return child;
}
function chosen() {
  const step = steps[element("step").value], every = element("all").checked, order = +element("order").value;
  const wanted = element("filter").value.toLowerCase();
  const matches = s => [s.prompt, s.completion].some(text => (text ?? "").toLowerCase().includes(wanted));
  const found = samples.filter(s => (every || s.step === step) && matches(s));
  const rank = s => s.reward ?? (order > 0 ? Infinity : -Infinity);
  return order ? found.sort((a, b) => order * (rank(a) > rank(b) ? 1 : rank(a) < rank(b) ? -1 : 0)) : found;
}
function fill() {
  const found = chosen(), rows = element("rows");
  rows.replaceChildren();
  for (const sample of found.slice(0, limit)) {
    const row = rows.appendChild(document.createElement("tr"));
    const good = verdict(sample), word = good ? "\u2713 right" : "\u2717 wrong";
    if (right.length) add(row, "td", good == null ? "" : good ? "right" : "wrong", good == null ? "\u2013" : word);
    for (const [name, css, value] of columns)
      name === "prompt" || name === "completion" ? add(add(row, "td", css), "pre", "", value(sample))
        : add(row, "td", css, value(sample));
  }
  element("at").textContent = element("all").checked ? "all" : steps[element("step").value];
  element("step").disabled = element("all").checked;
  element("count").textContent = found.length + (found.length === 1 ? " sample" : " samples");
  element("more").hidden = found.length <= limit;
}
if (samples.length) {
  if (right.length) add(element("head"), "th", "", "verdict");
  for (const [name, css] of columns) add(element("head"), "th", css, name);
  element("step").max = steps.length - 1;
  element("step").value = element("step").max;
  const refresh = () => { limit = 20; fill(); };
  for (const id of ["step", "all", "filter", "order"]) element(id).addEventListener("input", refresh);
  element("more").addEventListener("click", () => { limit += 100; fill(); });
  fill();
}
