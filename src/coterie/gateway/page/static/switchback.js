// What the decode router gains on this fleet, in turns with the shortest queue or as routers were compared last.

import { clock, fill, make, milliseconds, number, shown, text } from "./dom.js";

const MEASURES = [["tpot", "TPOT"], ["ttft", "TTFT"], ["experts", "experts of a layer in a step"], ["tokens", "tokens a second"], ["token_experts", "experts of a layer in a token's step"]];
const STATES = { measuring: "half and half", watching: "mostly the router", left: "the shortest queue: the router was worse" };
const TIMES = new Set(["tpot", "ttft"]);
const EXPERTS = new Set(["experts", "token_experts"]);
const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(1)}`;

function cells() {
  return make("tr", {}, make("th", { scope: "row" }), ...["router", "shortest queue", "change", "interval"].map((label) => make("td", { "data-label": label })));
}

function show(node, { name, key, change }) {
  const value = (one) => (TIMES.has(key) ? milliseconds(1000 * one) : EXPERTS.has(key) ? one.toFixed(1) : number(one));
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
  function tell({ switchback, comparison, no_turns }) {
    if (switchback) return [`${switchback.pairs} of ${switchback.of} pairs of blocks · now ${STATES[switchback.state]}`, `${switchback.router}: ${switchback.verdict}.`];
    if (comparison) return [`the same requests under each router · ${clock(1000 * comparison.at_s)}`, comparison.sentence];
    return ["", no_turns ? `No turns with the shortest queue are taken: ${no_turns}.` : "Turns with the shortest queue begin."];
  }
  return (snapshot) => {
    const changes = (snapshot.switchback ?? snapshot.comparison)?.changes ?? {};
    const rows = MEASURES.filter(([key]) => changes[key]).map(([key, name]) => ({ key, name, change: changes[key] }));
    const [about, sentence] = tell(snapshot);
    shown(table, rows.length > 0);
    text(note, about);
    text(said, sentence);
    fill(body, rows, cells, show);
  };
}
