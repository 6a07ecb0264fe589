// The newest decisions with their reasons and every candidate's score.

import { clock, fill, make, number, options, text } from "./dom.js";

function row() {
  const cells = ["time", "request", "went to", "why", "scores"].map((label, index) => make("td", { "data-label": label, class: ["", "name", "name", "full", "full"][index] }));
  const node = make("tr", {}, ...cells);
  const chips = make("div", { class: "chips" });
  cells[4].append(chips);
  node.parts = { cells, chips };
  return node;
}

function show(node, one) {
  const { cells, chips } = node.parts;
  text(cells[0], clock(one.time));
  text(cells[1], one.id);
  text(cells[2], one.worker);
  const by = one.by ? `by ${one.by}: ` : "";
  const cached = one.cached_tokens && !one.reason.includes("cached") ? `, ${one.cached_tokens} of ${one.prompt_tokens} tokens cached` : "";
  text(cells[3], `${by}${one.reason}${one.fallback ? ` (fallback: ${one.fallback})` : ""}${cached}`);
  const scores = Object.entries(one.scores);
  const more = one.candidates - scores.length;
  if (more > 0) scores.push([`${more} more`, undefined]);
  fill(chips, scores, () => make("span", { class: "chip" }), (chip, [worker, score]) => {
    const chosen = worker === one.worker;
    chip.classList.toggle("chosen", chosen);
    text(chip, score === undefined ? worker : `${chosen ? "✓ " : ""}${worker} ${score === null ? "may not" : number(score, 4)}`);
  });
}

export function decisionsPanel(ask) {
  const body = document.querySelector("#decisions tbody");
  const note = document.getElementById("decisions-note");
  const pool = document.getElementById("decisions-pool");
  const worker = document.getElementById("decisions-worker");
  const pause = document.getElementById("decisions-pause");
  let last = null;
  let paused = false;
  const filtered = () => ask({ pool: pool.value, worker: worker.value });
  pool.addEventListener("change", filtered);
  worker.addEventListener("change", filtered);
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", paused);
    text(pause, paused ? "Go on" : "Pause");
    if (last) update(last);
  });

  function update(snapshot) {
    last = snapshot;
    options(pool, snapshot.pools.map((one) => one.name), "all");
    options(worker, [...new Set(snapshot.workers.map((one) => one.id))], "all");
    const count = number(snapshot.decided);
    if (paused) {
      text(note, `Paused; ${count} decisions since the start.`);
      return;
    }
    const shown = snapshot.decisions.length;
    text(note, shown ? `The newest ${shown} of ${count} decisions since the start.` : pool.value || worker.value ? `None of ${count} decisions is like that.` : "No request has been routed yet.");
    fill(body, snapshot.decisions, row, show);
  }
  return update;
}
