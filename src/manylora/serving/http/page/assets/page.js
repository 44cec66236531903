// The live page: one snapshot a second becomes tables, tiles and a chart. Which panels are shown is decided by what the
// snapshot contains, so that the server, the router and the functions share this file. Names and messages are foreign:
// they are set as text, never as markup.
"use strict";

const HISTORY_S = 300;
const RATE_S = 10;
const OWNERS = [
  ["base", "base"], ["kv", "KV"], ["prefix", "idle prefixes"], ["adapters", "adapters"], ["host", "adapters in host memory"],
  ["other", "other"], ["free", "free pages"],
];
const own = (values, name) => (values && Object.hasOwn(values, name) ? values[name] : undefined); // names are foreign
const $ = (id) => document.getElementById(id);
const query = location.search;

let source = null; // the stream
let latest = null; // the last snapshot
let memory = []; // [time in s, bytes by owner]
const history = new Map(); // adapter -> [time in s, requests, hits], of the last RATE_S
let counters = []; // [time in s, generated tokens, loads, evictions]
let life = null; // the adapter whose life is open: {name, moves, traffic, opener}

// -- words ------------------------------------------------------------------------------------------------------------

const count = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString("en"));
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "");
const rate = (value) => (value === null ? "" : value >= 100 ? count(value) : value.toFixed(1));

function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${value} B`;
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d`;
}

const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString("en-GB");

// -- elements ---------------------------------------------------------------------------------------------------------

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

/** Show rows of [key, ...cells] in a table's body; a cell is a text, or a function that fills its element. Rows stay the
 * same elements, and keep their order while one has the focus, so that a keyboard does not lose its place. */
function rows(body, wanted) {
  const titles = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const isHeld = body.contains(document.activeElement);
  let place = body.firstElementChild;
  for (const [key, ...cells] of wanted) {
    let row = known.get(key);
    known.delete(key);
    if (row === undefined) {
      row = element("tr");
      row.dataset.key = key;
      row.setAttribute("role", "row");
      cells.forEach((_, index) => {
        const cell = row.appendChild(document.createElement(index ? "td" : "th"));
        cell.setAttribute("role", index ? "cell" : "rowheader");
        if (!index) cell.scope = "row";
        cell.dataset.title = titles[index];
      });
      body.insertBefore(row, isHeld ? null : place);
    } else if (row === place) {
      place = place.nextElementSibling;
    } else if (!isHeld) {
      body.insertBefore(row, place);
    }
    cells.forEach((cell, index) => {
      if (typeof cell === "function") cell(row.cells[index]);
      else text(row.cells[index], cell);
    });
  }
  for (const row of known.values()) row.remove();
}

/** A cell with a name that opens the adapter's life. */
const nameCell = (name) => (cell) => {
  if (cell.firstChild) return;
  const button = element("button", { type: "button", className: "name", textContent: name });
  button.addEventListener("click", () => openLife(name, button));
  cell.append(button);
};

/** A cell with a number against its limit. */
const meterCell = (value, limit) => (cell) => {
  if (limit === null || limit === undefined) return text(cell, value === null ? "no limit" : count(value));
  if (!cell.firstChild) cell.append(element("meter", { min: 0 }), element("span"));
  const [meter, label] = cell.children;
  Object.assign(meter, { max: limit, high: 0.9 * limit, optimum: 0, value });
  meter.setAttribute("aria-label", `${cell.dataset.title}: ${count(value)} of ${count(limit)}`);
  text(label, ` ${count(value)} of ${count(limit)}`);
};

const stateCell = (state) => (cell) => {
  text(cell, state);
  cell.className = ["serving", "up", "awake", "active"].includes(state) ? "good" : ["failed", "down", "stopped"].includes(state) ? "bad" : "";
};

function definitions(list, facts) {
  const names = Object.keys(facts);
  if ([...list.children].map((one) => one.dataset.name).join() !== names.join()) {
    list.replaceChildren(...names.map((name) => {
      const one = element("div", {}, element("dt", { textContent: name }), element("dd"));
      one.dataset.name = name;
      return one;
    }));
  }
  names.forEach((name, index) => text(list.children[index].lastChild, facts[name]));
}

// -- panels -----------------------------------------------------------------------------------------------------------

function render(snapshot) {
  latest = snapshot;
  const report = snapshot.report ?? snapshot.route;
  const engine = snapshot.report?.engine ?? null;
  text($("model"), snapshot.report?.model ?? "router");
  text($("about"), `${report.version}, ${report.state ?? report.router}, up ${seconds(report.time - report.started_at)}`);
  const panels = {
    now: engine, memory: snapshot.memory_bytes, latency: snapshot.report, queues: engine?.queues.length || engine?.cold_starts.some((one) => one.num_starts),
    replicas: snapshot.report?.replicas.length, adapters: engine, tenants: snapshot.tenants?.length,
    functions: snapshot.report?.functions.length, backends: snapshot.route, routed: snapshot.route,
  };
  for (const [id, isThere] of Object.entries(panels)) $(id).hidden = !isThere;
  for (const id of ["adapter-rows", "tenant-rows"]) $(id).parentElement.classList.toggle("plain", !snapshot.engine_s); // no ledger
  if (snapshot.memory_bytes) renderMemory(report.time, snapshot.memory_bytes);
  if (snapshot.report) renderReport(snapshot, engine);
  if (snapshot.route) renderRoute(snapshot.route);
  if (life) renderLife();
}

function renderReport(snapshot, engine) {
  const report = snapshot.report;
  text($("latency-window"), `of the last ${report.window_s} s`);
  const latencies = { "first token": "ttft_s", "between tokens": "inter_token_s", waiting: "queue_s", "whole request": "e2e_s" };
  rows($("latencies"), Object.entries(latencies).map(([title, field]) => {
    const one = report.latency[field];
    return [title, title, ...(one ? [seconds(one.p50), seconds(one.p90), seconds(one.p99), count(one.count)] : ["", "", "", "0"])];
  }));
  rows($("replica-rows"), report.replicas.map((one) => [
    String(one.index), String(one.index), stateCell(one.state), count(one.num_running), count(one.num_waiting),
    one.num_pages ? share(one.num_free_pages, one.num_pages) : "", count(one.num_resident), count(one.num_loads), count(one.num_restarts), one.node ?? "",
  ]));
  rows($("tenant-rows"), (snapshot.tenants ?? []).map((one) => [
    one.name, one.name, String(own(snapshot.weights, one.name) ?? ""), meterCell(one.num_answers, one.limits.num_answers),
    meterCell(one.requests, one.limits.requests), meterCell(one.tokens, one.limits.tokens),
    meterCell(one.num_adapters, one.limits.num_adapters), snapshot.engine_s?.tenant ? seconds(own(snapshot.engine_s.tenant, one.name) ?? 0) : "",
  ]));
  rows($("function-rows"), report.functions.map((one) => [
    one.name, one.name, stateCell(one.state), count(one.num_running ?? 0), count(one.num_waiting ?? 0), rate(one.requests_per_s ?? 0),
    bytes(one.own_bytes ?? 0), bytes(one.adapter_bytes ?? 0), count(one.num_starts ?? 0),
    one.last_start ? `${seconds(one.last_start.total_s)} from ${one.last_start.begun_from}` : "", (one.missing ?? []).map((note) => note.name).join(", "),
  ]));
  if (engine) renderEngine(snapshot, engine);
}

function renderEngine(snapshot, engine) {
  const report = snapshot.report;
  counters.push([report.time, engine.num_generated_tokens, engine.num_loads, engine.num_evictions]);
  while (report.time - counters[0][0] > RATE_S) counters.shift();
  const [first, last] = [counters[0], counters.at(-1)];
  const per = (index) => (last[0] > first[0] ? Math.max(0, (last[index] - first[index]) / (last[0] - first[0])) : null);
  const p99 = (one) => (one ? `${seconds(one.p50)} / ${seconds(one.p99)}` : "–");
  definitions($("tiles"), {
    running: count(engine.num_running), waiting: count(engine.num_waiting), "tokens/s": rate(per(1)) || "–",
    "first token P50 / P99": p99(report.latency.ttft_s), "between P50 / P99": p99(report.latency.inter_token_s),
    "adapters on the device": `${count(engine.num_resident)} of ${count(engine.num_registered)}`,
    "found there": share(engine.num_adapter_hits, engine.num_adapter_requests) || "–",
    "loads/s": rate(per(2)) || "–", "evictions/s": rate(per(3)) || "–", "pre-empted": count(engine.num_preemptions),
  });
  rows($("queue-rows"), engine.queues.map((one, index) => [
    String(index), String(index + 1), count(one.num_waiting), count(one.num_running), one.below === null ? "" : count(one.below),
    one.quota_tokens === null ? "" : `${count(one.used_tokens)} of ${count(one.quota_tokens)}`,
  ]));
  const cold = engine.cold_starts.filter((one) => one.num_starts);
  $("cold").hidden = !cold.length;
  rows($("cold-rows"), cold.map((one) => [
    one.mode, one.mode, count(one.num_starts), one.num_measured ? seconds(one.actual_s / one.num_measured) : "",
    one.num_measured ? seconds(one.expected_s / one.num_measured) : "",
  ]));
  const names = new Set();
  for (const one of snapshot.adapters ?? []) {
    names.add(one.name);
    const past = history.get(one.name) ?? [];
    if (past.length && past.at(-1)[1] > one.num_requests) past.length = 0; // loaded anew
    past.push([report.time, one.num_requests, one.num_hits]);
    while (report.time - past[0][0] > RATE_S) past.shift();
    history.set(one.name, past);
  }
  for (const name of history.keys()) if (!names.has(name)) history.delete(name);
  renderAdapters();
}

function renderAdapters() {
  const { report, adapters = [], engine_s: engineS } = latest;
  const [part, tier] = [$("find").value.trim().toLowerCase(), $("tier").value];
  const shown = adapters.filter((one) => one.name.toLowerCase().includes(part) && (!tier || one.tier === tier));
  const engine = report.engine;
  const onDisk = engine.num_registered - engine.num_resident - engine.num_only_host;
  text($("adapters-caption"), `${count(engine.num_resident)} on the device, ${count(engine.num_only_host)} in host memory alone, ${count(Math.max(0, onDisk))} on disk; the busiest ${adapters.length} are listed`);
  text($("shown"), part || tier ? (shown.length ? `${shown.length} found` : "none in the list; Enter looks a whole name up") : "");
  rows($("adapter-rows"), shown.map((one) => {
    const past = history.get(one.name);
    const passed = past ? past.at(-1)[0] - past[0][0] : 0;
    return [
      one.name, nameCell(one.name), one.tier, stateCell(one.state + (one.pinned ? ", pinned" : "")), count(one.num_running), count(one.num_waiting),
      passed ? rate((past.at(-1)[1] - past[0][1]) / passed) : "", count(one.num_requests), share(one.num_hits, one.num_requests), String(one.rank),
      bytes(one.weight_bytes), one.price === null ? "" : `${Number((one.price * 1e6).toPrecision(3))} µs`, engineS?.adapter ? seconds(own(engineS.adapter, one.name) ?? 0) : "",
    ];
  }));
}

function renderRoute(route) {
  text($("backends-caption"), `${route.backends.length} backends, ${route.models} models, router ${route.router}`);
  rows($("backend-rows"), route.backends.map((one) => [
    one.url, one.url, one.kind, stateCell(one.state + (one.reason ? `: ${one.reason}` : "")), count(one.in_flight), rate(one.load), count(one.reported.num_running),
    count(one.reported.num_waiting), one.reported.kv_usage === null ? "" : share(one.reported.kv_usage, 1), count(one.models), count(one.adapters_on_device),
  ]));
  rows($("routed-rows"), [...routedAdapters(route)].map(([name, one]) => [name, nameCell(name), count(one.num), count(one.backends.length)]));
}

function routedAdapters(route) {
  const found = new Map();
  for (const backend of route.backends) {
    for (const [name, num] of Object.entries(backend.adapters_in_flight)) {
      const one = found.get(name) ?? { num: 0, backends: [] };
      one.num += num;
      one.backends.push(backend.url);
      found.set(name, one);
    }
  }
  return found;
}

function renderMemory(time, owned) {
  memory.push([time, owned]);
  while (time - memory[0][0] > HISTORY_S) memory.shift();
  const total = (one) => OWNERS.reduce((sum, [owner]) => sum + (one[owner] ?? 0), 0);
  const [whole, most] = [total(owned), Math.max(1, ...memory.map(([, one]) => total(one)))];
  const here = OWNERS.filter(([owner]) => owned[owner]);
  const chart = $("chart");
  const [from, span] = [memory[0][0], Math.max(1, time - memory[0][0])];
  const floor = memory.map(() => 0);
  for (const [owner] of OWNERS) {
    let area = chart.querySelector(`path.${owner}`);
    if (area === null) {
      area = chart.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
      area.setAttribute("class", owner);
    }
    const at = (index) => `${((600 * (memory[index][0] - from)) / span).toFixed(1)} ${(140 - (140 * floor[index]) / most).toFixed(1)}`;
    const below = memory.map((_, index) => at(index));
    memory.forEach(([, one], index) => (floor[index] += one[owner] ?? 0));
    const above = memory.map((_, index) => at(index));
    area.setAttribute("d", memory.length > 1 ? `M${above.join("L")}L${below.reverse().join("L")}Z` : "");
  }
  text($("chart-text"), `Memory over the last ${seconds(span)}: ${here.map(([owner, name]) => `${name} ${bytes(owned[owner])}`).join(", ")}`);
  text($("chart-from"), `${seconds(span)} ago`);
  rows($("owners"), here.map(([owner, name]) => [owner, (cell) => {
    if (!cell.firstChild) cell.append(element("span", { className: `swatch ${owner}` }), name);
  }, bytes(owned[owner]), share(owned[owner], whole)]));
}

// -- the life of an adapter -------------------------------------------------------------------------------------------

const isFunctions = () => Boolean(latest.report?.functions.length);

function openLife(name, opener) {
  life = { name, opener, facts: null, moves: [], traffic: [], seen: null };
  text($("life-title"), name);
  notice("life-notice", "");
  const canChange = latest.route ? latest.route.manages_adapters : !isFunctions();
  for (const id of ["warm", "pin"]) $(id).hidden = !canChange || Boolean(latest.route);
  $("unload").hidden = !canChange;
  $("story").hidden = Boolean(latest.route); // its backends know it
  $("facts").replaceChildren();
  $("life").showModal();
  readLife();
}

async function readLife() {
  const asked = life;
  if (asked === null || latest.route) return renderLife();
  try {
    const facts = await call("GET", `adapters/${encodeURIComponent(asked.name)}`);
    Object.assign(asked, { facts, moves: facts.moves });
  } catch (error) {
    if (life === asked) notice("life-notice", error.message, true);
  }
  asked.readAt = Date.now();
  if (life === asked) renderLife();
}

function renderLife() {
  if (latest.route) {
    const one = routedAdapters(latest.route).get(life.name) ?? { num: 0, backends: [] };
    definitions($("facts"), { "requests under way": count(one.num), backends: one.backends.join(", ") || "none" });
  } else {
    if (Date.now() - (life.readAt ?? 0) > 2000) readLife();
    if (life.facts === null) return;
    noteTraffic();
    const one = life.facts;
    $("pin").setAttribute("aria-pressed", String(one.pinned));
    text($("pin"), one.pinned ? "Unpin" : "Pin");
    $("warm").disabled = one.tier === "device";
    const seen = own(latest.engine_s?.adapter, one.name);
    definitions($("facts"), {
      tier: one.tier, state: one.state, version: one.version.slice(0, 12), generation: String(one.generation), rank: `${one.rank}, ${one.num_modules} modules`,
      size: `${bytes(one.weight_bytes)}, ${count(one.num_pages)} pages`, requests: `${count(one.num_requests)}, ${count(one.num_hits)} found it on the device`,
      "under way": `${count(one.num_running)} running, ${count(one.num_waiting)} waiting`, "last use": one.last_used_s === null ? "never" : `${seconds(one.last_used_s)} ago`,
      "eviction price": one.price === null ? "none: in use, pinned, or not on the device" : `${Number((one.price * 1e6).toPrecision(3))} µs saved per second and page`,
      "engine today": seen === undefined ? "unknown without --usage" : seconds(seen),
      "first token P50 / P99": one.latency.ttft_s ? `${seconds(one.latency.ttft_s.p50)} / ${seconds(one.latency.ttft_s.p99)}` : "none lately",
      source: one.source, ...(one.error ? { error: one.error } : {}),
    });
  }
  const words = { loaded: (one) => `loaded to ${one.tier}, ${seconds(one.took_s)}`, evicted: (one) => `left ${one.tier}`, failed: (one) => `failed to load to ${one.tier}: ${one.error}`,
    served: (one) => `${count(one.requests)} requests, ${count(one.hits)} found it on the device` };
  const all = [...life.moves, ...life.traffic].sort((one, other) => other.at - one.at);
  $("no-events").hidden = all.length > 0;
  $("events").hidden = !all.length;
  const lines = all.map((one) => [clock(one.at), words[one.kind](one)]);
  const said = lines.map((line) => line.join(" ")).join("\n");
  if (life.said === said) return;
  life.said = said;
  $("events").replaceChildren(...lines.map(([at, what]) => element("li", {}, element("time", { textContent: at }), what)));
}

/** Requests since the life was opened, together for every ten seconds. */
function noteTraffic() {
  const { num_requests: requests, num_hits: hits } = life.facts;
  const before = life.seen;
  life.seen = [requests, hits];
  if (before === null || requests <= before[0]) return;
  const at = latest.report.time;
  let last = life.traffic.at(-1);
  if (last === undefined || at - last.at > 10) life.traffic.push((last = { at, kind: "served", requests: 0, hits: 0 }));
  last.requests += requests - before[0];
  last.hits += hits - before[1];
}

async function change(method, verb, done) {
  const { name } = life;
  try {
    await call(method, `adapters/${encodeURIComponent(name)}${verb}`);
  } catch (error) {
    notice("life-notice", error.message, true);
    return false;
  }
  notice("life-notice", done);
  await readLife();
  return true;
}

function notice(id, message, isBad = false) {
  $(id).classList.toggle("bad", isBad);
  text($(id), message);
}

$("warm").addEventListener("click", () => change("POST", "/warm", "It is being loaded."));
$("pin").addEventListener("click", () => (life.facts?.pinned ? change("POST", "/unpin", "It may be evicted again.") : change("POST", "/pin", "It stays where it is until it is unpinned.")));
$("unload").addEventListener("click", () => {
  text($("confirm-text"), `${life.name} can no longer be called. Requests under way finish on it.`);
  $("confirm").showModal();
  $("no").focus();
});
$("no").addEventListener("click", () => $("confirm").close());
$("yes").addEventListener("click", async () => {
  const { name } = life;
  $("confirm").close();
  try {
    await call("DELETE", `adapters/${encodeURIComponent(name)}`);
  } catch (error) {
    return notice("life-notice", error.message, true);
  }
  $("life").close();
  notice("notice", `${name} was unloaded.`);
});
$("close").addEventListener("click", () => $("life").close());
$("life").addEventListener("close", () => {
  const opener = life?.opener;
  life = null;
  if (opener?.isConnected) opener.focus();
  else $("main").focus();
});
$("filter").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("find").value.trim();
  if (name) openLife(name, $("find"));
});
for (const id of ["find", "tier"]) $(id).addEventListener("input", () => latest?.report?.engine && renderAdapters());

// -- session and stream -----------------------------------------------------------------------------------------------

async function call(method, path, body) {
  const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(`ui/${path}${query}`, { method, ...sent });
  const isJson = (answer.headers.get("content-type") ?? "").startsWith("application/json");
  const content = isJson ? await answer.json() : null;
  if (answer.ok) return content;
  if (answer.status === 401 && path !== "session") start();
  throw new Error(content?.error?.message ?? `The server answered ${answer.status}.`);
}

async function start() {
  source?.close();
  source = null;
  let state;
  try {
    state = await call("GET", "session");
  } catch (error) {
    text($("link"), error instanceof TypeError ? "not reachable" : error.message);
    return setTimeout(start, 2000);
  }
  $("panels").hidden = !state.is_open;
  $("sign-in").hidden = state.is_open || !state.needs_key;
  $("sign-out").hidden = !state.is_open || !state.needs_key;
  if (state.is_open) return watch();
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  text($("link"), state.needs_key ? "signed out" : state.message);
  if (state.needs_key) $("key").focus();
}

function watch() {
  if (source !== null || document.hidden) return;
  source = new EventSource(`ui/events${query}`);
  source.addEventListener("message", (event) => {
    text($("link"), "live");
    render(JSON.parse(event.data));
  });
  source.addEventListener("error", () => {
    text($("link"), "reconnecting");
    if (source?.readyState === EventSource.CLOSED) { // the server refused: no session, or too many pages
      source = null;
      setTimeout(start, 2000);
    }
  });
}

$("sign-in").querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  text($("sign-in-error"), "");
  try {
    await call("POST", "session", { key: $("key").value });
  } catch (error) {
    text($("sign-in-error"), error.message);
    return $("key").select();
  }
  $("key").value = "";
  await start();
  $("main").focus();
});
$("sign-out").addEventListener("click", async () => {
  await call("DELETE", "session");
  latest = life = null;
  start();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return start();
  source?.close();
  source = null;
});
setInterval(() => source !== null && !$("sign-out").hidden && call("PUT", "session").catch(() => {}), 300e3);
for (const table of document.querySelectorAll("table.cards")) { // their rows are no table rows for CSS where it is narrow
  table.setAttribute("role", "table");
  table.tHead.rows[0].setAttribute("role", "row");
  for (const part of [table.tHead, table.tBodies[0]]) part.setAttribute("role", "rowgroup");
  for (const cell of table.tHead.rows[0].cells) cell.setAttribute("role", "columnheader");
}
start();
