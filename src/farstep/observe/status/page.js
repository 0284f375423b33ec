"use strict";
// Shows a run: first the data embedded in the page, then the updates that its server sends.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const STATES = {
  alive: "rolling", starting: "starting", queued: "waiting for a node", parked: "parked", released: "released until the next rollout",
  lost: "lost, being replaced", stopped: "stopped",
};
const TIMES = {
  env: "environments", inference: "policy", tickets: "waiting for the learner", send: "sending rows", weights: "loading weights",
  wait: "waiting for rows", prepare: "assembling batches", update: "updates", publish: "publishing weights",
  train: "updates", collect: "waiting for rows", evaluate: "evaluation", checkpoint: "saving checkpoints",
};
const FEW = 24;
const LISTED = 5;
// By what cells are colored: the lower limits of levels 1 to 4, a worker's value, which data it needs, and texts.
const COLORS = {
  rate: {
    name: "recent steps per second", limits: [0.2, 0.4, 0.6, 0.8], isKnown: () => true,
    value: (workers, worker, { median }) => median ? 1 - workers.rate[worker] / median : 0,
    texts: ["80 % of the median or more", "60 to 80 %", "40 to 60 %", "20 to 40 %", "20 % or less"],
    summary: ({ median }) => `below 80 % of the median (${number(median)} steps/s)`,
  },
  lag: {
    name: "mean version lag", limits: [1, 2, 4, 8], isKnown: (workers) => workers.lag.some((lag) => lag !== null),
    value: (workers, worker) => workers.lag[worker],
    texts: ["under 1", "1 to 2", "2 to 4", "4 to 8", "8 or more"],
    summary: () => "with a mean version lag of 1 or more",
  },
  divergence: {
    name: "KL divergence", limits: [0.25, 0.5, 0.75, 1], isKnown: (workers, threshold) => Boolean(threshold),
    value: (workers, worker, { threshold }) => workers.divergence[worker] / threshold,
    texts: ["under 25 % of the threshold", "25 to 50 %", "50 to 75 %", "75 to 100 %", "100 % or more"],
    summary: ({ threshold }) => `at 25 % of the KL threshold (${threshold}) or more`,
  },
};
const isBad = (event) => event.kind === "lost" || event.kind === "stuck" || event.text.startsWith("the run failed");
let chosen = null;
let shown = null;
let shownEvents = "";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(Math.abs(value) < 1 ? 2 : digits)));
}

function bytes(value) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

function duration(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

function show(data) {
  document.title = `${data.run.title} – farstep`;
  byId("title").textContent = data.run.title;
  byId("state").textContent = data.state;
  byId("options").textContent = data.run.options.map(([name, value]) => `${name} ${value}`).join(" · ");
  showProgress(data);
  showDiagnosis(data.diagnoses);
  showNumbers(data);
  showCluster(data);
  showSlots(data.slots);
  const curves = [["training (mean of the last 100 episodes)", data.series.return], ["evaluation", data.series.evaluation]];
  chart(byId("returns"), curves, "steps");
  chart(byId("rates"), [["recent steps per second", data.series.rate]], "seconds", 0);
  showTimes(data.times);
  showLags(data.lags);
  showWeights(data);
  showBuffer(data.buffer);
  if (data.events) showEvents(data.events);
  const rows = Object.entries(data.metrics).map(([name, value]) =>
    element("tr", {}, element("td", {}, name), element("td", {}, number(value, 5))));
  byId("metrics").replaceChildren(element("tbody", {}, ...rows));
}

function showProgress({ progress, live }) {
  const { steps, total_steps: total, seconds_left: seconds, target_return: target } = progress;
  byId("progress").hidden = !total;
  if (!total) return;
  const reached = typeof target === "number", done = `${number(steps)} of ${number(total)} steps`;
  byId("bar").value = reached ? 1 : Math.min(1, steps / total);
  const left = live && seconds && !reached ? `, about ${duration(seconds)} left` : "";
  byId("progress-text").textContent = reached ? `target return ${number(target, 6)} reached after ${done}` : done + left;
}

function showDiagnosis(diagnoses) {
  const box = byId("diagnosis");
  box.hidden = !diagnoses.length;
  box.classList.toggle("problem", diagnoses.some((each) => each.is_problem));
  box.replaceChildren(...diagnoses.map((each) => {
    const numbers = Object.entries(each.numbers).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
    return element("div", {}, element("p", { class: "cause" }, each.text), element("p", {}, each.remedy),
      element("p", { class: "key" }, numbers));
  }));
}

function showNumbers(data) {
  const { metrics, progress, weights, workers } = data;
  const alive = workers ? workers.state.filter((state) => state === "alive" || state === "released").length : metrics["workers/alive"];
  const numbers = [
    ["steps", number(progress.steps)],
    ["recent steps per second", number(data.rate)],
    ["mean steps per second", number(metrics["rate/steps_per_second"])],
    ["return", number(metrics["env/return_mean"] ?? data.series.return.at(-1)?.[1])],
    ["evaluation", number(metrics["eval/return_mean"])],
    ["workers", workers ? `${number(alive)} of ${number(workers.state.length)}` : number(alive)],
    ["restarts", number(workers ? Math.max(workers.restarts, metrics["workers/restarts"] ?? 0) : metrics["workers/restarts"])],
    ["version", number(weights ? weights.version : metrics["train/actor/current_version"])],
  ].filter(([, value]) => value !== "–");
  byId("numbers").replaceChildren(...numbers.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function onHosts(hosts) {
  const count = new Set(hosts.filter((host) => host !== null)).size;
  return count ? ` on ${counted(count, "host")}` : "";
}

function showCluster(data) {
  const { workers, acting, kl_threshold: threshold } = data;
  byId("cluster-section").hidden = !workers;
  if (!workers) return;
  showHead(data);
  const count = workers.state.length, hosts = new Map(), totals = {};
  const on = (host) => {
    if (!hosts.has(host)) hosts.set(host, { workers: [], servers: [] });
    return hosts.get(host);
  };
  workers.state.forEach((state, worker) => {
    totals[state] = (totals[state] || 0) + 1;
    on(workers.host[worker] ?? workers.unconnected_nodes).workers.push(worker);
  });
  for (const server of acting) on(server.host ?? workers.unconnected_nodes).servers.push(server.number);
  data.hosts.forEach(on);
  const inWords = Object.entries(totals).map(([state, n]) => `${number(n)} ${STATES[state] || state}`).join(", ");
  const lines = [`${counted(count, "worker")}${onHosts(workers.host)}: ${inWords}.`];
  if (acting.length) {
    const rate = acting.reduce((sum, server) => sum + server.rate, 0), where = onHosts(acting.map((server) => server.host));
    lines.push(`${counted(acting.length, "acting server")}${where} act${acting.length > 1 ? "" : "s"} for them: ${number(rate)} rows/s (recent).`);
  }
  byId("cluster-text").textContent = lines.join(" ");
  const cluster = byId("cluster");
  cluster.className = count <= FEW ? "few" : count > 100 ? "many" : "";
  const layout = JSON.stringify([...hosts]);
  if (cluster.dataset.layout !== layout) {
    cluster.dataset.layout = layout;
    cluster.replaceChildren(...[...hosts].map(([host, on]) => hostBox(host, on.workers, on.servers)));
  }
  for (const server of acting) showServer(server);
  const levels = showColors(workers, threshold);
  workers.state.forEach((state, worker) => {
    const cell = byId(`worker-${worker}`);
    const level = levels.has(worker) ? ` level-${levels.get(worker)}` : "";
    cell.className = `cell ${state}${level}${worker === chosen ? " chosen" : ""}`;
    const text = describe(workers, worker, threshold);
    cell.title = text;
    cell.setAttribute("aria-selected", String(worker === chosen));
    cell.setAttribute("aria-label", text);
    if (count <= FEW) showCard(cell, workers, worker, threshold);
  });
  byId("worker").textContent = chosen === null ? "Choose a worker with the mouse or the arrow keys." : describe(workers, chosen, threshold);
  const states = Object.entries(STATES).filter(([state]) => count <= FEW || state !== "alive");
  byId("legend").replaceChildren(...states.map(([state, text]) => legendItem(state, text)));
  shown = data;
}

const legendItem = (kind, text) => element("li", {}, element("span", { class: `cell ${kind}` }), text);

function showHead({ rate, weights, times }) {
  const lines = [`${number(rate)} steps/s (recent)`];
  if (weights) lines.push(`version ${number(weights.version)}`);
  const [activity] = times.learner || [];
  if (activity) lines.push(`learner: ${TIMES[activity[0]] || activity[0]} ${percent(activity[1])}`);
  byId("head").replaceChildren(element("b", {}, "head"), ...lines.map((text) => element("span", {}, text)));
}

// Show what the colors of rolling workers mean, if there are many workers; return the level of each worker.
function showColors(workers, threshold) {
  const levels = new Map(), box = byId("colors"), select = byId("color");
  box.hidden = workers.state.length <= FEW;
  if (box.hidden) return levels;
  const known = Object.keys(COLORS).filter((key) => COLORS[key].isKnown(workers, threshold));
  if (select.dataset.known !== known.join()) {
    select.dataset.known = known.join();
    select.replaceChildren(...known.map((key) => element("option", { value: key }, COLORS[key].name)));
  }
  const { limits, value, texts, summary } = COLORS[select.value];
  const rolling = [...workers.state.keys()].filter((worker) => workers.state[worker] === "alive");
  const rates = rolling.map((worker) => workers.rate[worker]).sort((a, b) => a - b);
  const reference = { threshold, median: rates[Math.floor(rates.length / 2)] ?? null };
  const values = new Map(rolling.map((worker) => [worker, value(workers, worker, reference)]));
  for (const [worker, found] of values) levels.set(worker, limits.filter((limit) => found >= limit).length);
  const marked = rolling.filter((worker) => levels.get(worker)).sort((a, b) => values.get(b) - values.get(a));
  const listed = marked.slice(0, LISTED).map((worker) => `worker ${worker} (${number(workers[select.value][worker])})`);
  if (marked.length > LISTED) listed.push(`${number(marked.length - LISTED)} more`);
  byId("color-text").textContent = !rolling.length ? "No worker is rolling." :
    `${marked.length ? counted(marked.length, "worker") : "No worker"} ${summary(reference)}${listed.length ? `: ${listed.join(", ")}` : ""}.`;
  byId("color-legend").replaceChildren(...texts.map((text, level) => legendItem(`level-${level}`, text)));
  return levels;
}

function showCard(cell, workers, worker, threshold) {
  const parts = [element("b", {}, `worker ${worker}`), element("span", {}, workers.rate[worker] ? `${number(workers.rate[worker])} steps/s (recent)` : STATES[workers.state[worker]] || workers.state[worker])];
  const divergence = workers.divergence[worker], lag = workers.lag[worker];
  if (lag !== null && workers.rate[worker]) parts.push(element("span", {}, `mean version lag ${number(lag)}`));
  if (divergence !== null && threshold) {
    const fill = element("div", { class: "fill" });
    fill.style.width = `${Math.min(100, 100 * divergence / threshold)}%`;
    parts.push(element("span", { class: "key" }, `KL ${number(divergence)} of ${threshold}`), element("div", { class: "track" }, fill));
  }
  cell.replaceChildren(...parts);
}

function showServer({ number: server, rate, batch_size: rows, wait_ms: wait, restarts }) {
  const lines = [`${number(rate)} rows/s (recent)`];
  if (rows) lines.push(`${number(rows)} rows per call of act`, `workers wait ${number(wait)} ms per request`);
  if (restarts) lines.push(counted(restarts, "restart"));
  byId(`server-${server}`).replaceChildren(element("b", {}, `acting server ${server}`), ...lines.map((text) => element("span", {}, text)));
}

function hostBox(host, numbers, servers) {
  const box = element("div", { class: "host" }, element("div", { class: "name" }, host));
  if (servers.length) {
    const items = servers.map((server) => element("li", { id: `server-${server}` }));
    box.append(element("ul", { class: "servers", "aria-label": `acting servers on ${host}` }, ...items));
  }
  if (numbers.length) box.append(workersGrid(host, numbers));
  return box;
}

function workersGrid(host, numbers) {
  const grid = element("div", { class: "grid", role: "listbox", tabindex: "0", "aria-label": `workers on ${host}` });
  for (const worker of numbers) {
    const cell = element("div", { id: `worker-${worker}`, role: "option", "aria-selected": "false", class: "cell" });
    cell.addEventListener("click", () => choose(grid, worker));
    grid.append(cell);
  }
  grid.addEventListener("focus", () => numbers.includes(chosen) || choose(grid, numbers[0]));
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = Math.min(numbers.length - 1, Math.max(0, numbers.indexOf(chosen) + step));
    choose(grid, numbers[at]);
  });
  return grid;
}

function choose(grid, worker) {
  for (const other of document.querySelectorAll(".cell.chosen")) {
    other.classList.remove("chosen");
    other.setAttribute("aria-selected", "false");
  }
  chosen = worker;
  const cell = byId(`worker-${worker}`);
  cell.classList.add("chosen");
  cell.setAttribute("aria-selected", "true");
  grid.setAttribute("aria-activedescendant", cell.id);
  byId("worker").textContent = describe(shown.workers, worker, shown.kl_threshold);
}

function describe(workers, worker, threshold) {
  const parts = [`worker ${worker}: ${STATES[workers.state[worker]] || workers.state[worker]}`];
  if (workers.rate[worker]) parts.push(`${number(workers.rate[worker])} steps/s (recent)`);
  if (workers.lag[worker] !== null) parts.push(`mean version lag ${number(workers.lag[worker])}`);
  const divergence = workers.divergence[worker];
  if (divergence !== null) parts.push(`KL ${number(divergence)}${threshold ? ` of ${threshold}` : ""}`);
  return parts.join(", ");
}

function showSlots(slots) {
  byId("slots-section").hidden = !slots;
  if (!slots) return;
  const { held, released, parked, held_seconds: heldSeconds, used_seconds: used, gpu_seconds: gpus, coordinator } = slots;
  const others = [[released, "released between rollouts"], [parked, "parked"]].filter(([count]) => count);
  const lines = [[`${number(held)} held`, ...others.map(([count, text]) => `${number(count)} ${text}`)].join(", ")];
  lines.push(`${duration(heldSeconds)} held and ${duration(used)} used, summed over workers`);
  if (gpus) lines.push(`${duration(gpus)} of GPUs held`);
  if (coordinator) {
    const granted = `${number(coordinator.granted)} of ${number(coordinator.wanted)} slots`;
    lines.push(`Coordinator ${coordinator.name} has granted ${granted}.`);
  }
  const share = heldSeconds ? Math.min(1, used / heldSeconds) : 0;
  byId("slots").replaceChildren(bars([["used", share, percent(share)]]), ...lines.map((text) => element("p", {}, text)));
}

function chart(box, curves, unit, floor = null) {
  const drawn = curves.filter(([, points]) => points.length > 1);
  if (!drawn.length) {
    box.replaceChildren(element("p", { class: "key" }, "no data yet"));
    return;
  }
  const all = drawn.flatMap(([, points]) => points);
  const [left, right] = range(all.map(([x]) => x)), [low, high] = range(all.map(([, y]) => y), floor);
  const width = 460, height = 230, margin = { left: 52, right: 8, top: 8, bottom: 20 };
  const x = (value) => margin.left + (value - left) / (right - left) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - (value - low) / (high - low) * (height - margin.top - margin.bottom);
  const texts = drawn.map(([name, points]) => `${name}: now ${number(points.at(-1)[1])}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${texts.join("; ")}; between ${number(low)} and ${number(high)}`);
  for (const value of [low, (low + high) / 2, high]) {
    line(svg, x(left), y(value), x(right), y(value));
    label(svg, margin.left - 6, y(value) + 4, number(value), "end");
  }
  label(svg, margin.left, height - 4, number(left), "start");
  label(svg, width - margin.right, height - 4, `${number(right)} ${unit}`, "end");
  drawn.forEach(([name, points]) => {
    const curve = document.createElementNS(SVG, "polyline");
    curve.setAttribute("class", name === "evaluation" ? "second" : "first");
    curve.setAttribute("points", points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" "));
    svg.append(curve);
  });
  const keys = drawn.map(([name, points]) =>
    element("p", { class: "key" }, `${name === "evaluation" ? "╌╌" : "—"} ${name} ${number(points.at(-1)[1])}`));
  box.replaceChildren(svg, ...keys);
}

function range(values, floor = null) {
  const low = floor ?? Math.min(...values), high = Math.max(low, ...values);
  return low === high ? [floor ?? low - 1, high + 1] : [low, high];
}

function line(svg, x1, y1, x2, y2) {
  const made = document.createElementNS(SVG, "line");
  for (const [key, value] of Object.entries({ x1, y1, x2, y2, class: "axis" })) made.setAttribute(key, value);
  svg.append(made);
}

function label(svg, x, y, text, anchor) {
  const made = document.createElementNS(SVG, "text");
  for (const [key, value] of Object.entries({ x, y, "text-anchor": anchor })) made.setAttribute(key, value);
  made.textContent = text;
  svg.append(made);
}

function bars(entries) {
  const list = element("ul", { class: "bars" });
  for (const [name, share, text] of entries) {
    const fill = element("div", { class: "fill" });
    fill.style.width = `${100 * share}%`;
    list.append(element("li", {}, element("span", {}, name), element("div", { class: "track" }, fill),
      element("span", { class: "value" }, text)));
  }
  return list;
}

function showTimes(times) {
  const parts = Object.entries(times || {}).filter(([, shares]) => shares.length);
  byId("times-section").hidden = !parts.length;
  byId("times").replaceChildren(...parts.flatMap(([who, shares]) =>
    [element("p", { class: "key" }, who), bars(shares.map(([name, share]) => [TIMES[name] || name, share, percent(share)]))]));
}

// From 16 on, lags are counted by powers of two.
const lagText = (lag) => lag === 0 ? "0 (newest weights)" : lag < 16 ? String(lag) : `${lag} to ${2 * lag - 1}`;

function showLags(lags) {
  byId("lags-section").hidden = !lags?.length;
  if (!lags?.length) return;
  const chunks = lags.reduce((sum, [, count]) => sum + count, 0);
  byId("lags").replaceChildren(bars(lags.map(([lag, count]) =>
    [lagText(lag), count / chunks, percent(count / chunks)])));
}

function showWeights({ weights, kl_threshold: threshold }) {
  byId("weights-section").hidden = !weights;
  if (!weights) return;
  const { pulls, possible, bytes_sent: sent, bytes_saved: saved } = weights;
  const rule = threshold ? `Workers pull new weights when their KL divergence from the learner exceeds ${threshold}.` : "";
  const lines = [rule, `${number(pulls)} pulls of ${number(possible)} possible ones; ${bytes(sent)} sent`];
  if (saved > 0) lines.push(`${bytes(saved)} not sent, because workers skipped versions`);
  byId("weights").replaceChildren(...lines.filter(Boolean).map((text) => element("p", {}, text)));
}

function showBuffer(buffer) {
  byId("buffer-section").hidden = !buffer;
  if (!buffer) return;
  const share = buffer.fill / buffer.capacity;
  const lines = [`${number(buffer.fill)} of ${number(buffer.capacity)} rows${buffer.bytes ? `, ${bytes(buffer.bytes)}` : ""}`];
  if (buffer.ratio !== null) lines.push(`${number(buffer.ratio)} rows sampled per row inserted`);
  byId("buffer").replaceChildren(bars([["filled", share, percent(share)]]), ...lines.map((text) => element("p", {}, text)));
}

function showEvents(events) {
  const text = JSON.stringify(events);
  if (text === shownEvents) return; // keep open tracebacks open
  shownEvents = text;
  const open = new Set([...document.querySelectorAll("#events details[open]")].map((each) => each.dataset.key));
  byId("events").replaceChildren(...events.map((event) => {
    const time = new Date(1000 * event.time);
    const item = element("li", { class: isBad(event) ? "bad" : "" },
      element("time", { datetime: time.toISOString() }, time.toLocaleTimeString()),
      element("span", { class: "kind" }, event.kind), event.text);
    if (event.traceback) {
      const details = element("details", { "data-key": `${event.time}` }, element("summary", {}, "traceback"), element("pre", {}, event.traceback));
      details.open = open.has(details.dataset.key);
      item.append(details);
    }
    return item;
  }));
  if (!events.length) byId("events").append(element("li", {}, "nothing has happened yet"));
}

function start() {
  byId("color").addEventListener("change", () => showCluster(shown));
  const embedded = JSON.parse(byId("data").textContent);
  show(embedded);
  if (!embedded.live || new URLSearchParams(location.search).get("live") === "0") return;
  const source = new EventSource(`events${location.search}`);
  source.onmessage = (message) => show(JSON.parse(message.data));
  source.addEventListener("happened", (message) => showEvents(JSON.parse(message.data)));
  source.addEventListener("end", () => source.close());
  source.onerror = () => { byId("state").textContent = "not connected: the run has ended, its page is closed, or too many windows show it"; };
}

start();
