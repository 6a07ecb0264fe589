// Placement advice: time of each rank before and after, predicted gain, and actions.

import { pairChart } from "./charts.js";
import { bytes, clock, fill, make, number, shown, text, words } from "./dom.js";

export function facts(node, pairs) {
  fill(node, pairs, () => make("div", {}, make("dt"), make("dd")), (box, [name, value]) => {
    text(box.children[0], name);
    text(box.children[1], value);
  });
}

const percent = (value) => (value === null || value === undefined ? "not known yet" : `${value.toFixed(1)}%`);
const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${number(1000 * value)} ms` : `${number(value)} s`);

function state(advice) {
  if (advice.state === "pending") return "pending: written, workers have not reported it yet";
  if (advice.state === "not_taken") return "not taken";
  if (advice.state !== "applied") return "advice only";
  return advice.map_version ? `in force since map ${advice.map_version}` : "written; no worker reports its map";
}

// How a plan that is only advised would be applied.
function applying(advice, loop) {
  if (advice.planned === false || state(advice) !== "advice only") return "";
  if (!loop.can_apply) return ". No worker here is a rank of such a group (placement_rank): there is nothing to apply it to.";
  return loop.to_apply ? `. To apply it, ${loop.to_apply}.` : ". It is written once it gains on the next window.";
}

function action(one) {
  const known = (value) => value !== null && value !== undefined;
  const said = [words(one.kind ?? one.action ?? "action")];
  if (known(one.expert)) said.push(`expert ${one.expert}`);
  if (one.layers?.length) said.push(`of layer${one.layers.length > 1 ? "s" : ""} ${one.layers.join(", ")}`);
  if (known(one.source)) said.push(`from rank ${one.source}`);
  if (known(one.target)) said.push(`to rank ${one.target}`);
  if (known(one.given)) said.push(`for expert ${one.given}`);
  if (one.moved_bytes) said.push(`(${bytes(one.moved_bytes)})`);
  return `${said.join(" ")}${one.reason ? `: ${one.reason}` : ""}`;
}

export function placementPanel() {
  const root = document.getElementById("placement");
  const empty = make("p", { class: "empty" });
  const reason = make("p", { class: "said" });
  const numbers = make("dl", { class: "facts" });
  const chart = pairChart();
  const drawing = make("div", {}, make("p", { class: "note" }, "Time of each rank in a mean layer of a step, µs"), chart.node, make("p", { class: "legend blocks" }, make("span", { class: "second" }, "before"), make("span", {}, "after")));
  const actions = make("ul", { class: "list plain" });
  const acting = make("div", { class: "said" }, make("h3", { class: "tag" }, "Actions"), actions);
  root.append(empty, numbers, drawing, reason, acting);
  return ({ loop }) => {
    const advice = loop.advice;
    for (const node of [numbers, reason]) shown(node, Boolean(advice));
    shown(empty, !advice);
    shown(drawing, Boolean(advice?.before?.rank_us?.length));
    shown(acting, Boolean(advice?.actions?.length));
    if (!advice) {
      text(empty, loop.reason ?? "No advice yet: the loop plans once a window of loads has come, and if it is set to advise on a group of ranks.");
      return;
    }
    const { before, after } = advice;
    facts(numbers, [
      ["predicted gain", percent(advice.gain_pct)],
      ["on the next window", percent(advice.gain_next_pct)],
      ["balance", before ? `${number(before.balance)} → ${number(after?.balance ?? before.balance)}` : "–"],
      ["moves", `${number(advice.moves ?? 0)} (${bytes(advice.moved_bytes)})`],
      ["moving takes", seconds(advice.movement_s)],
      ["planning took", seconds(advice.planning_s)],
      ["spare slots take", advice.spare_kv_tokens ? `the KV cache of ${number(advice.spare_kv_tokens)} tokens a rank` : "nothing: there are none"],
      ["made of", advice.source === "actions" ? "single actions" : "a plan"],
      ["state", advice.planned === false ? "keep as it is" : state(advice)],
      ["measured", loop.measured ?? "no plan came into force, or too few minutes since"],
      ["map in force", advice.in_force ? `version ${advice.in_force}` : "no worker reports it"],
    ]);
    if (before?.rank_us?.length) {
      const values = { before: before.rank_us, after: after?.rank_us ?? [] };
      chart.update({ ...values, label: `Time of ${before.rank_us.length} ranks before and after; balance ${number(before.balance)} before, ${number(after?.balance)} after` });
    }
    text(reason, `${advice.at_s ? `${clock(1000 * advice.at_s)}: ` : ""}${advice.reason ?? ""}${applying(advice, loop)}`);
    const more = advice.actions_left_out ? [{ action: `${advice.actions_left_out} more` }] : [];
    fill(actions, [...advice.actions, ...more], () => make("li"), (node, one) => text(node, action(one)));
  };
}
