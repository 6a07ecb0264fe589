// What the decode router gains on this fleet, measured in turns with the shortest queue.

import { fill, make, milliseconds, number, shown, text } from "./dom.js";

const MEASURES = [["tpot", "TPOT"], ["ttft", "TTFT"], ["experts", "experts a step"], ["tokens", "tokens a second"]];
const STATES = { measuring: "half and half", watching: "mostly the router", left: "the shortest queue: the router was worse" };
const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)}`;

function cells() {
  return make("tr", {}, make("th", { scope: "row" }), ...["router", "shortest queue", "change", "interval"].map((label) => make("td", { "data-label": label })));
}

function show(node, { name, key, change }) {
  const value = (one) => (key === "tpot" || key === "ttft" ? milliseconds(1000 * one) : number(one));
  const range = change.low === null || change.high === null ? "too few pairs yet" : `${signed(change.low)} to ${signed(change.high)}%`;
  [name, value(change.router), value(change.shortest_queue), `${signed(change.percent)}%`, range].forEach((said, at) => text(node.children[at], said));
}

export function switchbackPanel() {
  const root = document.getElementById("switchback");
  const note = document.getElementById("switchback-note");
  const said = make("p", { class: "empty" });
  const body = make("tbody");
  const head = make("thead", {}, make("tr", {}, ...["", "router", "shortest queue", "change", "interval"].map((label) => make("th", { scope: "col" }, label))));
  const table = make("table", { class: "table cards" }, head, body);
  root.append(said, table);
  return ({ switchback }) => {
    shown(table, Boolean(switchback && Object.keys(switchback.changes).length));
    text(note, switchback ? `${switchback.pairs} of ${switchback.of} pairs of blocks · now ${STATES[switchback.state]}` : "");
    text(said, switchback ? `${switchback.router}: ${switchback.verdict}.` : "No turns are taken: they need two workers, another router than the shortest queue, switchback.enabled, and no router set with ?alone=1.");
    if (!switchback) return;
    const rows = MEASURES.filter(([key]) => switchback.changes[key]).map(([key, name]) => ({ key, name, change: switchback.changes[key] }));
    fill(body, rows, cells, show);
  };
}
