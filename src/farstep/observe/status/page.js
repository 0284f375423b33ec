"use strict";
// Shows a run: first the data embedded in the page, then the updates that its server sends.
// The page contains cluster.js and this file as one script.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const TIMES = {
  env: "environments", inference: "policy", tickets: "waiting for the learner", send: "sending rows", weights: "loading weights",
  wait: "waiting for rows", prepare: "assembling batches", update: "updates", publish: "publishing weights",
  train: "updates", collect: "waiting for rows", sample: "taking batches from the buffer", evaluate: "evaluation", checkpoint: "saving checkpoints",
};
const withoutPrefix = (text, prefix) => text.startsWith(prefix) ? text.slice(prefix.length) : text;
const isBad = (event) => event.kind === "lost" || event.kind === "stuck" || event.text.startsWith("the run failed");
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
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

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
  chart(byId("returns"), curves, (steps) => `${number(steps)} steps`);
  chart(byId("rates"), [["recent steps per second", data.series.rate]], duration, 0);
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

// Options do not break at their hyphens.
const withOptions = (text) => text.split(/(--[a-z][a-z-]*)/).map((part, at) => at % 2 ? element("code", {}, part) : part);

function showDiagnosis(diagnoses) {
  const box = byId("diagnosis");
  box.hidden = !diagnoses.length;
  box.classList.toggle("problem", diagnoses.some((each) => each.is_problem));
  box.replaceChildren(...diagnoses.map((each) => {
    const numbers = Object.entries(each.numbers).map(([name, value]) => `${name} ${number(value)}`).join(" · ");
    return element("div", {}, element("p", { class: "cause" }, `${each.is_problem ? "Problem: " : ""}${each.text}`), element("p", {}, ...withOptions(each.remedy)),
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

function chart(box, curves, format, floor = null) {
  const drawn = curves.filter(([, points]) => points.length > 1);
  if (!drawn.length) {
    box.replaceChildren(element("p", { class: "key" }, "no data yet"));
    return;
  }
  const all = drawn.flatMap(([, points]) => points);
  const [left, right] = range(all.map(([x]) => x)), [low, high] = range(all.map(([, y]) => y), floor);
  const width = 460, height = 230, margin = { left: 68, right: 8, top: 8, bottom: 24 };
  const x = (value) => margin.left + (value - left) / (right - left) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - (value - low) / (high - low) * (height - margin.top - margin.bottom);
  const texts = drawn.map(([name, points]) => `${name}: now ${number(points.at(-1)[1])}`);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${texts.join("; ")}; between ${number(low)} and ${number(high)}`);
  for (const value of [low, (low + high) / 2, high]) {
    line(svg, x(left), y(value), x(right), y(value));
    label(svg, margin.left - 6, y(value) + 5, number(value), "end");
  }
  label(svg, margin.left, height - 4, format(left), "start");
  label(svg, width - margin.right, height - 4, format(right), "end");
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
      element("span", { class: "kind" }, event.kind), withoutPrefix(event.text, `${event.kind} `));
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
