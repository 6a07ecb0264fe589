// Helpers that create elements without parsing markup: every value from the gateway is set as text.

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function text(node, value) {
  const said = value === null || value === undefined ? "" : String(value);
  if (node.textContent !== said) node.textContent = said;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function shown(node, yes) {
  if (node.hidden === yes) node.hidden = !yes;
}

// Give an element one child per item. Nodes are reused, so that a page that is open for a day does not accumulate them.
export function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

// Set the options of a select; the chosen option stays, even while the gateway does not list it.
export function options(select, values, first = null) {
  const wanted = [...(first === null ? [] : [["", first]]), ...values.map((value) => [value, value])];
  if (select.value && !values.includes(select.value)) wanted.push([select.value, select.value]);
  const chosen = select.value;
  const same = select.options.length === wanted.length && wanted.every(([value], index) => select.options[index].value === value);
  if (same) return;
  fill(select, wanted, () => document.createElement("option"), (option, [value, label]) => {
    option.value = value;
    text(option, label);
  });
  if (wanted.some(([value]) => value === chosen)) select.value = chosen;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  if (Number.isInteger(value) || Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(Math.abs(value) >= 100 ? 4 : digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

export function clock(when) {
  const at = new Date(when);
  if (Number.isNaN(at.getTime())) return "–";
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}
