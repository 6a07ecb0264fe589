// GET /live with fetch rather than EventSource, so that the key is sent in a header, never in the URL.

const SILENT_MS = 4000; // longest silence before a reconnect; the gateway sends twice a second
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const MOST_BUFFER = 16 << 20;

export class Stream {
  constructor({ onEvent, onState }) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.query = {};
    this.key = "";
    this.waitMs = FIRST_WAIT_MS;
    this.lastMs = 0; // time of the last data, on the monotonic clock
    this.lastAt = null; // time of day of the last data
    this.turn = 0; // number of the current connection; earlier ones are abandoned
    this.abort = null;
    this.timer = null;
    setInterval(() => this.#watch(), 500);
  }

  // Connect again: at the start, with another key or with another query.
  open() {
    this.turn += 1;
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.lastMs = performance.now();
    this.waiting = false;
    this.#run(this.turn, this.abort.signal);
  }

  ask(query) {
    this.query = { ...this.query, ...query };
    this.open();
  }

  retry() {
    this.waitMs = FIRST_WAIT_MS;
    this.open();
  }

  async #run(turn, signal) {
    let problem = "the gateway closed the connection";
    try {
      const asked = new URLSearchParams(Object.entries(this.query).filter(([, value]) => value));
      const answer = await fetch(`/live?${asked}`, {
        signal,
        cache: "no-store",
        credentials: "omit",
        headers: this.key ? { Authorization: `Bearer ${this.key}` } : {},
      });
      if (turn !== this.turn) return;
      if (answer.status === 401 || answer.status === 403) {
        const locked = answer.headers.has("www-authenticate") || this.key;
        if (locked) {
          this.turn += 1;
          this.abort.abort();
          this.waiting = true;
          this.onState("key", { wrong: Boolean(this.key), admin: answer.status === 403 });
          return;
        }
      }
      if (!answer.ok) problem = `the gateway answers HTTP ${answer.status}`;
      else problem = (await this.#read(answer.body, turn)) ?? problem;
    } catch (error) {
      problem = error.name === "AbortError" ? "the gateway is silent" : "the gateway does not answer";
    }
    if (turn === this.turn) this.#lost(problem);
  }

  async #read(body, turn) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || turn !== this.turn) return null;
      this.lastMs = performance.now();
      buffer += value;
      if (buffer.length > MOST_BUFFER) return "the gateway sent something else";
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const ended = this.#take(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (ended) return "the gateway was shut down";
      }
    }
  }

  #take(message) {
    let name = "message";
    let data = "";
    for (const line of message.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (name === "end") return true;
    this.lastAt = new Date();
    this.waitMs = FIRST_WAIT_MS;
    this.onState("live", {});
    this.onEvent(name, JSON.parse(data));
    return false;
  }

  #watch() {
    if (!this.waiting && this.abort && performance.now() - this.lastMs > SILENT_MS) {
      this.turn += 1;
      this.abort.abort();
      this.#lost("the gateway is silent");
    }
  }

  #lost(problem) {
    this.turn += 1;
    this.waiting = true;
    const waitMs = this.waitMs * (0.8 + 0.4 * Math.random());
    this.waitMs = Math.min(2 * this.waitMs, LONGEST_WAIT_MS);
    this.onState("lost", { problem, lastAt: this.lastAt });
    this.timer = setTimeout(() => this.open(), waitMs);
  }
}
