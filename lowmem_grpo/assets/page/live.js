// What keeps a page up to date: the server says that there is news, and the page asks for what changed.
const CURVES_EVERY = 1000, SECTIONS_EVERY = 2500, REPLACED = ["card", "list", "actions", "top", "alarms", "note",
  "pairs", "log", "settings"];
const query = document.body.dataset.query, link = element("link");
let loaded = element("data").textContent;
const asked = { curves: { every: CURVES_EVERY, at: 0, due: false }, sections: { every: SECTIONS_EVERY, at: 0, due: false } };

const read = (path, kind) => new Promise((resolve, reject) => {
  const request = new XMLHttpRequest();  // its documents come to life nowhere: no script of theirs runs
  request.open("GET", path + query);
  request.responseType = kind;
  request.onload = () => request.status === 200 && request.response ? resolve(request.response)
    : reject(new Error("status " + request.status));
  request.onerror = () => reject(new Error("no connection"));
  request.send();
});
const say = (words, css) => { link.textContent = words; link.className = css; };

async function curves() {
  const { charts: found } = await read("/page/curves", "json");
  if (renew(found) || !element("curves")) return;
  const page = await read("/", "document");  // other charts than before
  replace("curves", page);
  charts = JSON.parse(page.getElementById("data").textContent).charts;
  follow();
}
async function sections() {
  const page = await read("/page/sections", "document");
  document.title = page.title;
  const begun = !query && page.body.dataset.query || !element("samples") && page.getElementById("samples");
  if (begun) { location.reload(); return; }  // there was nothing to show until now
  for (const id of REPLACED) replace(id, page);
  const data = page.getElementById("data").textContent;
  if (data === loaded) return;
  loaded = data;
  if (!element("rows") || !page.getElementById("rows")) replace("samples", page);
  const note = page.getElementById("capped");
  if (note && element("capped")) element("capped").textContent = note.textContent;
  take(JSON.parse(data));
}
function replace(id, page) {
  const old = element(id), found = page.getElementById(id);
  if (!found && !old) return;
  if (!found || !old) { if (old) old.replaceChildren(); return; }
  const open = old.querySelector("details[open]") && found.querySelector("details");
  if (open) open.open = true;
  if (old.isEqualNode(found)) return;
  const checked = [...old.querySelectorAll("input:checked")].map(input => input.value);
  const log = old.querySelector("pre"), end = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 20;
  const top = log?.scrollTop, fresh = document.importNode(found, true);
  old.replaceWith(fresh);
  fresh.querySelectorAll("input[type=checkbox]").forEach(input => { input.checked = checked.includes(input.value); });
  if (id === "log" && fresh.querySelector("pre")) fresh.querySelector("pre").scrollTop = end ? 1e9 : top;
}
function refresh(name, work) {  // not more often than it is worth, and not while nobody looks
  const one = asked[name];
  one.due = true;
  if (one.busy || document.hidden) return;
  one.busy = true;
  setTimeout(async () => {
    one.due = false;
    try { await work(); say("live", "right"); } catch (error) { say(error.message, "wrong"); }
    one.at = performance.now();
    one.busy = false;
    if (one.due) refresh(name, work);
  }, Math.max(0, one.at + one.every - performance.now()));
}
const news = () => { refresh("curves", curves); refresh("sections", sections); };
const source = new EventSource("/page/events" + query);
let first = true;
source.onopen = () => say("live", "right");
source.onmessage = () => { if (!first) news(); first = false; };
source.onerror = () => {
  first = false;
  say(source.readyState === EventSource.CLOSED ? "signed out: load the page again" : "no connection", "wrong");
};
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && (asked.curves.due || asked.sections.due)) news();
});
const log = document.querySelector("#log pre");
if (log) log.scrollTop = log.scrollHeight;
const compare = element("compare");
compare?.form.addEventListener("submit", event => {
  if (compare.form.querySelectorAll("input:checked").length > 1) return;
  event.preventDefault();
  compare.textContent = "Compare: check two or more";
});
