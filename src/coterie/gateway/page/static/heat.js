// Tokens of a worker's last window, [layer, expert], as colours; pointer and arrow keys show the numbers.

import { make, number, options, shown, text } from "./dom.js";

// Colour map Cividis: uniform in brightness, and readable for colour-blind users.
const STOPS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const LEAST_HEIGHT = 260;
const MOST_HEIGHT = 340;

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1);
  const from = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[from].map((low, part) => low + (STOPS[from + 1][part] - low) * (at - from));
}

export function heatPanel(ask) {
  const root = document.getElementById("heat");
  const worker = document.getElementById("heat-worker");
  const scale = document.getElementById("heat-scale");
  const empty = make("p", { class: "empty" }, "Waiting for the first data.");
  const canvas = make("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-describedby": "heat-readout" });
  const cursor = make("div", { class: "cursor", hidden: "" });
  const layers = make("div", { class: "layers", "aria-hidden": "true" }, make("span"), make("span"));
  const experts = make("div", { class: "experts", "aria-hidden": "true" }, make("span"), make("span"));
  const most = make("span");
  const legend = make("div", { class: "scale" }, make("span", {}, "0"), make("i", { "aria-hidden": "true" }), most);
  const readout = make("output", { id: "heat-readout", class: "readout", "aria-live": "polite" });
  const box = make("div", {}, make("div", { class: "heat-box" }, layers, make("div", { class: "heat-canvas" }, canvas, cursor), experts), legend, readout);
  root.append(empty, box);
  shown(box, false);
  let data = null;
  let place = null; // layer and expert under the cursor

  const at = (layer, expert) => data.values[layer * data.experts + expert] ?? 0;

  function draw() {
    if (!data?.values) return;
    const { layers: rows, experts: columns, values } = data;
    const top = Math.max(0, ...values);
    const log = scale.value === "log";
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.height = `${Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, rows * 14))}px`;
    const image = new ImageData(columns, rows);
    values.forEach((value, index) => {
      const share = top > 0 ? (log ? Math.log1p(value ?? 0) / Math.log1p(top) : (value ?? 0) / top) : 0;
      const [red, green, blue] = colour(share);
      image.data.set([red, green, blue, 255], 4 * index);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", `Tokens by layer and expert of ${data.worker}: ${rows} layers, ${columns} experts. Arrow keys move.`);
    text(layers.children[0], "layer 0");
    text(layers.children[1], `layer ${rows - 1}`);
    text(experts.children[0], "expert 0");
    text(experts.children[1], `expert ${columns - 1}`);
    text(most, `${number(top)} tokens${log ? ", logarithmic" : ""}`);
    mark();
  }

  function mark() {
    shown(cursor, place !== null);
    if (!place) {
      text(readout, `Point at a cell, or focus the map and use the arrow keys.${data.layers_left_out ? ` ${data.layers_left_out} more layers are not shown.` : ""}`);
      return;
    }
    place = [Math.min(place[0], data.layers - 1), Math.min(place[1], data.experts - 1)];
    const [layer, expert] = place;
    cursor.style.left = `${(100 * expert) / data.experts}%`;
    cursor.style.top = `${(100 * layer) / data.layers}%`;
    cursor.style.width = `${100 / data.experts}%`;
    cursor.style.height = `${100 / data.layers}%`;
    let sum = 0;
    for (let other = 0; other < data.experts; other += 1) sum += at(layer, other);
    const share = sum ? ` (${number((100 * at(layer, expert)) / sum)}% of its layer)` : "";
    text(readout, `Layer ${layer}, expert ${expert}: ${number(at(layer, expert))} tokens${share}`);
  }

  canvas.addEventListener("pointermove", (event) => {
    const seen = canvas.getBoundingClientRect();
    const share = (value, size, count) => Math.min(count - 1, Math.max(0, Math.floor((value / size) * count)));
    place = [share(event.clientY - seen.top, seen.height, data.layers), share(event.clientX - seen.left, seen.width, data.experts)];
    mark();
  });
  canvas.addEventListener("pointerleave", () => {
    if (document.activeElement !== canvas) place = null;
    mark();
  });
  canvas.addEventListener("focus", () => {
    place ??= [0, 0];
    mark();
  });
  canvas.addEventListener("blur", () => {
    place = null;
    mark();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const [layer, expert] = place ?? [0, 0];
    if (event.key === "Home") place = [layer, 0];
    else if (event.key === "End") place = [layer, data.experts - 1];
    else place = [Math.min(data.layers - 1, Math.max(0, layer + step[0])), Math.min(data.experts - 1, Math.max(0, expert + step[1]))];
    mark();
  });
  worker.addEventListener("change", () => ask({ heat: worker.value }));
  scale.addEventListener("change", draw);

  return (heat) => {
    data = heat;
    options(worker, heat.workers);
    if (heat.worker && worker.value !== heat.worker && heat.workers.includes(heat.worker)) worker.value = heat.worker;
    worker.disabled = heat.workers.length === 0;
    shown(box, Boolean(heat.values));
    shown(empty, !heat.values);
    text(empty, heat.reason);
    draw();
  };
}
