// Connects the panels to one stream of snapshots.

import { decisionsPanel } from "./decisions.js";
import { clock, shown, text } from "./dom.js";
import { eventsPanel } from "./events.js";
import { fleetPanel } from "./fleet.js";
import { heatPanel } from "./heat.js";
import { latencyPanel } from "./latency.js";
import { placementPanel } from "./placement.js";
import { Stream } from "./stream.js";
import { switchbackPanel } from "./switchback.js";

const KEY = "coterie-key";
const THEME = "coterie-theme";
const [main, state, banner, said, verdict, keyForm, keyField, keyNote, theme] = ["main", "state", "banner", "banner-text", "verdict", "key-form", "key", "key-note", "theme"].map((id) => document.getElementById(id));

// A browser may forbid storage: the page works without it.
function remembered(store, name) {
  try {
    return store()?.getItem(name) ?? "";
  } catch {
    return "";
  }
}

function remember(store, name, value) {
  try {
    store().setItem(name, value);
  } catch {
    // not stored: the page asks for the value again
  }
}

const tab = () => window.sessionStorage;
const browser = () => window.localStorage;

// ------------------------------------------------------------------------------------------------------------- theme

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function setTheme(name) {
  if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
  text(theme, isDark() ? "Light" : "Dark");
  theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
}

theme.addEventListener("click", () => {
  const wanted = isDark() ? "light" : "dark";
  remember(browser, THEME, wanted);
  setTheme(wanted);
});
prefersDark.addEventListener("change", () => setTheme(""));
setTheme(remembered(browser, THEME));

// ------------------------------------------------------------------------------------------------------------- stream

const stream = new Stream({
  onEvent(name, value) {
    if (name === "heat") heat(value);
    else if (name === "snapshot") {
      text(verdict, value.verdict);
      for (const panel of panels) panel(value);
      text(state, `Live · ${clock(1000 * value.at_s)}`);
    }
  },
  onState(name, told) {
    state.dataset.state = name;
    main.classList.toggle("stale", name !== "live");
    shown(banner, name === "lost");
    shown(keyForm, name === "key");
    document.title = name === "live" ? "Coterie gateway" : name === "key" ? "Coterie gateway: key" : "No data · Coterie gateway";
    if (name === "lost") tellLost(told);
    if (name === "key") {
      text(state, "A key is needed");
      if (told.wrong) text(keyNote, told.admin ? "This key is known, and is not an administrator's." : "This key is not known here.");
      keyField.focus();
    }
  },
});

function tellLost(lost) {
  const since = lost.lastAt ? `What is shown is of ${clock(lost.lastAt)}` : "No data has come yet";
  text(said, `No data: ${lost.problem}. ${since}. Trying again by itself.`);
  text(state, "No data");
}

document.getElementById("retry").addEventListener("click", () => stream.retry());

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const key = keyField.value.trim();
  keyField.value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    text(keyNote, "A key has no spaces and is not empty.");
    return;
  }
  stream.key = key;
  remember(tab, KEY, stream.key);
  text(keyNote, "Asking the gateway.");
  stream.retry();
});

const ask = (query) => stream.ask(query);
const heat = heatPanel(ask);
const panels = [fleetPanel(), latencyPanel(), switchbackPanel(), placementPanel(), decisionsPanel(ask), eventsPanel()];
stream.key = remembered(tab, KEY);
stream.open();
