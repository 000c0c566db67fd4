const { charts, samples } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)"), element = id => document.getElementById(id);
function layout(chart) {
  const grid = dark.matches ? "#2b333e" : "#e6e9ee", ink = dark.matches ? "#aab4c0" : "#566170";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true, fixedrange: false };
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
    margin: { l: 36, r: 8, t: 8, b: 24 }, xaxis: { ...axis, showgrid: false }, hovermode: "x unified",
    yaxis: { ...axis, tickformat: chart.format, hoverformat: chart.format || ".4~g",
      rangemode: chart.from_zero ? "tozero" : "normal", ...(chart.stacked ? { range: [0, 1] } : {}) },
    hoverlabel: { bgcolor: dark.matches ? "#1a2029" : "#fff" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    colorway: ["#3b82c4", "#e0803a", "#3a9e78", "#9a6fc9", "#d0576b", "#8a94a3"],
    showlegend: chart.traces.filter(trace => trace.showlegend !== false).length > 1 };
}
function draw() {
  charts.forEach((chart, i) => Plotly.react("chart-" + i, chart.traces, layout(chart),
    { responsive: true, displayModeBar: false }));
}
dark.addEventListener("change", draw);
draw();

const steps = [...new Set(samples.map(sample => sample.step))].sort((a, b) => a - b);
const rewards = [...new Set(samples.flatMap(sample => Object.keys(sample.rewards || {})))];
const number = value => value == null ? "–" : String(+value.toFixed(3));
const columns = [
  ["step", "n", s => s.step], ["prompt", "prompt", s => s.prompt], ["completion", "completion", s => s.completion],
  ...rewards.map(name => [name, "n", s => number((s.rewards || {})[name])]), ["total", "n", s => number(s.reward)],
  ["advantage", "n", s => number(s.advantage)], ["tokens", "n", s => s.tokens], ["ended by", "", s => s.finish_reason]];
let limit = 50;
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
  for (const [name, css] of columns) add(element("head"), "th", css, name);
  element("step").max = steps.length - 1;
  element("step").value = element("step").max;
  const refresh = () => { limit = 50; fill(); };
  for (const id of ["step", "all", "filter", "order"]) element(id).addEventListener("input", refresh);
  element("more").addEventListener("click", () => { limit += 100; fill(); });
  fill();
}
