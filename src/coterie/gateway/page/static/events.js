// Every decision of the control loop with its reason, newest first.

import { clock, fill, make, number, options, shown, text, words } from "./dom.js";
import { facts } from "./placement.js";

const VALUES_MOST = 6;

const value = (one) => (typeof one === "number" ? number(one) : one === true ? "yes" : one === false ? "no" : one === null ? "–" : one);

function told(status) {
  const doing = status.job ? "fitting a router" : status.candidate ? "scoring a new fit" : status.swap ? "swapping" : status.watching ? "watching the new fit" : "watching traffic";
  return [
    ["now", doing],
    ["requests kept", value(status.kept_requests ?? null)],
    ["router fitted on, requests", value(status.fit_requests ?? null)],
    ["drift ratio", value(status.drift_ratio ?? null)],
    ["model", value(status.model ?? null)],
  ];
}

function item() {
  const parts = { at: make("span", { class: "note" }), kind: make("span", { class: "tag" }), why: make("span"), more: make("span", { class: "note" }) };
  const node = make("li", {}, parts.at, parts.kind, make("div", {}, parts.why, " ", parts.more));
  node.parts = parts;
  return node;
}

function show(node, one) {
  text(node.parts.at, clock(1000 * one.at_s));
  text(node.parts.kind, words(one.kind));
  text(node.parts.why, one.reason);
  const named = Object.entries(one.values).slice(0, VALUES_MOST);
  text(node.parts.more, named.length ? `(${named.map(([name, told]) => `${words(name)} ${value(told)}`).join(", ")})` : "");
}

export function eventsPanel() {
  const root = document.getElementById("events");
  const kind = document.getElementById("events-kind");
  const empty = make("p", { class: "empty" });
  const status = make("dl", { class: "facts" });
  const list = make("ul", { class: "list" });
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "events-title" }, list);
  root.append(status, empty, scroll);
  let last = null;
  kind.addEventListener("change", () => last && update(last));

  function update(snapshot) {
    last = snapshot;
    const { loop } = snapshot;
    shown(status, loop.reason === null);
    facts(status, told(loop.status));
    options(kind, [...new Set(loop.events.map((one) => one.kind))].sort(), "all events");
    const events = loop.events.filter((one) => !kind.value || one.kind === kind.value).reverse();
    text(empty, loop.reason ?? (kind.value ? "No such event among the newest." : "The loop has decided nothing yet."));
    shown(empty, events.length === 0);
    shown(scroll, events.length > 0);
    fill(list, events, item, show);
  }
  return update;
}
