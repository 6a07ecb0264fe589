// Two charts in SVG, drawn in pixels of their box so that text keeps its size at every width.

import { attribute, fill, make, number, text } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 44;
const BOTTOM = 20;
const TOP = 8;
const RIGHT = 8;

function drawn(tag, name = "") {
  const node = document.createElementNS(SVG, tag);
  if (name) node.setAttribute("class", name);
  return node;
}

function box(height, label) {
  const svg = drawn("svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", label);
  return svg;
}

// Return axis ticks: at most five round numbers, from 0 to at least `most`.
export function ticks(most) {
  if (!(most > 0)) return [0, 1];
  const raw = most / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let count = 0; (count - 1) * step < most; count += 1) found.push(count * step);
  return found;
}

function axis(svg, grid, labels, values, y, width) {
  fill(grid, values, () => drawn("line", "grid"), (line, value) => {
    attribute(line, "x1", LEFT);
    attribute(line, "x2", width - RIGHT);
    attribute(line, "y1", y(value));
    attribute(line, "y2", y(value));
  });
  fill(labels, values, () => drawn("text"), (label, value) => {
    attribute(label, "x", LEFT - 6);
    attribute(label, "y", y(value) + 4);
    attribute(label, "text-anchor", "end");
    text(label, number(value));
  });
}

function below(parent, marks, height) {
  fill(parent, marks, () => drawn("text"), (label, [x, said, anchor]) => {
    attribute(label, "x", x);
    attribute(label, "y", height - 5);
    attribute(label, "text-anchor", anchor);
    text(label, said);
  });
}

// Draw lines over time; a null value leaves a gap.
export function lineChart(height = 130) {
  const svg = box(height, "");
  const [grid, labels, times] = [drawn("g"), drawn("g"), drawn("g")];
  const [second, first, dots] = [drawn("path", "line second"), drawn("path", "line"), drawn("g")];
  svg.append(grid, labels, times, second, first, dots);
  let last = null;

  function path(values, x, y) {
    let found = "";
    values.forEach((value, index) => {
      if (value === null) return;
      const before = index > 0 && values[index - 1] !== null;
      const point = `${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
      found += before ? `L${point}` : `M${point}h0.01`;
    });
    return found;
  }

  function draw() {
    const width = svg.clientWidth;
    if (!last || !width) return;
    const { firsts, seconds, spanS, label } = last;
    const steps = ticks(Math.max(0, ...[...firsts, ...seconds].filter((value) => value !== null)));
    const most = steps.at(-1);
    const x = (index) => LEFT + (index / (firsts.length - 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / most) * (height - TOP - BOTTOM);
    axis(svg, grid, labels, steps, y, width);
    const minutes = Math.round(spanS / 60);
    below(times, [[LEFT, `${minutes} min ago`, "start"], [(LEFT + width - RIGHT) / 2, `${number(minutes / 2)} min`, "middle"], [width - RIGHT, "now", "end"]], height);
    attribute(first, "d", path(firsts, x, y));
    attribute(second, "d", path(seconds, x, y));
    attribute(svg, "aria-label", label);
  }
  new ResizeObserver(draw).observe(svg);
  return { node: svg, update(values) { last = values; draw(); } };
}

// Draw two bars side by side for every rank.
export function pairChart(height = 150) {
  const svg = box(height, "");
  const [grid, labels, names, befores, afters] = [drawn("g"), drawn("g"), drawn("g"), drawn("g"), drawn("g")];
  svg.append(grid, labels, names, befores, afters);
  let last = null;

  function draw() {
    const width = svg.clientWidth;
    if (!last || !width) return;
    const { before, after, label } = last;
    const count = Math.max(before.length, after.length, 1);
    const steps = ticks(Math.max(0, ...before, ...after));
    const y = (value) => TOP + (1 - value / steps.at(-1)) * (height - TOP - BOTTOM);
    const each = (width - LEFT - RIGHT) / count;
    const thick = Math.max(1, Math.min(22, each * 0.38));
    axis(svg, grid, labels, steps, y, width);
    const bars = (parent, values, name, shift) => fill(parent, values, () => drawn("rect", name), (bar, value, index) => {
      attribute(bar, "x", (LEFT + each * (index + 0.5) + shift).toFixed(1));
      attribute(bar, "y", y(value ?? 0).toFixed(1));
      attribute(bar, "width", thick.toFixed(1));
      attribute(bar, "height", Math.max(0, height - BOTTOM - y(value ?? 0)).toFixed(1));
    });
    bars(befores, before, "bar second", -thick - 1);
    bars(afters, after, "bar", 1);
    const every = Math.ceil(count / Math.max(1, Math.floor((width - LEFT) / 60)));
    const marks = [];
    for (let rank = 0; rank < count; rank += every) marks.push([LEFT + each * (rank + 0.5), count > 8 ? rank : `rank ${rank}`, "middle"]);
    below(names, marks, height);
    attribute(svg, "aria-label", label);
  }
  new ResizeObserver(draw).observe(svg);
  return { node: svg, update(values) { last = values; draw(); } };
}

export function legend(first, second) {
  return make("p", { class: "legend" }, make("span", {}, first), make("span", { class: "second" }, second));
}
