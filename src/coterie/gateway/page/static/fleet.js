// Workers by pool: their running requests and their health.

import { attribute, make, text } from "./dom.js";

function cell(label, name = "") {
  return make("td", { "data-label": label, class: name });
}

function row() {
  const bar = make("div", { class: "fill" });
  const said = make("span");
  const name = make("th", { scope: "row", class: "name" });
  const cells = { role: cell("role"), requests: cell("", "full"), experts: cell("experts of a layer"), health: cell("health"), breaker: cell("breaker") };
  cells.requests.append(make("div", { class: "meter" }, make("div", { class: "track", "aria-hidden": "true" }, bar), said));
  const health = make("span", { class: "mark" });
  const breaker = make("span", { class: "mark" });
  cells.health.append(health);
  cells.breaker.append(breaker);
  const node = make("tr", {}, name, ...Object.values(cells));
  node.parts = { ...cells, name, bar, said, health, breaker };
  return node;
}

// What the worker's own metrics say, and how old that is. A worker without any is taken to be as busy as the others.
function reported(report) {
  if (report.age_s == null) return `${report.error ?? "its metrics are not read"}: requests of other front ends are guessed`;
  return `reported ${report.age_s} s ago: ${report.running} running, ${report.waiting} waiting, ${Math.round(100 * report.kv_used)}% of KV used`;
}

function show(node, worker) {
  const parts = node.parts;
  text(parts.name, worker.id);
  text(parts.role, worker.map_version == null ? worker.role : `${worker.role}, map ${worker.map_version}`);
  parts.bar.style.width = `${Math.min(100, (100 * (worker.running + worker.others)) / worker.places)}%`;
  text(parts.said, `${worker.running}${worker.others ? ` + ${worker.others}` : ""} / ${worker.places}`);
  attribute(parts.requests, "title", reported(worker.reported));
  text(parts.experts, worker.experts ? worker.experts.toFixed(1) : "–");
  text(parts.health, worker.healthy ? "healthy" : worker.checked ? "unhealthy" : "not asked yet");
  attribute(parts.health, "data-is", worker.healthy ? "good" : worker.checked ? "bad" : "wait");
  text(parts.breaker, worker.breaker.replace("_", "-"));
  attribute(parts.breaker, "data-is", { closed: "good", open: "bad" }[worker.breaker] ?? "wait");
}

export function fleetPanel() {
  const table = document.getElementById("fleet");
  const note = document.getElementById("fleet-note");
  return (snapshot) => {
    const pools = snapshot.pools.map((pool) => ({ ...pool, workers: snapshot.workers.filter((one) => one.pool === pool.name) }));
    while (table.tBodies.length > pools.length) table.tBodies[table.tBodies.length - 1].remove();
    while (table.tBodies.length < pools.length) {
      const title = make("th", { scope: "rowgroup", colspan: "6", class: "group full" });
      const body = make("tbody", {}, make("tr", {}, title));
      body.title_ = title;
      table.append(body);
    }
    pools.forEach((pool, index) => {
      const body = table.tBodies[index];
      const count = pool.workers.length;
      text(body.title_, `${pool.name} · ${count} worker${count === 1 ? "" : "s"} · routed by ${pool.router}`);
      while (body.rows.length > count + 1) body.rows[body.rows.length - 1].remove();
      while (body.rows.length < count + 1) body.append(row());
      pool.workers.forEach((worker, at) => show(body.rows[at + 1], worker));
    });
    const out = snapshot.workers_left_out;
    text(note, `${snapshot.in_flight} in flight, ${snapshot.waiting} waiting${out ? `; ${out} more workers are not shown` : ""}`);
  };
}
