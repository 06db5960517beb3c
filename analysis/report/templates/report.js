// The report's interactive part: plots and the table of all results, drawn from the data that the page carries.
// Text from the data reaches the page through textContent, or escaped through `plain` where plotly reads markup.
"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;

  async function unpacked(id) {
    const packed = atob($(id).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function make(tag, about = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(about)) {
      if (value === undefined || value === null) continue;
      if (name.startsWith("--")) element.style.setProperty(name, value);
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  // -- numbers ---------------------------------------------------------------------------------------------------------

  function figure(value, digits = 3) {
    value = Number(value.toPrecision(digits));
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-4 || size >= 1e6) return value.toExponential(digits - 1);
    const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }
  function scaled(value, unit, steps) {
    const [scale, prefix] = steps.find(([scale]) => Math.abs(value) >= scale * 0.9995) ?? steps.at(-1);
    return `${figure(value / scale)} ${prefix}${unit}`;
  }
  const SI = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const si = (value, unit) => (value == null ? "" : scaled(value, unit, SI));
  const duration = (s) => (s == null ? "" : s === 0 ? "0 s" : scaled(s, "s", [[1, ""], [1e-3, "m"], [1e-6, "\u00b5"], [1e-9, "n"]]));
  const bytes = (n) => (n == null ? "" : scaled(n, "B", [[2 ** 40, "Ti"], [2 ** 30, "Gi"], [2 ** 20, "Mi"], [2 ** 10, "Ki"], [1, ""]]));
  const percent = (share) => (share == null ? "" : `${figure(100 * share, Math.abs(share) < 0.995 ? 2 : 3)} %`);
  const times = (value) => (value > 0.9 && value < 1.1 ? value.toFixed(3) : figure(value));
  const interval = (low, high) => (low == null ? "" : `[${times(low)}, ${times(high)}]`);
  const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  // -- the data --------------------------------------------------------------------------------------------------------

  let report;
  try {
    report = JSON.parse(await unpacked("data"));
  } catch (error) {
    document.querySelector("main").prepend(make("p", { class: "warning" },
      "This browser cannot unpack the report's data (DecompressionStream is missing). All of it is in report.json."));
    throw error;
  }
  const R = report.results;
  const numberOf = new Map(report.cases.case.map((name, i) => [name, i]));
  const workload = (name) => name.split(":")[0];
  const stack = (impl) => impl.split(".")[0];
  const versionsOf = (row) => {
    const of = report.stacks[R.versions[row]];
    return of ? Object.entries(of.versions).map(([name, version]) => `${name} ${version}`).join(", ") : "unknown versions";
  };
  const work = (name) => {
    const i = numberOf.get(name);
    if (i === undefined) return null;
    const of = {};
    for (const [column, values] of Object.entries(report.cases)) of[column] = values[i];
    return of;
  };
  const operations = (dtype) => (/^[iu]\d/.test(dtype) ? "OP" : "FLOP");
  const speed = (row) => {
    if (R.time_us[row] == null) return null;
    const [probe] = R.case[row].startsWith("ceiling:") ? [R.case[row].split(":")[1]] : [null];
    if (R.gb_per_s[row] != null && (probe === "read" || probe === "copy" || (!probe && R.sol_roof[row] === "memory")))
      return [R.gb_per_s[row] * 1e9, "B/s"];
    if (probe === "exp" && R.gexp_per_s[row] != null) return [R.gexp_per_s[row] * 1e9, "exp/s"];
    return R.tflop_per_s[row] == null ? null : [R.tflop_per_s[row] * 1e12, `${operations(R.dtype[row] ?? "")}/s`];
  };
  const speedup = (row, end = "") => {
    const ratio = R[`ratio${end}`][row];
    return ratio == null ? null : 1 / ratio;
  };
  const threshold = (row) => R.threshold[row] ?? report.method.practical;

  // Results by device and case, in the order of the data: which is that of the cases, the baseline first.
  const decided = new Map(report.decisions.case.map((name, i) => [`${report.decisions.place[i]} ${name}`, i]));
  const groups = report.places.map(() => new Map());
  for (let row = 0; row < R.case.length; row++) {
    const cases = groups[R.place[row]];
    let group = cases.get(R.case[row]);
    if (!group) {
      group = { name: R.case[row], key: R.case[row].toLowerCase(), rows: [], answer: decided.get(`${R.place[row]} ${R.case[row]}`) };
      cases.set(R.case[row], group);
    }
    group.rows.push(row);
  }
  const answer = (group) => (group.answer === undefined ? null : report.decisions.answer[group.answer]);
  const state = (row) => R.verdict[row] ?? (R.status[row] !== "ok" ? R.status[row] : R.case[row].startsWith("ceiling:") ? "ceiling" : "not compared");

  // -- filters ---------------------------------------------------------------------------------------------------------

  const form = $("filters");
  const field = (name) => form.elements.namedItem(name);
  let place = 0;

  function options(name, values) {
    const select = field(name);
    const chosen = select.value;
    select.replaceChildren(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, value)));
    select.value = values.includes(chosen) ? chosen : "";
    select.closest("label").hidden = values.length < 2;
  }
  function offer() {
    const found = { workload: new Set(), dtype: new Set(), stack: new Set(), answer: new Set(), verdict: new Set() };
    for (const group of groups[place].values()) {
      found.workload.add(workload(group.name));
      if (answer(group)) found.answer.add(answer(group));
      for (const row of group.rows) {
        if (R.dtype[row]) found.dtype.add(R.dtype[row]);
        found.stack.add(stack(R.impl[row]));
        found.verdict.add(state(row));
      }
    }
    for (const [name, values] of Object.entries(found)) options(name, [...values].sort());
  }
  function selected() {
    const want = Object.fromEntries(["workload", "dtype", "stack", "answer", "verdict"].map((name) => [name, field(name).value]));
    const words = field("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [];
    for (const group of groups[place].values()) {
      if (want.workload && workload(group.name) !== want.workload) continue;
      if (want.answer && answer(group) !== want.answer) continue;
      const rest = words.filter((word) => !group.key.includes(word));
      const rows = group.rows.filter((row) =>
        (!want.dtype || R.dtype[row] === want.dtype) && (!want.stack || stack(R.impl[row]) === want.stack) &&
        (!want.verdict || state(row) === want.verdict) && rest.every((word) => R.impl[row].toLowerCase().includes(word)));
      if (rows.length) chosen.push({ group, rows });
    }
    return chosen;
  }

  // -- the table -------------------------------------------------------------------------------------------------------

  const COLUMNS = [
    ["implementation", null], ["time", (r) => R.time_us[r], "number"], ["rate", (r) => R.tflop_per_s[r] ?? R.gb_per_s[r], "number"],
    ["", null, "graphic"], ["speedup and its 95 % interval", (r) => (R.verdict[r] === "baseline" ? 1 : speedup(r)), "number"], ["verdict", null],
    ["of the limit", (r) => R.sol_fraction[r], "number"], ["bound by", (r) => R.bound_by[r]], ["error / tol.", (r) => R.error_worst[r], "number"],
    ["prepare", (r) => R.prepare_s[r], "number"], ["first call", (r) => R.first_call_s[r], "number"], ["peak memory", (r) => R.peak_memory_bytes[r], "number"],
  ];
  const PER_PAGE = 25;
  const PRINTED = 150;
  const sorting = { column: -1, descending: false };
  const paging = { page: 0, per: PER_PAGE };
  let shown = [];

  const axis = make("span", { class: "axis", "aria-hidden": "true" });
  const heads = COLUMNS.map(([name, value, kind], i) => make("th", { scope: "col", class: `${kind ?? ""}${value ? " sortable" : ""}`, onclick: value && (() => sort(i)) },
    kind === "graphic" ? make("span", { class: "hidden" }, "speedup, drawn") : name, kind === "graphic" ? axis : null,
    value ? make("button", { type: "button", "aria-label": `sort by ${name}` }) : null));
  $("table").tHead.replaceChildren(make("tr", {}, ...heads));

  function sort(column) {
    // Once: the direction that is usually wanted (least time, largest speedup); again: the other; a third time: none.
    const first = ["speedup and its 95 % interval", "of the limit", "rate"].includes(COLUMNS[column][0]);
    if (sorting.column !== column) Object.assign(sorting, { column, descending: first });
    else if (sorting.descending === first) sorting.descending = !first;
    else sorting.column = -1;
    heads.forEach((head, i) => {
      if (i === sorting.column) head.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    refresh({ figures: false });
  }
  function sorted(chosen) {
    if (sorting.column < 0) return chosen;
    const value = COLUMNS[sorting.column][1];
    const sign = sorting.descending ? -1 : 1;
    const compare = (a, b) => (a == null) - (b == null) || (a == null ? 0 : typeof a === "string" ? sign * a.localeCompare(b) : sign * (a - b));
    const inner = chosen.map(({ group, rows }) => ({ group, rows: [...rows].sort((a, b) => compare(value(a), value(b))) }));
    return inner.sort((a, b) => compare(value(a.rows[0]), value(b.rows[0])));
  }

  // The axis of the interval graphics reaches as far from 1 as shows nearly all of the device's intervals.
  let reach;
  function rescale() {
    const ends = [];
    for (const { rows } of groups[place].values()) for (const row of rows) if (R.ratio[row] != null) ends.push(Math.abs(Math.log(R.ratio_low[row])), Math.abs(Math.log(R.ratio_high[row])));
    const most = Math.exp(ends.sort((a, b) => a - b)[Math.floor(0.9 * (ends.length - 1))] ?? 0);
    reach = [1.21, 4, 16].find((one) => most <= one) ?? 16;
    axis.replaceChildren(...[1 / reach, 1, reach].map((end) => make("i", {}, String(Number(end.toPrecision(2))))));
  }
  const at = (value) => `${(100 * Math.min(1, Math.max(0, 0.5 + (0.5 * Math.log(value)) / Math.log(reach)))).toFixed(2)}%`;
  function graphic(row) {
    if (R.ratio[row] == null) return "";
    const beyond = threshold(row);
    return make("span", { class: `iv tone-${R.verdict[row]}`, "aria-hidden": "true", "--low": at(speedup(row, "_high")), "--at": at(speedup(row)),
      "--high": at(speedup(row, "_low")), "--from": at(1 / (1 + beyond)), "--to": at(1 + beyond) }, make("i"), make("b"));
  }
  function chip(text) {
    const bad = ["wrong", "failed", "crashed", "timeout"].includes(text);
    return make("span", { class: `chip ${bad ? "bad" : text.replaceAll(" ", "-").replace(/[^a-z-]/g, "")}` }, text);
  }
  const small = (text) => make("span", { class: "muted" }, text);

  function resultRow(row) {
    const us = 1e-6;
    const time = R.time_us[row];
    const rate = speed(row);
    const name = R.impl[row] + (R.replica[row] ? ` (replica ${R.replica[row]})` : "");
    const cells = [
      make("th", { scope: "row", title: versionsOf(row) }, name),
      time == null ? "" : make("span", {}, duration(time * us), " ", small(`\u00b1${figure(50 * (R.time_high_us[row] - R.time_low_us[row]) / time, 2)} %`)),
      rate ? si(...rate) : "",
      graphic(row),
      R.ratio[row] == null ? "" : make("span", {}, make("strong", {}, `${times(speedup(row))}\u00d7`), ` ${interval(speedup(row, "_high"), speedup(row, "_low"))}`),
      chip(state(row)),
      R.sol_fraction[row] == null ? "" : make("span", {}, percent(R.sol_fraction[row]),
        make("span", { class: R.sol_fraction[row] > 1 ? "share beyond" : "share", "aria-hidden": "true", "--at": `${Math.min(100, 100 * R.sol_fraction[row])}%` }, make("i"))),
      R.bound_by[row] ? make("span", {}, R.bound_by[row], R.class_ai[row] === `${R.bound_by[row]}-bound` ? null : small(` (${(R.class_ai[row] ?? "").replace("-bound", "")})`)) : "",
      R.error_worst[row] == null ? "" : figure(R.error_worst[row], 2),
      duration(R.prepare_s[row]), duration(R.first_call_s[row]), bytes(R.peak_memory_bytes[row]),
    ].map((cell, i) => (i === 0 ? cell : make("td", { class: COLUMNS[i][2] }, cell)));
    const notes = [R.reason[row], R.flags[row]].filter(Boolean).join(" \u00b7 ");
    const main = make("tr", { "data-row": row, class: `${R.verdict[row] === "baseline" ? "baseline" : ""}${notes ? " has-note" : ""}` }, ...cells);
    return notes ? [main, make("tr", { class: `note${R.verdict[row] === "baseline" ? " baseline" : ""}` }, make("td", { colspan: COLUMNS.length }, make("div", {}, notes)))] : [main];
  }
  function caseBody({ group, rows }) {
    const of = work(group.name);
    const facts = [];
    if (of && !group.name.startsWith("ceiling:")) {
      facts.push(si(of.flops, operations(of.dtype)), bytes(of.compulsory_bytes), `${figure(of.flops / of.compulsory_bytes)} ${operations(of.dtype)}/B`);
      if (of.exps) facts.push(si(of.exps, "exp"));
    }
    const aa = rows.map((row) => R.aa_ratio[row]).find((value) => value != null);
    if (aa != null) facts.push(`A/A difference ${percent(Math.exp(Math.abs(Math.log(aa))) - 1)}`);
    const runs = new Set(rows.map((row) => R.run[row]));
    if (runs.size > 1) facts.push(`from ${runs.size} runs`);
    const d = group.answer;
    const choice = d === undefined ? "" : { leave: ` for ${report.decisions.choice[d]}`, undecided: "", stay: ` with ${report.decisions.choice[d]}`, tie: ` with ${report.decisions.best[d]}` }[report.decisions.answer[d]] ?? "";
    const head = make("th", { scope: "rowgroup", colspan: COLUMNS.length }, make("code", {}, group.name),
      d === undefined ? null : make("span", { class: `chip ${report.decisions.answer[d].replaceAll(" ", "-")}` }, report.decisions.answer[d] + choice),
      make("span", { class: "facts" }, facts.join(" \u00b7 ")));
    return make("tbody", {}, make("tr", { class: "case" }, head), ...rows.flatMap(resultRow));
  }
  function drawTable() {
    const table = $("table");
    const pages = Math.max(1, Math.ceil(shown.length / paging.per));
    paging.page = Math.min(paging.page, pages - 1);
    const from = paging.page * paging.per;
    for (const body of [...table.tBodies]) body.remove();
    table.append(...shown.slice(from, from + paging.per).map(caseBody));
    $("page").textContent = shown.length ? `Cases ${from + 1} to ${Math.min(shown.length, from + paging.per)} of ${shown.length.toLocaleString("en")}` : "Nothing matches.";
    $("previous").disabled = paging.page === 0;
    $("next").disabled = paging.page >= pages - 1;
    $("previous").hidden = $("next").hidden = pages === 1;
  }
  const turn = (by) => () => { paging.page += by; drawTable(); $("results").scrollIntoView(); };
  $("previous").addEventListener("click", turn(-1));
  $("next").addEventListener("click", turn(1));

  // -- figures ---------------------------------------------------------------------------------------------------------

  // Plotly reads a few tags and entities in text: none that come from the data may reach it.
  const plain = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  const probe = make("span", { hidden: "" });
  document.body.append(probe);
  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }
  const faded = (rgb, alpha) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);

  let plotly;
  function loaded() {
    plotly ??= unpacked("plotly").then((source) => {
      document.head.append(make("script", {}, source));
      return window.Plotly;
    });
    return plotly;
  }

  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star", "hexagon", "pentagon"];
  const stacks = [...new Set(R.impl.map(stack))].filter((name) => name !== "ceilings").sort();
  const impls = [...new Set(R.impl)].sort();
  const variant = new Map(impls.map((impl) => [impl, impls.filter((other) => stack(other) === stack(impl)).indexOf(impl)]));
  const look = (impl) => ({ colour: colour(`s${stacks.indexOf(stack(impl)) % 8}`), symbol: SYMBOLS[(variant.get(impl) + Math.floor(stacks.indexOf(stack(impl)) / 8)) % SYMBOLS.length] });

  function hover(row) {
    const rate = speed(row);
    const flops = R.tflop_per_s[row] == null ? null : si(R.tflop_per_s[row] * 1e12, `${operations(R.dtype[row] ?? "")}/s`);
    const lines = [
      R.impl[row], R.case[row],
      `${duration(R.time_us[row] * 1e-6)} [${duration(R.time_low_us[row] * 1e-6)}, ${duration(R.time_high_us[row] * 1e-6)}]`,
      [flops, rate && rate[1] === "B/s" ? si(...rate) : null].filter(Boolean).join(", "),
      R.ratio[row] == null ? (R.verdict[row] === "baseline" ? "the baseline" : "no ratio to the baseline") : `${times(speedup(row))}\u00d7 ${interval(speedup(row, "_high"), speedup(row, "_low"))} of the baseline's speed: ${R.verdict[row]}`,
      R.sol_fraction[row] == null ? null : `${percent(R.sol_fraction[row])} of the limit (${R.sol_roof[row]})`,
      R.bound_by[row] == null ? null : `${R.class_ai[row]}, bound by ${R.bound_by[row]}`,
      R.counted_bytes[row] == null ? null : `${bytes(R.counted_bytes[row])} counted at DRAM: ${figure(R.counted_intensity[row])} ${operations(R.dtype[row] ?? "")}/B`,
      versionsOf(row),
      `run ${report.runs.id[R.run[row]]}`,
    ].filter(Boolean);
    return lines;
  }
  const label = (row) => {
    const [impl, ...rest] = hover(row).map((line) => plain(line.length > 110 ? `${line.slice(0, 108)}\u2026` : line));
    return `<b>${impl}</b><br>${rest.join("<br>")}`;
  };

  function layout({ entrywidth, ...about }) {
    const ink = colour("ink"), line = colour("line"), muted = colour("muted");
    const axis = { gridcolor: line, zeroline: false, linecolor: line, tickcolor: line, tickfont: { color: muted, size: 11 }, title: { font: { color: muted, size: 12 }, standoff: 6 }, minor: { showgrid: false } };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: 12 },
      margin: { l: 62, r: 18, t: 14, b: 46 }, hovermode: "closest", dragmode: "pan", showlegend: true,
      hoverlabel: { align: "left", bgcolor: colour("surface"), bordercolor: muted, font: { color: ink, size: 12 } },
      ...about, legend: { orientation: "h", y: -0.16, x: 0, yanchor: "top", font: { size: 11 }, entrywidth }, xaxis: { ...axis, ...about.xaxis, title: { ...axis.title, ...about.xaxis.title } }, yaxis: { ...axis, ...about.yaxis, title: { ...axis.title, ...about.yaxis.title } },
    };
  }
  const CONFIG = { displaylogo: false, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage"], responsive: false };
  // Ticks of a logarithmic axis: powers of ten, and more between them where there are few.
  function ticks(low, high, unit = (value) => si(value, "").trim()) {
    const steps = high / low < 8 ? [1, 1.5, 2, 3, 4, 5, 7] : high / low < 150 ? [1, 2, 5] : [1];
    const tickvals = [];
    for (let e = Math.floor(Math.log10(low)) - 1; e <= Math.ceil(Math.log10(high)) + 1; e++) tickvals.push(...steps.map((step) => step * 10 ** e));
    return { tickvals, ticktext: tickvals.map((value) => unit(Number(value.toPrecision(2))).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "")) };
  }

  // A figure is drawn when it comes near the window, and again when what it shows has changed.
  class Figure {
    constructor(parent, title, { controls = [], rows, draw, columns, describe }) {
      Object.assign(this, { rowsOf: rows, drawOf: draw, columns, describe, stale: true, near: false, cursor: -1 });
      this.plot = make("div", { class: "plot", tabindex: "0", role: "group" });
      this.said = make("p", { class: "said" });
      this.live = make("p", { class: "hidden", "aria-live": "polite" });
      this.caption = make("figcaption", {}, title);
      const body = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` });
      this.details = make("details", { ontoggle: () => this.details.open && this.tabulate() }, make("summary", {}, "The same as a table"), body);
      this.body = body;
      this.element = make("figure", {}, make("div", { class: "head" }, this.caption, ...controls), this.plot, this.said, this.live, this.details);
      this.element.figure = this;
      parent.append(this.element);
      this.plot.addEventListener("keydown", (event) => this.step(event));
      watcher.observe(this.element);
      resizer.observe(this.plot);
    }
    invalidate() {
      this.stale = true;
      if (this.near) this.draw();
    }
    async draw() {
      if (!this.stale) return;
      this.stale = false;
      this.width = this.plot.clientWidth;
      this.rows = this.rowsOf();
      const Plotly = await loaded();
      const { traces, layout, config } = this.drawOf(this.rows, this.plot);
      this.points = traces.flatMap((trace, curve) => (trace.rows ?? []).map((row, point) => ({ row, curve, point, x: trace.x[point], y: trace.y[point] }))).sort((a, b) => a.x - b.x || a.y - b.y);
      this.cursor = -1;
      // Plotly measures its frame only once.
      const size = { width: this.plot.clientWidth, height: this.plot.clientHeight };
      await Plotly.react(this.plot, traces, { ...layout, ...size }, { ...CONFIG, ...config });
      this.said.textContent = this.describe(this.rows, this.points.length);
      this.plot.setAttribute("aria-label", `${this.caption.textContent}. ${this.said.textContent} Left and right arrow keys step through the points.`);
      if (this.details.open) this.tabulate();
    }
    step(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || !this.points?.length) return;
      event.preventDefault();
      this.cursor = this.cursor < 0 ? (by > 0 ? 0 : this.points.length - 1) : (this.cursor + by + this.points.length) % this.points.length;
      const { row, curve, point } = this.points[this.cursor];
      window.Plotly.Fx.hover(this.plot, [{ curveNumber: curve, pointNumber: point }]);
      this.live.textContent = hover(row).join("; ");
    }
    tabulate() {
      const most = 300;
      const rows = this.rows.slice(0, most);
      this.body.replaceChildren(make("table", {}, make("caption", {}, `${this.caption.textContent}${this.rows.length > most ? ` (the first ${most} of ${this.rows.length})` : ""}`),
        make("thead", {}, make("tr", {}, ...this.columns.map(([name]) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...this.columns.map(([, value], i) => (i ? make("td", {}, value(row) ?? "") : make("th", { scope: "row" }, value(row)))))))));
    }
  }
  const figures = () => [...document.querySelectorAll("figure")].map((element) => element.figure);
  const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    target.figure.near = isIntersecting;
    if (isIntersecting) target.figure.draw();
  }), { rootMargin: "300px" });
  let resizing;
  const resizer = new ResizeObserver((entries) => {
    const changed = entries.map((e) => e.target.closest("figure")?.figure).filter((f) => f && !f.stale && f.width !== f.plot.clientWidth);
    clearTimeout(resizing);
    if (changed.length) resizing = setTimeout(() => changed.forEach((f) => f.invalidate()), 150);
  });

  // Of the points of an implementation that lie on one another (within 1/48 of a decade) one is drawn; where that is
  // still too many, an even sample of them.
  const MOST_POINTS = 1200;
  function thinned(rows, x, y) {
    if (rows.length <= MOST_POINTS) return rows;
    const kept = new Map();
    for (const row of rows) {
      const key = `${R.impl[row]} ${Math.round(Math.log10(x(row)) * 48)} ${Math.round(Math.log10(y(row)) * 48)}`;
      if (!kept.has(key)) kept.set(key, row);
    }
    const left = [...kept.values()];
    return left.length <= MOST_POINTS ? left : left.filter((row) => Math.imul(row, 2654435761) >>> 0 < (2 ** 32 * MOST_POINTS) / left.length);
  }
  // At most so many of ascending sizes: the first of each of so many equal parts of the logarithmic axis.
  function spread(sizes, most) {
    if (sizes.length <= most) return new Set(sizes);
    const [low, high] = [Math.log(sizes[0]), Math.log(sizes.at(-1))];
    const kept = new Map();
    for (const size of sizes) {
      const part = Math.min(most - 1, Math.floor((most * (Math.log(size) - low)) / (high - low)));
      if (!kept.has(part)) kept.set(part, size);
    }
    return new Set(kept.values());
  }
  function byImpl(rows) {
    const found = new Map();
    for (const row of rows) found.has(R.impl[row]) ? found.get(R.impl[row]).push(row) : found.set(R.impl[row], [row]);
    return [...found].sort(([a], [b]) => a.localeCompare(b));
  }

  const flops = (row) => R.tflop_per_s[row] * 1e12;
  function roofline(dtype) {
    const roofs = report.places[place].ceilings;
    const unit = operations(dtype);
    const rows = () => shown.flatMap(({ rows }) => rows).filter((row) => R.dtype[row] === dtype && R.intensity[row] > 0 && R.tflop_per_s[row] > 0 && !R.case[row].startsWith("ceiling:"));
    const draw = (all, box) => {
      const drawn = thinned(all, (row) => R.intensity[row], flops);
      const rate = roofs?.rates[dtype] ?? null;
      const levels = roofs?.levels ?? [];
      const ridges = rate ? levels.map((level) => rate / level.bytes_per_s) : [];
      const xs = [...drawn.map((row) => R.intensity[row]), ...ridges];
      const ys = [...drawn.map(flops), ...(rate ? [rate] : [])];
      const x = xs.length ? [Math.min(...xs) / 8, Math.max(...xs) * 8] : [0.1, 1000];
      const y = ys.length ? [Math.min(...ys) / 4, Math.max(...ys) * 3] : [1e9, 1e12];
      const ink = colour("ink"), muted = colour("muted");
      const traces = [], annotations = [];
      const veil = { bgcolor: faded(colour("surface"), 0.8), borderpad: 1 };
      // The legend takes as many lines as it needs; the frame keeps its height.
      const names = byImpl(drawn).map(([impl]) => impl);
      const entrywidth = Math.min(260, 8 + 5.8 * Math.max(0, ...names.map((name) => name.length)));
      const legend = 19 * Math.ceil(names.length / Math.max(1, Math.floor((box.clientWidth - 80) / (entrywidth + 45))));
      box.style.height = `${(box.clientWidth < 500 ? 330 : 390) + legend}px`;
      const [wide, high] = [box.clientWidth - 80, box.clientHeight - 70 - legend];
      const px = wide / Math.log10(x[1] / x[0]), py = high / Math.log10(y[1] / y[0]); // pixels per decade
      const slope = (-Math.atan(py / px) * 180) / Math.PI;
      const line = (from, to, name, dash, width = 1.5) => traces.push({ type: "scatter", mode: "lines", x: from, y: to, name, line: { color: ink, width, dash }, hoverinfo: "skip", showlegend: false });
      const note = (px, py, text, about = {}) => annotations.push({ x: Math.log10(px), y: Math.log10(py), text: plain(text), showarrow: false, font: { size: 11, color: muted }, xanchor: "left", yanchor: "bottom", ...about });
      // A label sits in the middle of the visible part of its line, further along where the line before it is too near.
      let before = null;
      levels.forEach((level, i) => {
        const ridge = rate ? rate / level.bytes_per_s : x[1];
        line([x[0], ridge], [x[0] * level.bytes_per_s, ridge * level.bytes_per_s], level.name, i === levels.length - 1 ? "solid" : "dot");
        const from = Math.log10(Math.max(x[0], y[0] / level.bytes_per_s)), to = Math.log10(Math.min(ridge, y[1] / level.bytes_per_s, x[1]));
        const gap = before ? (Math.log10(before.bytes_per_s / level.bytes_per_s) * px * py) / Math.hypot(px, py) : Infinity;
        const along = gap < 15 && before.along < 0.5 ? 0.72 : gap < 15 ? 0.28 : before?.along ?? 0.45;
        before = { bytes_per_s: level.bytes_per_s, along };
        const middle = 10 ** (from + along * (to - from));
        // A label longer than its line would only hide it: the text below names the level as well.
        if ((to - from) * Math.hypot(px, py) > 110) note(middle, middle * level.bytes_per_s, `${level.name} ${si(level.bytes_per_s, "B/s")}`, { textangle: slope, xanchor: "center", yanchor: "middle", bgcolor: colour("surface"), borderpad: 1 });
      });
      if (rate) {
        const from = levels.length ? Math.min(...ridges) : x[0];
        line([from, x[1]], [rate, rate], dtype, "solid", 2);
        note(x[1], rate, `${dtype} ${si(rate, `${unit}/s`)}`, { xanchor: "right", yshift: 2, ...veil });
        const memory = levels.at(-1);
        if (memory) {
          traces.push({ type: "scatter", mode: "markers", x: [rate / memory.bytes_per_s], y: [rate], marker: { symbol: "line-ns-open", size: 14, color: ink, line: { width: 2, color: ink } }, name: "ridge", hoverinfo: "skip", showlegend: false });
          note(rate / memory.bytes_per_s, rate, `ridge ${figure(rate / memory.bytes_per_s)} ${unit}/B`, { yanchor: "top", xanchor: "left", yshift: -6, ...veil });
        }
      }
      // Exponentials bound a case by its operations per exponential, which head size sets.
      const exp = Math.max(0, ...Object.values(roofs?.exp_rates ?? {}));
      const each = new Set(all.map((row) => work(R.case[row])).filter((of) => of?.exps).map((of) => Number((of.flops / of.exps).toPrecision(3))));
      if (exp) [...each].sort((a, b) => a - b).slice(0, 3).forEach((per) => {
        if (exp * per > y[1]) return;
        line([x[0], x[1]], [exp * per, exp * per], "exp", "dash", 1);
        note(x[0], exp * per, `exp, at ${figure(per)} ${unit} each`, { xshift: 4, yshift: 1, ...veil });
      });
      for (const [impl, of] of byImpl(drawn)) {
        const { colour: tone, symbol } = look(impl);
        traces.push({ type: "scatter", mode: "markers", name: plain(impl), rows: of, x: of.map((row) => R.intensity[row]), y: of.map(flops), text: of.map(label), hovertemplate: "%{text}<extra></extra>",
          marker: { color: faded(tone, 0.85), symbol, size: drawn.length > 600 ? 6 : 9, line: { color: colour("surface"), width: drawn.length > 600 ? 0 : 1 } } });
      }
      return { traces, layout: layout({ annotations, entrywidth,
        xaxis: { type: "log", range: x.map(Math.log10), title: { text: `${unit} per byte moved by design` }, ...ticks(...x, (value) => figure(value, 2)) },
        yaxis: { type: "log", range: y.map(Math.log10), title: { text: `${unit}/s` }, ...ticks(...y) } }) };
    };
    const describe = (all, drawn) => {
      const shares = all.map((row) => R.sol_fraction[row]).filter((share) => share != null).sort((a, b) => a - b);
      const roof = roofs?.rates[dtype] == null ? `No rate was measured for ${dtype}. ` : "";
      const ridge = roofs?.ridge_points[dtype] == null ? "" : `Ridge point at ${figure(roofs.ridge_points[dtype])} ${unit}/B of main memory. `;
      const level = roofs?.levels.length ? `Bandwidth: ${roofs.levels.map((of) => `${of.name} ${si(of.bytes_per_s, "B/s")}`).join(", ")}. ` : "";
      const reach = shares.length ? `They reach ${percent(shares[0])} to ${percent(shares.at(-1))} of their limits. ` : "";
      const hidden = all.length > drawn ? `Of these ${drawn.toLocaleString("en")} are drawn, evenly sampled: filter to see the others.` : "";
      return `${count(all.length, "point")}. ${roof}${ridge}${level}${reach}${hidden}`;
    };
    const columns = [["case", (row) => R.case[row]], ["implementation", (row) => R.impl[row]], [`${unit}/B`, (row) => figure(R.intensity[row])], [`${unit}/s`, (row) => si(flops(row), `${unit}/s`)],
      ["time", (row) => duration(R.time_us[row] * 1e-6)], ["of the limit", (row) => percent(R.sol_fraction[row])], ["class", (row) => R.class_ai[row]], ["bound by", (row) => R.bound_by[row]]];
    return new Figure($("rooflines"), dtype, { rows, draw, columns, describe });
  }

  const METRICS = {
    rate: { title: (unit) => `${unit}/s`, value: flops, low: (r) => (flops(r) * R.time_us[r]) / R.time_high_us[r], high: (r) => (flops(r) * R.time_us[r]) / R.time_low_us[r] },
    time: { title: () => "time of a call", value: (r) => R.time_us[r] * 1e-6, low: (r) => R.time_low_us[r] * 1e-6, high: (r) => R.time_high_us[r] * 1e-6 },
    speedup: { title: () => "speedup over the baseline", value: (r) => (R.verdict[r] === "baseline" ? 1 : speedup(r)), low: (r) => speedup(r, "_high"), high: (r) => speedup(r, "_low") },
    "of the limit": { title: () => "% of what the ceilings allow", value: (r) => (R.sol_fraction[r] == null ? null : 100 * R.sol_fraction[r]), low: () => null, high: () => null },
  };
  function seriesFigure(kind, listed) {
    const series = make("select", { "aria-label": `${kind}: series` }, ...listed.map((s, i) => make("option", { value: i }, s.title)));
    const metric = make("select", { "aria-label": `${kind}: quantity` }, ...Object.keys(METRICS).map((name) => make("option", {}, name)));
    const one = () => listed[series.value];
    const sizes = new Map();
    const rows = () => {
      sizes.clear();
      one().case.forEach((name, i) => sizes.set(name, one().size[i]));
      const of = field("stack").value;
      return one().case.flatMap((name) => groups[place].get(name)?.rows ?? []).filter((row) => R.time_us[row] != null && (!of || stack(R.impl[row]) === of));
    };
    const draw = (all, box) => {
      const unit = operations(R.dtype[all[0]] ?? "");
      const { title, value, low, high } = METRICS[metric.value];
      const sampled = spread(one().size, Math.max(16, Math.floor(MOST_POINTS / byImpl(all).length)));
      const drawn = all.filter((row) => value(row) != null && sampled.has(sizes.get(R.case[row])));
      const traces = byImpl(drawn).map(([impl, of]) => {
        const { colour: tone, symbol } = look(impl);
        of.sort((a, b) => sizes.get(R.case[a]) - sizes.get(R.case[b]));
        const [y, lows, highs] = [value, low, high].map((f) => of.map(f));
        return { type: "scatter", mode: "lines+markers", name: plain(impl), rows: of, x: of.map((row) => sizes.get(R.case[row])), y, text: of.map(label), hovertemplate: "%{text}<extra></extra>",
          line: { color: tone, width: 1.75 }, marker: { color: tone, symbol, size: 8, line: { color: colour("surface"), width: 1 } },
          error_y: { type: "data", symmetric: false, array: y.map((v, i) => (highs[i] == null ? 0 : highs[i] - v)), arrayminus: y.map((v, i) => (lows[i] == null ? 0 : v - lows[i])), color: tone, thickness: 1.2, width: 3 } };
      });
      if (metric.value === "rate" || metric.value === "time") {
        const limits = one().case.map((name) => (groups[place].get(name)?.rows ?? []).find((row) => R.sol_fraction[row] != null));
        const known = limits.filter((row) => row !== undefined && sampled.has(sizes.get(R.case[row])));
        if (known.length > 1) traces.push({ type: "scatter", mode: "lines", name: "what the ceilings allow", x: known.map((row) => sizes.get(R.case[row])),
          y: known.map((row) => (metric.value === "rate" ? flops(row) / R.sol_fraction[row] : R.time_us[row] * 1e-6 * R.sol_fraction[row])), line: { color: colour("ink"), dash: "dot", width: 1.5 }, hoverinfo: "skip" });
      }
      const log = metric.value === "rate" || metric.value === "time";
      const values = traces.flatMap((trace) => trace.y).filter((v) => v > 0);
      const scale = log && values.length ? ticks(Math.min(...values), Math.max(...values), metric.value === "time" ? duration : undefined) : {};
      const tickvals = [...spread(one().size, Math.max(2, Math.floor((box.clientWidth - 80) / 45)))];
      return { traces, layout: layout({
        xaxis: { type: "log", title: { text: plain(one().axis) }, tickvals, ticktext: tickvals.map(String) },
        yaxis: { type: log ? "log" : "linear", title: { text: title(unit) }, ...scale, ...(log ? {} : { rangemode: "tozero" }) } }) };
    };
    const describe = (all) => {
      const { axis, size } = one();
      const drawn = spread(size, Math.max(16, Math.floor(MOST_POINTS / byImpl(all).length))).size;
      const which = size.length <= 16 ? size.join(", ") : `${size.length.toLocaleString("en")} from ${size[0]} to ${size.at(-1)}`;
      return `${axis}: ${which}. ${count(byImpl(all).length, "implementation")}; the bars are 95 % intervals.${drawn < size.length ? ` ${drawn} of the sizes are drawn, evenly spread.` : ""}`;
    };
    const columns = [["size", (row) => String(sizes.get(R.case[row]))], ["implementation", (row) => R.impl[row]], ["time", (row) => duration(R.time_us[row] * 1e-6)], ["rate", (row) => si(flops(row), `${operations(R.dtype[row] ?? "")}/s`)],
      ["speedup", (row) => (R.ratio[row] == null ? "" : `${times(speedup(row))} ${interval(speedup(row, "_high"), speedup(row, "_low"))}`)], ["of the limit", (row) => percent(R.sol_fraction[row])], ["verdict", state]];
    const made = new Figure($("series"), kind, { controls: [series, metric], rows, draw, columns, describe });
    for (const select of [series, metric]) select.addEventListener("change", () => made.invalidate());
    return made;
  }

  function curveFigure(parent) {
    const { curves } = report.places[parent.dataset.place].ceilings;
    const points = Object.entries(curves).flatMap(([name, curve]) => curve.bytes.map((size, i) => ({ name, size, rate: curve.bytes_per_s[i] })));
    if (!points.length) return null;
    const draw = () => {
      const traces = Object.entries(curves).map(([name, curve], i) => ({ type: "scatter", mode: "lines+markers", name, x: curve.bytes, y: curve.bytes_per_s, text: curve.bytes.map((size, j) => `${plain(name)} of ${bytes(size)}: ${si(curve.bytes_per_s[j], "B/s")}`),
        hovertemplate: "%{text}<extra></extra>", line: { color: colour(`s${i}`), width: 1.75 }, marker: { size: 7, color: colour(`s${i}`) } }));
      const sizes = [...new Set(points.map((point) => point.size))].sort((a, b) => a - b);
      return { traces, layout: layout({ xaxis: { type: "log", title: { text: "working set" }, tickvals: sizes.filter((s, i) => !i || s / sizes[i - 1] > 3), ticktext: sizes.filter((s, i) => !i || s / sizes[i - 1] > 3).map(bytes) }, yaxis: { type: "log", title: { text: "B/s" }, ...ticks(Math.min(...points.map((p) => p.rate)), Math.max(...points.map((p) => p.rate))) } }) };
    };
    const columns = [["probe", (p) => p.name], ["working set", (p) => bytes(p.size)], ["bandwidth", (p) => si(p.rate, "B/s")]];
    return new Figure(parent, "Bandwidth over working set", { rows: () => points, draw, columns, describe: () => `${count(points.length, "probe")}; between them the analysis interpolates log-log.` });
  }

  // -- all of it together ----------------------------------------------------------------------------------------------

  const forget = (id) => {
    for (const { figure } of $(id).querySelectorAll("figure")) figure && (watcher.unobserve(figure.element), resizer.unobserve(figure.plot));
    $(id).replaceChildren();
  };
  function enter(number) {
    place = number;
    field("place").value = String(number);
    offer();
    rescale();
    forget("rooflines");
    forget("series");
    const dtypes = new Set();
    for (const group of groups[place].values())
      if (!group.name.startsWith("ceiling:")) for (const row of group.rows) if (R.tflop_per_s[row] > 0 && R.intensity[row] > 0) dtypes.add(R.dtype[row]);
    [...dtypes].sort().forEach(roofline);
    $("roofline").hidden = !dtypes.size;
    const here = report.series.filter((s) => s.place === place);
    for (const [kind, of] of [["GEMM", "gemm"], ["Attention", "attention"]]) {
      const listed = here.filter((s) => s.workload === of);
      if (listed.length) seriesFigure(kind, listed);
    }
    $("sizes").hidden = !here.length;
    refresh();
  }
  function refresh({ figures: redraw = true } = {}) {
    const chosen = selected();
    const every = [...groups[place].values()];
    shown = sorted(chosen);
    paging.page = 0;
    drawTable();
    const total = (of) => of.reduce((sum, { rows }) => sum + rows.length, 0);
    $("shown").textContent = `${total(chosen).toLocaleString("en")} of ${count(total(every), "result")}, ${chosen.length.toLocaleString("en")} of ${count(every.length, "case")}`;
    if (redraw) for (const figure of $("explore").querySelectorAll("figure")) figure.figure.invalidate();
  }
  let typing;
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    if (event.target.name === "place") enter(Number(event.target.value));
    else typing = setTimeout(refresh, event.target.name === "text" ? 150 : 0);
  });
  form.addEventListener("reset", () => setTimeout(refresh));
  form.addEventListener("submit", (event) => event.preventDefault());

  // Links into the data: #case=<id> and #place=<number>.
  function follow() {
    const [, kind, value] = location.hash.match(/^#(case|place)=(.*)$/) ?? [];
    if (!kind) return;
    let wanted;
    try { wanted = decodeURIComponent(value); } catch { return; }
    if (kind === "place" && report.places[wanted]) enter(Number(wanted));
    if (kind === "case") {
      const where = groups[place].has(wanted) ? place : groups.findIndex((cases) => cases.has(wanted));
      if (where < 0) return;
      form.reset();
      if (where !== place) enter(where);
      field("text").value = wanted;
      refresh();
    }
    $(kind === "case" ? "results" : "explore").scrollIntoView();
  }
  addEventListener("hashchange", follow);

  // Theme: the system's, until the button says otherwise.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
  function themed() {
    $("theme").setAttribute("aria-pressed", String(theme() === "dark"));
    figures().forEach((figure) => figure.invalidate());
  }
  $("theme").addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; themed(); });
  dark.addEventListener("change", themed);

  // Paper holds more than a page of the table, and figures that nobody has scrolled to; two stand side by side.
  function paper(on) {
    for (const figure of figures()) {
      figure.plot.style.width = on ? "496px" : "";
      figure.stale = true;
      if (on || figure.near) figure.draw();
    }
  }
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((details) => { if (!details.open && !details.closest("figure")) { details.open = true; details.dataset.forPrint = ""; } });
    paging.per = PRINTED;
    drawTable();
    paper(true);
  });
  addEventListener("afterprint", () => {
    document.querySelectorAll("details[data-for-print]").forEach((details) => { details.open = false; delete details.dataset.forPrint; });
    paging.per = PER_PAGE;
    drawTable();
    paper(false);
  });

  if (R.case.length) {
    $("explore").hidden = false;
    field("place").replaceChildren(...report.places.map((of, i) => make("option", { value: i }, `${of.device}${of.machine === of.device ? "" : ` (${of.machine})`}${of.threads ? `, ${of.threads} threads` : ""}, ${of.regime}`)));
    $("place-label").hidden = report.places.length < 2;
    enter(0);
    follow();
  }
  document.querySelectorAll(".curve").forEach(curveFigure);
  themed();
  root.dataset.ready = "";
  requestIdleCallback?.(loaded);
})();
