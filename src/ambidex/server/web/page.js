"use strict";
// Chat over /v1/chat/completions, and a live view made of differences between two readings of /v1/ambidex/status.

const POLL_MS = 1000;
const CURVE_POINTS = 120;
const SECTION_COLORS = { moves: "#ec4899", prepare: "#14b8a6", forward: "#3b82f6", sample: "#f59e0b" };

const find = (id) => document.getElementById(id);
const turns = []; // what the model is told: {role, content}
let last = null; // the last reading
let rates = [];
let running = null; // AbortController of the answer that is being written

function headers() {
  const key = find("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

// ---- chat

function show(role, text) {
  const item = make("li", role, text);
  find("turns").append(item);
  scroll();
  return item;
}

function scroll() {
  const list = find("turns");
  list.scrollTop = list.scrollHeight;
}

function askBody() {
  const system = find("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = find(name).value;
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function ask(text) {
  turns.push({ role: "user", content: text });
  show("user", text);
  const item = show("assistant open", "");
  const answer = document.createTextNode("");
  item.append(answer);
  running = new AbortController();
  setBusy(true);
  const begun = performance.now();
  let first = null, usage = null, reason = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(askBody()), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      if (choice.delta.content) {
        first ??= performance.now();
        answer.data += choice.delta.content;
        scroll();
      }
    }
    item.append(make("small", "", note(usage, reason, begun, first)));
  } catch (error) {
    if (error.name === "AbortError") item.append(make("small", "", "stopped"));
    else show("error", error.message);
  } finally {
    item.classList.remove("open");
    if (answer.data) turns.push({ role: "assistant", content: answer.data });
    else { turns.pop(); item.remove(); }
    running = null;
    setBusy(false);
  }
}

function note(usage, reason, begun, first) {
  const seconds = (performance.now() - (first ?? begun)) / 1000;
  const parts = [];
  if (usage) {
    parts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (first) parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push("cut off at the length limit");
  return parts.join(" · ");
}

function setBusy(isBusy) {
  find("send").hidden = isBusy;
  find("stop").hidden = !isBusy;
}

// ---- live view

async function poll() {
  try {
    const response = await fetch("v1/ambidex/status", { headers: headers() });
    const body = await response.json();
    if (!response.ok) throw new Error(response.status === 401 ? "needs an API key" : body.error.code.replace("_", " "));
    setState(body.num_running ? "computing" : "ready", "ready");
    render(body);
  } catch (error) {
    setState(error instanceof TypeError ? "no connection" : error.message, "bad");
    last = null;
  }
  setTimeout(poll, POLL_MS);
}

function setState(text, className) {
  find("state").textContent = text;
  find("state").className = `state ${className}`;
}

function render(now) {
  find("model").textContent = now.model;
  find("running").textContent = now.num_running;
  find("waiting").textContent = now.num_waiting;
  find("moves").textContent = now.num_moves + (now.num_failed_moves ? ` (${now.num_failed_moves} failed)` : "");
  find("preemptions").textContent = now.num_preemptions;
  find("cached").textContent = now.num_cached_tokens;
  find("evicted").textContent = now.num_evicted_blocks + (now.num_cache_mismatches ? ` (${now.num_cache_mismatches} differed)` : "");
  find("restarts").textContent = now.num_restarts;
  find("tiers").replaceChildren(...Object.entries(now.tiers).map(([name, tier]) => tierRow(name, tier)));
  if (last && now.num_restarts !== last.num_restarts) last = null; // the engine's counters began anew
  if (last && now.time_s > last.time_s) {
    const seconds = now.time_s - last.time_s;
    const rate = (now.num_output_tokens - last.num_output_tokens) / seconds;
    find("rate").textContent = rate.toFixed(1);
    find("computed").textContent = ((now.num_computed_tokens - last.num_computed_tokens) / seconds).toFixed(1);
    rates = [...rates, rate].slice(-CURVE_POINTS);
    drawCurve();
    const steps = now.num_steps - last.num_steps;
    if (steps > 0) {
      renderLanes(now, steps);
      renderSections(now);
    }
  }
  if (!last) {
    find("report").tBodies[0].replaceChildren(...now.report.map((fact) => {
      const row = document.createElement("tr");
      row.append(make("td", "", `${fact.section} ${fact.name}`), make("td", "", fact.why ? `${fact.value} (${fact.why})` : fact.value));
      return row;
    }));
  }
  last = now;
}

function tierRow(name, tier) {
  const total = tier.capacity_bytes || 1;
  const row = make("div", `row ${name}`);
  const head = document.createElement("span");
  head.append(make("b", "", name.toUpperCase()), make("em", "", `KV ${bytes(tier.kv_bytes)} of ${bytes(tier.capacity_bytes)}`));
  const bar = make("div", "bar");
  bar.append(part("kv", tier.kv_bytes / total), part("kept", tier.cached_bytes / total));
  const mark = make("i", "mark");
  mark.style.left = `calc(${(100 * tier.peak_kv_bytes) / total}% - 2px)`;
  if (tier.peak_kv_bytes) bar.append(mark);
  bar.title = `weights ${bytes(tier.weights_bytes)}, KV ${bytes(tier.kv_bytes)}, at most ${bytes(tier.peak_kv_bytes)}, kept ${bytes(tier.cached_bytes)}`;
  row.append(head, bar);
  const more = [[tier.cached_bytes, "kept"], [tier.weights_bytes, "of weights"]].filter(([size]) => size);
  if (more.length) row.append(make("em", "more", `and ${more.map(([size, what]) => `${bytes(size)} ${what}`).join(", ")}`));
  return row;
}

function part(className, share) {
  const element = make("i", className);
  element.style.width = `${100 * share}%`;
  return element;
}

function renderLanes(now, steps) {
  const reads = Object.entries(now.lane_bytes).map(([lane, size]) => [lane, (size - (last.lane_bytes[lane] ?? 0)) / steps]);
  const most = Math.max(1, ...reads.map(([, size]) => size));
  find("lanes").replaceChildren(...reads.map(([lane, size]) => {
    const row = make("div", "row");
    const head = document.createElement("span");
    head.append(make("b", "", `${lane.toUpperCase()} lane`), make("em", "", bytes(size)));
    const bar = make("div", "bar");
    bar.append(part(`lane-${lane}`, size / most));
    row.append(head, bar);
    return row;
  }));
}

function renderSections(now) {
  const spent = Object.entries(now.seconds)
    .filter(([name]) => name !== "total")
    .map(([name, seconds]) => [name, seconds - (last.seconds[name] ?? 0)]);
  const total = spent.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const color = (name) => SECTION_COLORS[name] ?? "#64748b";
  find("sections").replaceChildren(...spent.map(([name, seconds]) => {
    const element = part("", seconds / total);
    element.style.background = color(name);
    return element;
  }));
  find("section-names").replaceChildren(...spent.flatMap(([name, seconds]) => {
    const dot = make("i", "");
    dot.style.background = color(name);
    return [dot, `${name} ${Math.round((100 * seconds) / total)} % `];
  }));
}

function drawCurve() {
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, idx) => {
    const x = 240 * (1 - (rates.length - 1 - idx) / (CURVE_POINTS - 1));
    return `${x.toFixed(1)},${(46 - (44 * rate) / most).toFixed(1)}`;
  });
  find("curve").querySelector("polyline").setAttribute("points", points.join(" "));
}

// ---- start

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running) return;
  find("prompt").value = "";
  ask(text);
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("form").requestSubmit();
  }
});
find("stop").addEventListener("click", () => running?.abort());
find("clear").addEventListener("click", () => {
  running?.abort();
  turns.length = 0;
  find("turns").replaceChildren();
});
find("key").value = sessionStorage.getItem("key") ?? "";
find("key").addEventListener("change", () => sessionStorage.setItem("key", find("key").value));
poll();
