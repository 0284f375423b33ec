"use strict";
// The picture of the cluster: the head, hosts, workers and acting servers.
const STATES = {
  alive: "rolling", starting: "starting", queued: "waiting for a node", parked: "parked", released: "released until the next rollout",
  lost: "lost (being replaced)", stopped: "stopped",
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
let chosen = null;
let shown = null;

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
  const found = [...Object.keys(STATES).filter((state) => totals[state]), ...Object.keys(totals).filter((state) => !STATES[state])];
  const inWords = found.map((state) => `${number(totals[state])} ${STATES[state] || state}`).join(", ");
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
  const states = Object.entries(STATES).filter(([state]) => count > FEW && state !== "alive" && totals[state]); // cards have texts
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
  const state = workers.state[worker], rate = state === "alive" ? workers.rate[worker] : 0;
  const text = rate ? `${number(rate)} steps/s (recent)` : STATES[state] || state;
  const parts = [element("b", {}, `worker ${worker}`), element("span", {}, text)];
  const divergence = workers.divergence[worker], lag = workers.lag[worker];
  if (lag !== null && rate) parts.push(element("span", {}, `mean version lag ${number(lag)}`));
  if (state === "alive" && divergence !== null && threshold) {
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
