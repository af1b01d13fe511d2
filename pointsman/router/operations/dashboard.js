// The live page of the router; see dashboard.py. Everything is written as text, never as HTML: request ids and
// names come from others.
"use strict";
const POLL_MS = 1000, TIMEOUT_MS = 5000;
const at = id => document.getElementById(id);
let key = sessionStorage.getItem("key") ?? "";
let isPaused = false, state = null, chosen = null, answeredAt = 0;
const reasons = new Map();  // request id -> explanation, of decisions still listed

// --- numbers ---

const digits = (value, count = 3) => Number(value.toPrecision(count)).toLocaleString("en", { maximumSignificantDigits: count });
const whole = value => Math.round(value).toLocaleString("en");
const known = (value, write) => value === null || value === undefined ? "–" : write(value);
const share = value => known(value, v => `${(100 * v).toFixed(v > 0 && v < 0.0995 ? 1 : 0)} %`);
const seconds = value => known(value, v => v <= 0 ? "0" : v < 9.995e-4 ? `${digits(1e6 * v)}\u00a0µs` : v < 0.9995 ? `${digits(1000 * v)}\u00a0ms` : `${digits(v)}\u00a0s`);
const ago = value => value < 90 ? `${Math.round(value)}\u00a0s` : value < 5400 ? `${Math.round(value / 60)}\u00a0min` : `${digits(value / 3600)}\u00a0h`;
const short = name => name.replace(/^https?:\/\//, "");
const sum = counts => Object.values(counts).reduce((a, b) => a + b, 0);
const listed = counts => Object.entries(counts).map(([name, count]) => `${name}: ${whole(count)}`).join(", ") || "none";

// --- elements: what is there already is changed in place, so that focus and scroll position stay ---

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function resize(parent, count, create) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(create(parent.children.length));
}

// A cell is text, or { text, title, className, bar: [shares], choose: request id }.
function fillCell(element, cell) {
  const { text, title = "", className = "", bar = null, choose = null } = typeof cell === "object" ? cell : { text: cell };
  const shape = bar ? `bar${bar.length}` : choose ? "button" : "text";
  if (element.dataset.shape !== shape) {
    element.dataset.shape = shape;
    element.replaceChildren();
    if (bar) {
      const line = make("div", "", "barred"), box = make("span", "", "bar");
      bar.forEach(() => box.append(make("i")));
      line.append(box, make("span"));
      element.append(line);
    } else if (choose) {
      element.append(make("button"));
    }
  }
  element.className = className;
  if (element.title !== title) element.title = title;
  if (bar) {
    const [box, label] = element.firstChild.children;
    bar.forEach((part, index) => { box.children[index].style.width = `${Math.min(100, 100 * part)}%`; });
    write(label, text);
  } else if (choose) {
    const button = element.firstChild;
    write(button, text);
    button.type = "button";
    button.setAttribute("aria-pressed", String(chosen === choose));
    button.onclick = () => { chosen = choose; pause(true); render(); };
  } else {
    write(element, text);
  }
}

function fillTable(id, header, rows) {
  const table = at(id);
  if (!table.tHead) { table.append(make("thead"), make("tbody")); table.tHead.append(make("tr")); }
  const heading = table.tHead.firstChild;
  resize(heading, header.length, () => { const th = make("th"); th.scope = "col"; return th; });
  header.forEach((name, index) => fillCell(heading.children[index], name));
  const body = table.tBodies[0];
  resize(body, rows.length, () => make("tr"));
  rows.forEach((row, index) => {
    const line = body.children[index];
    resize(line, row.length, column => { const cell = make(column ? "td" : "th"); if (!column) cell.scope = "row"; return cell; });
    row.forEach((cell, column) => fillCell(line.children[column], cell));
  });
}

function fillList(id, rows, hasNotes) {
  const list = at(id);
  const perRow = hasNotes ? 3 : 2;
  if (hasNotes) {
    resize(list, rows.length, () => { const box = make("div"); box.append(make("dt"), make("dd"), make("dd", "", "note")); return box; });
  } else {
    resize(list, perRow * rows.length, index => make(index % 2 ? "dd" : "dt"));
  }
  const cells = hasNotes ? [...list.children].flatMap(box => [...box.children]) : [...list.children];
  rows.forEach((row, index) => row.forEach((text, part) => write(cells[perRow * index + part], text)));
}

const name = (text, isChosen = false) => ({ text: short(text), title: text, className: isChosen ? "name chosen" : "name" });

// --- curves ---

const WIDTH = 400, HEIGHT = 130, LEFT = 52, BOTTOM = 18, TOP = 8;
const SVG = "http://www.w3.org/2000/svg";

function draw(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.textContent = text;
  return element;
}

function niceStep(highest) {
  const rough = highest / 3, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough);
}

// Lines: [name, values]; two at most.
function curve(index, title, lines, unit) {
  const figure = at("curves").children[index];
  const points = state.curves, overS = -Math.min(-60, points.length ? points[0].at : 0);
  const highest = Math.max(unit.least, ...lines.flatMap(line => line.values.filter(value => value !== null)));
  const step = niceStep(highest), top = step * Math.ceil(highest / step - 1e-9);
  const x = time => LEFT + (WIDTH - LEFT - 6) * (1 + time / overS);
  const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const parts = [];
  for (let value = 0; value <= top * 1.001; value += step) {
    parts.push(draw("path", { class: "grid", d: `M${LEFT} ${y(value)}H${WIDTH - 6}` }));
    parts.push(draw("text", { class: "soft", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, unit.write(value)));
  }
  for (const [time, text, anchor] of [[-overS, `${ago(overS)} ago`, "start"], [0, "now", "end"]]) {
    parts.push(draw("text", { class: "soft", x: x(time), y: HEIGHT - 3, "text-anchor": anchor }, text));
  }
  lines.forEach(({ values }, line) => {
    const style = line ? "second" : "first";
    let d = "";
    values.forEach((value, i) => {
      if (value === null) return;
      const isStart = i === 0 || values[i - 1] === null;
      d += `${isStart ? "M" : "L"}${x(points[i].at).toFixed(1)} ${y(value).toFixed(1)}`;
      if (isStart && (i + 1 === values.length || values[i + 1] === null)) {
        parts.push(draw("circle", { class: style, cx: x(points[i].at), cy: y(value), r: 1.8 }));
      }
    });
    parts.push(draw("path", { class: style, d }));
  });
  const now = lines.map(line => `${line.name} ${known(line.values.at(-1) ?? null, unit.write)}`);
  figure.querySelector("svg").replaceChildren(...parts);
  figure.querySelector("svg").setAttribute("aria-label", `${title}: ${now.join(", ")}`);
  write(figure.querySelector("figcaption"), title);
  now.forEach((text, line) => write(figure.querySelectorAll(".keys span:not(.swatch)")[line], text));
}

function makeFigure() {
  const figure = make("figure"), keys = make("p", "", "keys");
  for (const style of ["swatch", "swatch second"]) keys.append(make("span", "", style), make("span"));
  figure.append(make("figcaption"), keys, draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }));
  return figure;
}

function showCurves() {
  resize(at("curves"), 4, makeFigure);
  const line = (label, field) => ({ name: label, values: state.curves.map(point => point[field]) });
  const time = { least: 0.01, write: seconds }, rate = { least: 1, write: value => digits(value) };
  const number = { least: 3, write: value => digits(value) };
  curve(0, "Time to first token", [line("P50", "ttft_p50_s"), line("P99", "ttft_p99_s")], time);
  curve(1, "End to end", [line("P50", "e2e_p50_s"), line("P99", "e2e_p99_s")], time);
  curve(2, "Answers a second", [line("all", "answers_per_s"), line("errors", "errors_per_s")], rate);
  curve(3, "Requests", [line("at replicas", "num_outstanding"), line("held", "num_held")], number);
}

// --- sections ---

function showTop() {
  const { answers, held, latencies, over_s } = state;
  write(at("about"), `Policy ${state.policy}${state.shadow ? `, shadow ${state.shadow.policy}` : ""} · up ${ago(state.up_s)} · `
    + `${state.clients} client connections · Pointsman ${state.version} · counts and percentiles of the last ${ago(over_s)}`);
  const tail = times => `P95 ${seconds(times.p95_s)} · P99 ${seconds(times.p99_s)}`;
  fillList("tiles", [
    ["Answers a second", digits(answers.all / Math.max(1, over_s)), `${whole(answers.all)} in all`],
    ["First token, P50", seconds(latencies.ttft_s.p50_s), tail(latencies.ttft_s)],
    ["End to end, P50", seconds(latencies.e2e_s.p50_s), tail(latencies.e2e_s)],
    ["At replicas", whole(state.replicas.reduce((all, r) => all + r.outstanding, 0)), `${state.replicas.filter(r => r.state === "ready").length} of ${state.replicas.length} replicas ready`],
    ["Held now", whole(held.now), held.waited.count ? `waited P50 ${seconds(held.waited.p50_s)} · P99 ${seconds(held.waited.p99_s)}` : `of ${whole(held.limit)} at most`],
    ["Errors (5xx)", whole(answers.errors), `${whole(answers.too_many)} too many (429) · ${whole(answers.cancelled)} cancelled`],
  ], true);
}

function showProblems() {
  const list = at("problems"), problems = state.problems;
  list.hidden = !problems.length;
  resize(list, problems.length, () => make("li"));
  problems.forEach(({ text, is_severe }, index) => {
    list.children[index].className = is_severe ? "worse" : "unclear";
    write(list.children[index], text);
  });
}

const COLOURS = { ready: "better", closed: "better", probing: "unclear", draining: "unclear", new: "unclear", "half-open": "unclear" };
const UP = new Set(["ready", "new", "draining"]), OLD_S = 5;
const SOURCES = { assumed: "nothing yet: usual values", told: "what was told", measured: "its traffic" };
const status = text => ({ text, className: `text ${COLOURS[text] ?? "worse"}` });

function showReplicas() {
  const most = Math.max(1, ...state.replicas.map(r => r.outstanding));
  const largest = Math.max(0.01, ...state.replicas.map(r => r.share));
  fillTable("replicas",
    ["replica", { text: "state", className: "text" }, { text: "breaker", className: "text" }, "load, outstanding", "waiting", "backlog",
      "KV use", "share of requests", "step", "tokens/s", "age"],
    state.replicas.map(r => [
      name(r.name), status(r.state), status(r.breaker),
      { text: whole(r.outstanding), bar: [r.decoding / most, r.waiting / most] }, whole(r.waiting), seconds(r.prefill_backlog_s),
      { text: share(r.kv_use), bar: [r.kv_use ?? 0] }, { text: share(r.share), bar: [r.share / largest] },
      seconds(r.step_s), known(r.token_rate, whole),
      { text: seconds(r.signals_age_s), className: r.signals_age_s > OLD_S ? "worse" : "" },
    ]));
  state.replicas.forEach((r, index) => at("replicas").tBodies[0].children[index].classList.toggle("down", !UP.has(r.state)));
}

function showSpeeds() {
  const figure = (r, of) => {
    const error = r.speed_errors[of];
    if (error >= 1) return "not known yet";
    return seconds(r.speed[of]) + (error === undefined ? "" : ` ± ${share(error)}`);
  };
  fillTable("speeds",
    ["replica", { text: "known by", className: "text" }, "smallest step", "one more stream", "prompt token", "KV memory, tokens"],
    state.replicas.map(r => [
      name(r.name), { text: SOURCES[r.speed_source], className: "text" },
      ...["step_floor_s", "decode_s_per_token", "prefill_s_per_token"].map(of => figure(r, of)), whole(r.speed.kv_capacity_tokens),
    ]));
}

function showLatencies() {
  const times = ["p50_s", "p95_s", "p99_s"];
  const row = (label, of) => [label, ...["ttft_s", "e2e_s"].flatMap(kind => [whole(of[kind].count), ...times.map(time => seconds(of[kind][time]))])];
  const policies = Object.keys(state.by_policy).length > 1 ? Object.entries(state.by_policy) : [];
  fillTable("latencies",
    ["replica", "first tokens", "P50", "P95", "P99", "answers", "end to end P50", "P95", "P99"],
    [row("all", state.latencies), ...policies.map(([policy, of]) => row(name(`by ${policy}`), of)),
      ...state.replicas.map(r => row(name(r.name), r))]);
}

function rowNames(...counts) {
  const names = new Set(state.replicas.map(r => r.name));
  counts.forEach(of => Object.keys(of).forEach(one => names.add(one)));
  names.delete("hold");
  return [...names];
}

const part = (counts, one) => {
  const value = (counts[one] ?? 0) / (sum(counts) || 1);
  return { text: `${whole(counts[one] ?? 0)} (${share(value)})`, bar: [value] };
};

function showDecisions() {
  const by = state.decisions.by, policies = Object.keys(by);
  fillTable("decisions", ["sent to", ...policies.map(policy => `by ${policy}`)],
    [...rowNames(...Object.values(by)), "hold"].map(one => [name(one), ...policies.map(policy => part(by[policy], one))]));
  fillList("events", [
    ["requests held", whole(state.held.requests)],
    ["fallbacks", listed(state.decisions.fallbacks)],
    ["retries", listed(state.decisions.retries)],
    ["answers by status", listed(state.answers.by_status)],
  ], false);
}

function showShadow() {
  const shadow = state.shadow;
  at("shadow").parentElement.hidden = !shadow;
  if (!shadow) return write(at("agreement"), "None. Start serve with --shadow POLICY, or POST /admin/shadow, to count what another policy would have done.");
  const asked = shadow.agreed + shadow.differed;
  write(at("agreement"), `${shadow.policy} would have decided the same in ${share(asked ? shadow.agreed / asked : null)} of `
    + `${whole(asked)} decisions${shadow.failures ? `; it failed ${whole(shadow.failures)} times` : ""}.`);
  const sent = {};
  for (const counts of Object.values(state.decisions.by)) for (const [one, count] of Object.entries(counts)) sent[one] = (sent[one] ?? 0) + count;
  const all = Object.values(sent).reduce((sum, count) => sum + count, 0);  // more, if the shadow came later
  fillTable("shadow", ["sent to", `decided, of ${whole(all)}`, `${shadow.policy} would have, of ${whole(asked)}`],
    [...rowNames(sent, shadow.decisions), "hold"].map(one => [name(one), part(sent, one), part(shadow.decisions, one)]));
}

function showLast() {
  const newest = state.last.toReversed();
  if (state.explained.seen) reasons.set(state.explained.request_id, state.explained);
  const listedIds = new Set(newest.map(one => one.request_id));
  for (const id of reasons.keys()) if (!listedIds.has(id) && id !== chosen) reasons.delete(id);
  fillTable("last", ["request", { text: "why", className: "text" }, "ago", "prompt tokens", "waited", "at the router"],
    newest.map(one => [
      reasons.has(one.request_id) ? { ...name(one.request_id), choose: one.request_id } : name(one.request_id),
      { text: one.why, className: "words" }, `${digits(Math.max(0, state.time - one.at), 2)} s`,
      whole(one.prompt_tokens), seconds(one.waited_s), whole(one.queue_size),
    ]));
  showWhy(reasons.get(chosen) ?? state.explained);
}

function showWhy(about) {
  const seen = about.seen, replicas = seen?.replicas;
  write(at("why-about"), !about.request_id ? "No decision yet."
    : !replicas ? `${about.request_id}: ${about.why}`
    : `${about.request_id}: ${about.why} `
      + (seen.hold ? "The highest logit wins. " : replicas.some(r => r.score !== null) ? "The lowest score wins. " : "This policy does not score. ")
      + "Signals are of the time of asking.");
  at("why").parentElement.hidden = !replicas;
  at("features-box").hidden = !replicas?.some(r => r.features);
  if (!replicas) return;
  const isLearned = Boolean(seen.hold);
  const options = isLearned ? [{ name: "hold", ...seen.hold }, ...replicas] : replicas;
  const legal = options.filter(one => one.is_legal && one.logit !== null);
  const highest = Math.max(...legal.map(one => one.logit));
  const total = legal.reduce((all, one) => all + Math.exp(one.logit - highest), 0);
  const value = one => isLearned
    ? { text: known(one.logit, v => v.toFixed(2)), bar: [one.is_legal && one.logit !== null ? Math.exp(one.logit - highest) / total : 0] }
    : known(one.score, v => digits(v, 4));
  fillTable("why",
    ["replica", isLearned ? "logit" : "score", { text: "allowed", className: "text" }, "outstanding", "waiting", "prompt tokens", "context tokens", "first token", "step", "KV use"],
    options.map(one => [
      name(one.name, one.name === about.replica), value(one), { text: one.is_legal ? "yes" : "no", className: "text" },
      known(one.outstanding, whole), known(one.waiting, whole), known(one.pending_prefill_tokens, whole),
      known(one.context_tokens, whole), known(one.ttft_s, seconds), known(one.step_s, seconds), share(one.scraped_kv_use),
    ]));
  if (at("features-box").open && !at("features-box").hidden) {
    fillTable("features", ["feature", ...replicas.map(r => short(r.name))],
      Object.keys(replicas[0].features).map(feature => [feature, ...replicas.map(r => digits(r.features[feature]))]));
  }
}

function render() {
  if (!state) return;
  at("live").hidden = false;
  for (const show of [showTop, showProblems, showReplicas, showSpeeds, showCurves, showLatencies, showDecisions, showShadow, showLast]) show();
  document.querySelectorAll(".scroll").forEach(showMore);
}

// A table that is wider than the screen says so: nobody looks for columns that they do not know of.
function showMore(box) {
  let hint = box.nextElementSibling;
  if (!hint?.classList.contains("more")) {
    hint = make("p", "", "more soft");
    box.after(hint);
    box.addEventListener("scroll", () => showMore(box), { passive: true });
  }
  const edge = box.getBoundingClientRect().right;
  const hidden = [...box.querySelectorAll("thead th")].filter(th => th.getBoundingClientRect().right > edge + 1).length;
  hint.hidden = box.hidden || !hidden;
  write(hint, `${hidden} more ${hidden === 1 ? "column" : "columns"} to the right →`);
}

// --- asking ---

function say(text, className) {
  write(at("status"), text);
  at("status").className = className;
  document.body.classList.toggle("stale", className === "lost");
  document.title = className === "live" ? "Pointsman router" : `⚠ ${text} – Pointsman router`;
}

function sayState() {
  const count = state.problems.length;
  if (!count) return say("live", "live");
  say(`live, ${count} ${count === 1 ? "problem" : "problems"}`, state.problems[0].is_severe ? "trouble" : "doubt");
}

function sayLost(problem) {
  const age = state ? `; these figures are ${ago((Date.now() - answeredAt) / 1000)} old` : "";
  say(problem + age, "lost");
}

function pause(isNow) {
  isPaused = isNow;
  write(at("pause"), isPaused ? "Resume" : "Pause");
  at("pause").setAttribute("aria-pressed", String(isPaused));
  if (!isPaused) chosen = null;
  if (isPaused) say(`paused at ${new Date(answeredAt).toLocaleTimeString("en-GB")}`, "");
}

async function poll() {
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const answer = await fetch("admin/state", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    at("access").hidden = answer.status !== 401;
    at("pause").hidden = answer.status === 401;
    if (answer.status === 401) {
      sayLost(key ? "wrong key" : "key needed");
    } else if (!answer.ok) {
      sayLost(`the router answers ${answer.status}`);
    } else {
      const found = await answer.json();
      if (isPaused) return;
      state = found;
      answeredAt = Date.now();
      sayState();
      render();
    }
  } catch (error) {
    console.warn(error);
    if (!isPaused) sayLost("no answer from the router");
  }
}

async function follow() {
  for (;;) {
    if (!isPaused && !document.hidden && at("access").hidden) await poll();
    await new Promise(resolve => setTimeout(resolve, POLL_MS));
  }
}

at("pause").addEventListener("click", () => pause(!isPaused));
at("features-box").addEventListener("toggle", render);
addEventListener("resize", () => document.querySelectorAll(".scroll").forEach(showMore));
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused) poll(); });
at("access").addEventListener("submit", event => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("key", key);
  at("key").value = "";
  poll();
});
follow();
