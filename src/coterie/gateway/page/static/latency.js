// TTFT and TPOT over the last minutes.

import { legend, lineChart } from "./charts.js";
import { make, milliseconds, number, text } from "./dom.js";

export function latencyPanel() {
  const root = document.getElementById("latency");
  const note = document.getElementById("latency-note");
  const charts = [["TTFT", "ttft_ms", "time to first token"], ["TPOT", "tpot_ms", "time per output token after it"]].map(([name, key, meaning]) => {
    const said = make("span");
    const chart = lineChart();
    const node = make("div", {}, make("div", { class: "chart-title" }, make("span", {}, make("strong", {}, name), ` ${meaning}, ms`), said), chart.node);
    return { name, key, said, chart, node };
  });
  root.append(make("div", { class: "charts" }, ...charts.map((one) => one.node)), legend("median", "95th percentile"));
  return (snapshot) => {
    const { series, minute } = snapshot;
    const rate = minute.ended / minute.seconds;
    const ends = ["failed", "refused"].filter((end) => minute[end]).map((end) => `, ${minute[end]} ${end}`).join("");
    text(note, `last minute: ${number(minute.ended)} requests (${number(rate)} a second), ${number(minute.output_tokens)} tokens${ends}`);
    for (const { name, key, said, chart } of charts) {
      const now = `median ${milliseconds(minute[key].p50)}, p95 ${milliseconds(minute[key].p95)}`;
      text(said, now);
      const spanS = series.bin_s * series.ended.length;
      chart.update({ firsts: series[key].p50, seconds: series[key].p95, spanS, label: `${name} over the last ${Math.round(spanS / 60)} minutes; in the last minute ${now}` });
    }
  };
}
