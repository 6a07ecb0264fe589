// Comparison of routers on the same requests: distinct experts per layer in a token's decode step.

import { attribute, fill, make, milliseconds, number, shown, text, words } from "./dom.js";

const NONE = ["No comparison has been run on this fleet. ", "make run", ", or ", "coterie serve --embedded --demo", ", runs one: it fills in here."];

function piece() {
  const name = make("div", { class: "what" });
  const bar = make("div", { class: "fill" });
  const whisker = make("div", { class: "whisker" });
  const bars = make("div", { class: "bars", role: "img" }, bar, whisker);
  const note = make("div", { class: "row-note note" });
  const node = make("div", { class: "compare" }, name, bars, note);
  node.parts = { name, bar, whisker, bars, note };
  return node;
}

function show(node, { router, row, first, most, state }, index) {
  const { name, bar, whisker, bars, note } = node.parts;
  text(name, words(router));
  shown(whisker, Boolean(row) && index > 0);
  if (!row) {
    bar.style.width = "0";
    text(note, state === "running" ? "to come" : "not run");
    attribute(bars, "aria-label", `${words(router)}: not run yet`);
    return;
  }
  bar.classList.toggle("ours", index > 0 && row.low_pct > 0);
  bar.style.width = `${(100 * row.experts) / most}%`;
  const at = (percent) => (100 * first.experts * (1 - percent / 100)) / most;
  whisker.style.left = `${at(row.high_pct)}%`;
  whisker.style.width = `${Math.max(0, at(row.low_pct) - at(row.high_pct))}%`;
  const saved = index ? `; ${Math.abs(row.saving_pct).toFixed(1)}% ${row.saving_pct >= 0 ? "fewer" : "more"} (95% ${row.low_pct.toFixed(1)} to ${row.high_pct.toFixed(1)})` : "";
  const time = row.step_ms === null ? "" : `; step ${milliseconds(row.step_ms)}`;
  const said = `${number(row.experts)} experts a step${saved}${time}`;
  text(note, said);
  attribute(bars, "aria-label", `${words(router)}: ${said}`);
}

export function comparisonPanel() {
  const root = document.getElementById("comparison");
  const empty = make("p", { class: "empty" }, ...NONE.map((part, at) => (at % 2 ? make("code", {}, part) : part)));
  const stage = make("p", { class: "note" });
  const progress = make("progress", { "aria-label": "progress of the comparison" });
  const running = make("div", { class: "stage" }, stage, progress);
  const rows = make("div", { class: "charts" });
  const said = make("p", { class: "said" });
  const note = make("p", { class: "note said" });
  root.append(empty, running, rows, said, note);
  return ({ comparison }) => {
    shown(empty, !comparison);
    for (const node of [rows, said, note]) shown(node, Boolean(comparison));
    shown(running, comparison?.state === "running");
    if (!comparison) return;
    const counted = comparison.total > 1;
    text(stage, counted ? `${comparison.stage}: ${comparison.done} of ${comparison.total}` : comparison.stage);
    if (counted) {
      progress.max = comparison.total;
      progress.value = comparison.done;
    } else progress.removeAttribute("value");
    const found = new Map(comparison.rows.map((row) => [row.router, row]));
    const first = comparison.rows[0] ?? null;
    const most = 1.08 * Math.max(1e-9, ...comparison.rows.map((row) => row.experts));
    const routers = [...new Set([...found.keys(), ...comparison.routers])];
    fill(rows, routers.map((router) => ({ router, row: found.get(router) ?? null, first, most, state: comparison.state })), piece, show);
    text(said, comparison.verdict || (comparison.state === "failed" ? "The comparison failed." : ""));
    text(note, `Distinct experts of a layer that a token's decode step streams, counted in the workers; bars start at 0, whiskers are 95% intervals.${comparison.hardware ? ` Times are predicted for ${comparison.hardware}.` : ""}`);
  };
}
