// A page about a run: it draws what the JSON in it says. Where a server sent it, it follows the run.
"use strict";
const ROOT = document.documentElement, MAIN = document.querySelector("main");
const element = id => document.getElementById(id);
const counted = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");

// Whatever a run, a model or a person wrote gets into the page here only, and as text.
function make(tag, css, ...inside) {
  const made = document.createElement(tag);
  if (css) made.className = css;
  made.append(...inside.flat(Infinity).filter(each => each || each === 0));
  return made;
}
const set = (made, properties) => Object.assign(made, properties);
const section = (title, ...inside) => make("section", "", make("h2", "", title), inside);

const shown = {};  // what each part of the page was made of
function show(id, value, build) {  // makes a part anew, where what it shows has changed
  const text = JSON.stringify(value ?? null);
  if (shown[id] === text) return;
  shown[id] = text;
  if (!element(id)) MAIN.append(set(make("div"), { id }));
  element(id).replaceChildren(...[build(value)].flat().filter(Boolean));
}
function render(data) {
  document.title = data.title;
  show("actions", data.actions, actions => (actions || []).map(button));
  show("top", data.top, top => top && header(top));
  show("alarms", data.alarms, alarms => alarms?.length
    && section("Alarms", make("div", "articles", alarms.map(alarm))));
  showCurves(data.charts, data.note);
  show("pairs", data.pairs, pairs => pairs && section("Before and after", make("p", "quiet", pairs.counts),
    make("div", "articles", pairs.samples.map(pair))));
  show("common", data.common, common => common && section("Commonest completions",
    make("p", "quiet", `of the last ${counted(common.steps, "step")} with samples: ${common.total} completions`),
    make("div", "articles", common.rows.map(row => make("article", "card", make("p", "", make("b", "",
      `${row.count} times (${Math.round(100 * row.count / common.total)}%)`), " ",
    row.reward == null ? "" : "mean reward " + row.reward.toFixed(3)), make("pre", "", row.text))))));
  showSamples(data.samples);
  showLog(data.log);
  show("settings", data.settings, settings => settings?.length && make("details", "", make("summary", "", "Settings"),
    make("div", "scroll card", make("table", "", settings.map(([name, value]) =>
      make("tr", "", make("td", "", name), make("td", "", make("code", "", value))))))));
}

// The top, alarms, answers before and after training, the log

function header({ title, status, about, ending, accuracy, tiles }) {
  return make("header", "",
    make("h1", "", title, " ", status && make("span", "status " + status, status)),
    about && make("p", "quiet", about),
    ending && make("div", "card ending " + status, make("p", "", make("b", "", ending.said)),
      ending.error && make("pre", "", ending.error), ending.lacks && make("p", "", ending.lacks)),
    accuracy && make("div", "card accuracy", make("div", "number", accuracy[0]),
      accuracy.slice(1).map(line => make("div", "quiet", line))),
    tiles && make("div", "tiles", tiles.map(([label, value]) => make("div", "tile",
      make("div", value.length > 14 ? "number long" : "number", value), make("div", "quiet", label)))));
}
const alarm = ({ title, times, words }) => make("article", "card ending failed",
  make("p", "", make("b", "wrong", "\u26a0 " + title), " ", make("span", "quiet", times)),
  words && make("p", "", words));
const verdict = right => right == null ? ""
  : right ? make("span", "right", "\u2713 right") : make("span", "wrong", "\u2717 wrong");
const pair = sample => make("article", "card", make("pre", "", sample.prompt ?? "\u2013"),
  make("p", "quiet", "expected: ", make("b", "", sample.answer ?? "\u2013")),
  make("div", "pair", ["before", "after"].map(when => make("div", "",
    make("h3", "", when[0].toUpperCase() + when.slice(1) + " ", verdict(sample["right_" + when])),
    make("pre", "", sample[when] ?? "\u2013")))));
function showLog(log) {
  const old = element("log")?.querySelector("pre"), top = old?.scrollTop;
  const atEnd = !old || top + old.clientHeight > old.scrollHeight - 20;
  show("log", log, text => text?.trim() && section("Log", set(make("pre", "card", text), { tabIndex: 0 })));
  const pre = element("log").querySelector("pre");
  if (pre) pre.scrollTop = atEnd ? pre.scrollHeight : top;
}

// Curves: uPlot draws each when it comes into view

const HEIGHT = 222, FEW = 30;  // pixels; points of a line that are marked one by one
let curves = [];  // { chart, figure, output, columns, plot, isSeen }
const colour = (name, alpha = "") => getComputedStyle(ROOT).getPropertyValue("--" + name).trim() + alpha;
const ink = (place, alpha) => () => colour("line" + place % 6, alpha);
const sight = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  const curve = curves.find(({ figure }) => figure === target);
  if (curve) curve.isSeen = isIntersecting;
  if (curve && isIntersecting) draw(curve);
}), { rootMargin: "150px" });
const width = new ResizeObserver(entries => entries.forEach(({ target }) => {
  const plot = curves.find(({ figure }) => figure === target)?.plot;
  if (plot && inner(target) > 0 && inner(target) !== plot.width) plot.setSize({ width: inner(target), height: HEIGHT });
}));
const inner = figure => figure.clientWidth - 28;
const look = { smooth: true, log: false };  // what the boxes above the curves say
const isLog = ({ share, lines }) => look.log && !share
  && lines.every(({ kind, values }) => kind !== "area" && values.every(value => value > 0));
function box(name, words) {
  const onchange = ({ target }) => {
    look[name] = target.checked;
    curves.forEach(curve => { curve.plot?.destroy(); curve.plot = null; if (curve.isSeen) draw(curve); });
  };
  return make("label", "quiet", set(make("input"), { type: "checkbox", id: name, checked: look[name], onchange }), " " + words);
}

function showCurves(charts = [], note = "") {
  const names = charts.map(({ title, note, lines }) => [title, note, lines.map(({ name }) => name)]);
  const isBold = charts.some(({ lines }) => lines.some(({ bold }) => bold));
  show("curves", [names, isBold], () => {
    curves.forEach(({ plot, figure }) => { plot?.destroy(); sight.unobserve(figure); width.unobserve(figure); });
    curves = charts.map(framed);
    if (!charts.length) return section("Curves", make("p", "card", "No steps logged yet."));
    return section("Curves by step", make("div", "controls", isBold && box("smooth", "smoothed"),
      box("log", "logarithmic, where all values are above 0")), set(make("p", "quiet"), { id: "note" }),
      make("div", "charts", curves.map(({ figure }) => figure)));
  });
  if (element("note")) element("note").textContent = note;
  curves.forEach((curve, place) => {
    curve.chart = charts[place];
    if (curve.isSeen) draw(curve);
    else { sight.observe(curve.figure); width.observe(curve.figure); }
  });
}
function framed(chart) {  // a chart's title and legend, around the place of its drawing
  const keys = chart.keys && chart.lines.map(({ name, kind }, place) =>
    make("span", "key l" + place % 6 + (kind === "level" ? " level" : ""), name));
  const output = make("output", "quiet");
  const figure = make("figure", "card", make("figcaption", "", make("b", "", chart.title), " ",
    make("span", "quiet", chart.note), make("div", "keys", keys)), make("div", "plot"), output);
  return { chart, figure, output };
}
function columnsOf(chart) {  // what uPlot draws: values by steps, how each line is drawn, and areas between two of them
  const tables = [], series = [{}], bands = [], main = [];
  const add = (line, values, how) => {
    tables.push([line.steps, values]);
    return series.push({ width: 0, spanGaps: true, points: { show: false }, ...how }) - 1;
  };
  chart.lines.forEach((line, place) => {
    const { kind, values } = line, isDots = kind === "dots", bold = look.smooth && line.bold;
    const [low, high] = [line.low, line.high].map(ends => isLog(chart) ? ends?.map(end => end > 0 ? end : null) : ends);
    const few = { show: isDots || line.steps.length < FEW && !bold && kind === "curve", size: isDots ? 8 : 4, width: 0,
      fill: ink(place), stroke: ink(place) };
    const fill = ink(place, kind === "area" ? "c0" : "2a");
    if (low && !isDots) bands.push({ series: [add(line, high), add(line, low)], fill });
    main.push(add(line, values, kind === "area" ? { show: false } : {
      stroke: ink(place, bold ? "59" : ""), width: bold ? 1 : 2, dash: kind === "level" ? [6, 4] : [], points: few,
      paths: isDots ? () => null : undefined }));
    if (bold) add(line, bold, { stroke: ink(place), width: 2 });
  });
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands, main };
}
function draw(curve) {
  const { chart, plot } = curve, columns = curve.columns = columnsOf(chart);
  if (plot?.series.length !== columns.series.length) { plot?.destroy(); curve.plot = drawn(curve); return; }
  const { min, max } = plot.scales.x, old = plot.data[0], isZoomed = min > old[0] || max < old.at(-1);
  plot.setData(columns.data, !isZoomed);  // what was zoomed into stays
  if (isZoomed) plot.setScale("x", { min, max });
}
function drawn(curve) {
  const { figure, columns: { data, series, bands } } = curve, font = "11px system-ui, sans-serif";
  const grid = { stroke: () => colour("edge"), width: 1 };
  const axis = { stroke: () => colour("quiet"), grid, ticks: { show: false }, font, labelFont: font, labelGap: 2 };
  const log = isLog(curve.chart), logarithmic = (plot, low, high) => low == null ? [1, 10] : [low / 1.2, high * 1.2];
  return new uPlot({
    width: inner(figure), height: HEIGHT, padding: [8, 12, 0, 0], legend: { show: false }, series, bands,
    scales: { x: { time: false, range: (plot, low, high) => low === high ? [low - 0.5, high + 0.5] : [low, high] },
      y: log ? { distr: 3, range: logarithmic } : { range: (plot, low, high) => range(curve.chart, low, high) } },
    axes: [{ ...axis, size: 22, incrs: ticks(0), label: "step", labelSize: 16,
      values: (plot, steps) => steps.map(step => step.toLocaleString("en")) },
      { ...axis, ...log ? {} : { incrs: ticks(-9) }, label: curve.chart.axis, labelSize: 18,
        size: (plot, texts) => 10 + 6.4 * Math.max(2, ...(texts || []).map(text => text.length)),
        values: (plot, values, place, space, step) => values.map(value => value == null ? ""
          : log ? (+value.toPrecision(2)).toLocaleString("en", { maximumSignificantDigits: 2 }) : label(curve.chart, value, step)) }],
    cursor: { sync: { key: "steps" }, points: { size: 6 }, y: false, drag: { x: true, y: false } },
    hooks: { setCursor: [() => tell(curve)], draw: [plot => bars(plot, curve.chart)] },
  }, data, figure.querySelector(".plot"));
}
const ticks = low => Array.from({ length: 75 }, (_, place) =>
  +([1, 2, 5][place % 3] + "e" + (Math.floor(place / 3) + low)));
function range({ zero, share, lines }, low, high) {
  if (low == null) return [0, 1];
  const ends = lines.flatMap(({ kind, low, high }) => kind === "dots" && low ? [...low, ...high] : []);
  [low, high] = [Math.min(low, ...ends), Math.max(high, ...ends)];  // intervals are drawn whole
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) return low ? [low - Math.abs(low) / 2, high + Math.abs(high) / 2] : [0, 1];
  const room = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - room, share && high <= 1 ? Math.min(1, high + room) : high + room];
}
function label({ share }, value, step) {  // with as many digits as tell two ticks apart
  const digits = size => Math.min(12, Math.max(0, -Math.floor(Math.log10(size) + 1e-9)));
  if (share) return (100 * value).toFixed(digits(100 * step)) + "%";
  if (Math.abs(value) >= 1e6 || step < 1e-4) return value ? (+value.toPrecision(4)).toExponential() : "0";
  return value.toLocaleString("en", { minimumFractionDigits: digits(step), maximumFractionDigits: digits(step) });
}
function bars(plot, chart) {  // intervals through dots
  const { ctx } = plot, at = (value, scale) => plot.valToPos(value, scale, true);
  chart.lines.forEach(({ kind, steps, low, high }, place) => {
    if (kind !== "dots" || !low) return;
    set(ctx, { strokeStyle: ink(place)(), lineWidth: 2 * devicePixelRatio });
    ctx.beginPath();
    steps.forEach((step, i) => {
      ctx.moveTo(at(step, "x"), at(low[i], "y"));
      ctx.lineTo(at(step, "x"), at(high[i], "y"));
    });
    ctx.stroke();
  });
}
function tell({ chart, columns, plot, output }) {  // the values at the pointer, in words
  const at = plot?.cursor.left >= 0 ? plot.cursor.idx : null;
  const words = at == null ? [] : chart.lines.map(({ name }, place) => [name, plot.data[columns.main[place]][at]])
    .filter(([, value]) => value != null).map(([name, value]) =>
      name + " " + +((chart.share ? 100 : 1) * value).toPrecision(4) + (chart.share ? "%" : ""));
  output.textContent = words.length ? "step " + plot.data[0][at] + ": " + words.join(", ") : "";
}
function redraw(isPaper) {  // in the colours of now; for paper every curve
  if (isPaper !== undefined) ROOT.classList.toggle("paper", isPaper);
  curves.forEach(curve => curve.plot ? curve.plot.redraw() : isPaper && draw(curve));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
addEventListener("beforeprint", () => redraw(true));
addEventListener("afterprint", () => redraw(false));

// Samples: those of a step, or those with a word

const AT_FIRST = 12;  // samples that are shown before more are asked for
let samples = { rows: [] }, steps = [], limit = AT_FIRST;
const number = value => value == null ? "\u2013" : String(+value.toFixed(3));
function showSamples(found) {
  const before = element("step") && +element("step").value < steps.length - 1 ? steps[+element("step").value] : null;
  show("samples", found && !found.rows.length && found.note, () => found && section("Samples over time",
    set(make("p", found.rows.length ? "quiet" : "card"), { id: "capped" }), found.rows.length ? controls() : []));
  if (!found || JSON.stringify(found) === JSON.stringify(samples)) return;
  samples = found;
  element("capped").textContent = found.note;
  steps = [...new Set(found.rows.map(({ step }) => step))].sort((a, b) => a - b);
  if (!steps.length) return;
  set(element("step"), { max: steps.length - 1 });
  element("step").value = steps.includes(before) ? steps.indexOf(before) : steps.length - 1;  // or the newest
  fill();
}
function controls() {
  const again = () => { limit = AT_FIRST; fill(); }, onclick = () => { limit += 100; fill(); };
  const input = (id, type, more) => set(make("input"), { id, type, oninput: again, ...more });
  const order = [[0, "As logged"], [-1, "Highest reward first"], [1, "Lowest reward first"]]
    .map(([value, words]) => set(make("option", "", words), { value }));
  return [make("div", "controls",
    make("label", "", "Step ", input("step", "range", { min: 0, step: 1 }), " ", set(make("b"), { id: "at" })),
    make("label", "", input("all", "checkbox"), " all steps"),
    input("filter", "search", { size: 32, placeholder: "Text in prompt or completion", ariaLabel: "Text filter" }),
    set(make("select", "", order), { id: "order", oninput: again, ariaLabel: "Order" }),
    set(make("span", "quiet"), { id: "count" })),
  make("p", "quiet", make("b", "sampled", "\u25cf sampled"), " by the policy, which learns from it; ",
    make("b", "context", "\u25cb context"), " from the prompt, tools and the environment, which it only reads"),
  set(make("div", "episodes"), { id: "rows" }),
  set(make("button", "", "Show more"), { id: "more", type: "button", onclick })];
}
function fill() {
  const chosen = chosenSamples(), every = element("all").checked;
  element("rows").replaceChildren(...chosen.slice(0, limit).map(sampleCard));
  element("at").textContent = every ? "all" : steps[element("step").value];
  element("step").disabled = every;
  element("count").textContent = counted(chosen.length, "sample");
  element("more").hidden = chosen.length <= limit;
}
function chosenSamples() {
  const step = steps[element("step").value], every = element("all").checked, order = +element("order").value;
  const wanted = element("filter").value.toLowerCase();
  const texts = turn => [turn.text, ...(turn.calls || []), ...(turn.replies || []).map(({ content }) => content)];
  const chosen = samples.rows.filter(sample => (every || sample.step === step)
    && [sample.prompt, sample.completion, ...(sample.turns || []).flatMap(texts)]
      .some(text => (text ?? "").toLowerCase().includes(wanted)));
  const rank = sample => sample.reward ?? (order > 0 ? Infinity : -Infinity);
  return order ? chosen.sort((a, b) => order * Math.sign(rank(a) - rank(b) || 0)) : chosen;
}
const rewardNames = () => [...new Set(samples.rows.flatMap(({ rewards }) => Object.keys(rewards || {})))];
const judged = ({ rewards }) => !samples.right.length ? null
  : verdict(rewards?.[samples.right[0]] == null ? null : rewards[samples.right[0]] > 0) || "\u2013";
function sampleCard(sample) {  // an episode by its turns, or a completion
  const drawn = sample.sampled_tokens ?? sample.tokens ?? 0, played = sample.turns || [];
  const facts = ["step " + sample.step, ...rewardNames().map(name => name + " " + number(sample.rewards?.[name])),
    sample.reward != null && "advantage " + number(sample.advantage), counted(drawn, "sampled token"),
    ...played.length ? [counted((sample.tokens ?? drawn) - drawn, "token") + " of context",
      counted(sample.num_turns || 0, "turn"), sample.sequences && counted(sample.sequences, "sequence")] : []];
  const turns = played.map(({ number }, place) => {
    const missing = number - (played[place - 1]?.number || 0) - 1;
    return [missing > 0 && make("p", "quiet", "... " + counted(missing, "turn") + " left out"), turn(played[place])];
  });
  const words = samples.endings[sample.ending];
  return make("article", "card", make("div", "facts", judged(sample),
    (sample.reward != null || rewardNames().length > 0) && make("b", "", "reward " + number(sample.reward)),
    facts.filter(Boolean).map(words => make("span", "quiet", words))),
  sample.prompt && said("context", "prompt", sample.prompt),
  sample.images && make("p", "images", sample.images.map((name, place) => samples.pictures?.[name]
    && set(make("img"), { src: samples.pictures[name], alt: "image " + (place + 1) + " of the prompt" }))),
  sample.completion != null && said("sampled", "completion", sample.completion), turns,
  make("p", "over", "\u25a0 ended by ", make("b", "", sample.ending || sample.finish_reason), words && ": " + words));
}
function turn(turn) {
  const context = turn.context && counted(turn.context, "token");
  const read = turn.rewritten ? "the template rewrote the history: " + context + " of a new prompt"
    : context && "after " + context + " of context";
  const told = [["paid", turn.reward != null && "reward " + number(turn.reward)],
    ["wrong", turn.failures && "\u2717 " + counted(turn.failures, "call") + " failed"],
    ["wrong", turn.cut_off && "\u2717 cut off"],
    ["quiet", turn.tokens != null && counted(turn.tokens, "token")], ["quiet", read],
    ["quiet", turn.cached && turn.cached + " of " + turn.prompt_tokens + " prompt tokens cached"],
    ["quiet", turn.seconds && "waited " + turn.seconds + " s"]];
  return [said("sampled", turn.number + ". assistant", turn.text, told, turn.calls),
    (turn.replies || []).map(({ role = "", name = "", content }) =>
      said("context", (role + " " + name).trim(), content))];
}
function said(css, who, text, told = [], calls = []) {
  return make("div", "said " + css,
    make("div", "who", make("b", "", (css === "sampled" ? "\u25cf " : "\u25cb ") + who),
      told.filter(([, words]) => words).map(([kind, words]) => make("span", kind, words))),
    text && make("pre", "", text), calls.map(call => make("div", "call", "\u2192 calls " + call)));
}

// The list of runs, buttons, and news from the server

const EVERY = 1500;  // milliseconds between two questions
const BUTTONS = {
  stop: ["Stop", "It finishes its step and saves, so that it can go on later."],
  resume: ["Resume", "It waits for the card, and goes on from its last checkpoint."],
  export: ["Download adapter", "The adapter in PEFT's files, as a zip."],
};
const form = (method, action, ...inside) => set(make("form", "", inside), { method, action });
const button = ([run, name]) => form("post", "/page/do/" + name,
  set(make("input"), { type: "hidden", name: "run", value: run }),
  set(make("button", "", BUTTONS[name][0]), { title: BUTTONS[name][1] }));
const say = (words, css) => set(element("link"), { textContent: words, className: css });

function navigation({ title, user }) {
  const compare = set(make("button", "", "Compare"), { id: "compare" });
  const list = form("get", "/", set(make("ul"), { id: "list" }), compare);
  list.onsubmit = event => {
    if (list.querySelectorAll("input:checked").length > 1) return;
    event.preventDefault();
    compare.textContent = "Compare: check two or more";
  };
  return set(make("nav", "", make("p", "brand", make("b", "", "lowmem-grpo"), " ", make("span", "quiet", title),
    set(make("span", "quiet"), { id: "link" })), list,
  form("post", "/page/leave", make("button", "plain", "Sign out " + user))), { ariaLabel: "Runs" });
}
function showRuns({ runs, names }) {
  const checked = [...document.querySelectorAll("#list input:checked")].map(({ value }) => value);
  show("list", [runs, names], () => runs.map(run => make("li", "",
    run.can_show ? set(make("input"), { type: "checkbox", name: "with", value: run.name,
      checked: checked.includes(run.name), ariaLabel: "Compare " + run.title }) : make("span"),
    set(make("a", "", make("b", "", run.title), " ", make("span", "status " + run.state, run.state),
      make("span", "quiet", run.told)), { href: "/?run=" + encodeURIComponent(run.name),
      ariaCurrent: names.includes(run.name) ? "page" : null }))));
  element("compare").hidden = runs.length < 2;
}
async function follow({ query, version }) {  // asks for what is newer, but not while nobody looks
  if (!document.hidden) try {
    const answer = await fetch("/page/data" + query, { headers: { "If-None-Match": version } });
    if (answer.status === 401) return say("signed out: load the page again", "wrong");
    if (answer.status !== 304 && !answer.ok) throw new Error("status " + answer.status);
    if (answer.ok) {
      const newest = await answer.json();
      if (newest.query !== query) location.reload();  // the first run has begun
      version = newest.version;
      render(newest);
      showRuns(newest.list);
    }
    say("live", "right");
  } catch (error) { say(error.message, "wrong"); }
  setTimeout(follow, EVERY, { query, version });
}
const data = JSON.parse(element("data").textContent);
if (data.framed) document.body.className = "framed";
if (data.list) {
  document.body.className = "live";
  MAIN.before(navigation(data.list));
  showRuns(data.list);
}
render(data);
if (data.list) follow(data);
