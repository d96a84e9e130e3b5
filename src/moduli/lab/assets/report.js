"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const redraw = [];
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "", "", "", "", "", "", "", "6 3", "6 3", "6 3", "6 3"];
const colour = (s) => `var(--s${s % 12})`;
const dash = (s) => (s >= 12 ? "2 3" : DASHES[s]);

function node(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "tspan", "g", "circle", "rect", "clipPath", "defs"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// -- numbers ----------------------------------------------------------------------------------------------------------

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
function power(exponent) {
  if (exponent >= 0 && exponent <= 4) return String(10 ** exponent);
  if (exponent < 0 && exponent >= -2) return (10 ** exponent).toFixed(-exponent);
  return "10" + [...String(exponent)].map((c) => RAISED[c]).join("");
}
function number(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-3) return x.toExponential(digits - 2);
  return String(Number(x.toPrecision(digits)));
}
function seconds(x) {
  if (x === null || x === undefined) return "–";
  return x < 1 ? `${number(1000 * x, 3)} ms` : `${number(x, 3)} s`;
}
function ticks(low, high, most) {
  const from = Math.ceil(low - 1e-9), to = Math.floor(high + 1e-9);
  const step = Math.max(1, Math.ceil((to - from + 1) / most));
  const found = [];
  for (let e = from; e <= to; e++) if ((e - to) % step === 0) found.push(e);
  return found;
}

// -- charts -----------------------------------------------------------------------------------------------------------

const tip = document.getElementById("tip");
function showTip(event, lines) {
  tip.replaceChildren(...lines.map((line) => node("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, event.clientY - box.height - 12) + "px";
}
function hideTip() { tip.hidden = true; }

/** A chart of lines. Series: {series, x, y, lower, upper}; x is on a log scale, and so is y unless `linear`. */
function chart(holder, { series, x: xName, y: yName, linear = false, steps = false, height = 270 }) {
  const draw = () => {
    const width = Math.max(240, holder.clientWidth || 320);
    const box = { left: 46, right: 12, top: 8, bottom: 34 };
    const shown = series.filter((s) => !hidden.has(s.series));
    const svg = node("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${yName} against ${xName}` });
    const lx = Math.log10;
    const ly = linear ? (v) => v : Math.log10;
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const s of shown) {
      s.x.forEach((x, i) => {
        for (const v of [s.y[i], s.lower ? s.lower[i] : null]) {
          if (v === null || v === undefined || (!linear && !(v > 0))) continue;
          x0 = Math.min(x0, lx(x)); x1 = Math.max(x1, lx(x)); y0 = Math.min(y0, ly(v)); y1 = Math.max(y1, ly(v));
        }
      });
    }
    if (linear) { y0 = 0; y1 = 1; }
    if (!(x1 >= x0)) {
      svg.append(node("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show"));
      holder.replaceChildren(svg);
      return;
    }
    if (x1 - x0 < 0.2) x1 = x0 + 0.2;
    if (y1 - y0 < 0.2 && !linear) { y0 -= 0.1; y1 += 0.1; }
    if (!linear) { const pad = 0.03 * (y1 - y0); y0 -= pad; y1 += pad; }
    const px = (v) => box.left + ((v - x0) / (x1 - x0)) * (width - box.left - box.right);
    const py = (v) => height - box.bottom - ((v - y0) / (y1 - y0)) * (height - box.top - box.bottom);
    let xt = ticks(x0, x1, 6).map((e) => [e, power(e)]);
    if (xt.length < 2) xt = [0, 0.5, 1].map((t) => x0 + t * (x1 - x0)).map((v) => [v, number(10 ** v, 2)]);
    let yt = linear ? [0, 0.25, 0.5, 0.75, 1].map((v) => [v, `${100 * v}%`]) : ticks(y0, y1, 7).map((e) => [e, power(e)]);
    if (yt.length < 2) yt = [0.05, 0.5, 0.95].map((t) => y0 + t * (y1 - y0)).map((v) => [v, number(10 ** v, 3)]);
    for (const [v, label] of xt) {
      svg.append(node("line", { class: "grid", x1: px(v), x2: px(v), y1: box.top, y2: height - box.bottom }));
      svg.append(node("text", { x: px(v), y: height - box.bottom + 15, "text-anchor": "middle" }, label));
    }
    for (const [v, label] of yt) {
      svg.append(node("line", { class: "grid", x1: box.left, x2: width - box.right, y1: py(v), y2: py(v) }));
      svg.append(node("text", { x: box.left - 6, y: py(v) + 4, "text-anchor": "end" }, label));
    }
    svg.append(node("line", { class: "axis", x1: box.left, x2: width - box.right, y1: height - box.bottom, y2: height - box.bottom }));
    svg.append(node("text", { x: width - box.right, y: height - 4, "text-anchor": "end" }, xName));
    const at = [];
    for (const s of shown) {
      const group = node("g", { class: "series", "data-series": s.series });
      const points = [], band = [];
      s.x.forEach((x, i) => {
        if (s.y[i] === null || (!linear && !(s.y[i] > 0))) return;
        const X = px(lx(x)), Y = py(ly(s.y[i]));
        if (steps && points.length) points.push([X, points[points.length - 1][1]]);
        points.push([X, Y]);
        at.push({ X, Y, x, i, s, group });
        if (s.lower && s.upper[i] !== null && s.lower[i] > 0) band.push([X, py(Math.min(ly(s.upper[i]), y1)), py(ly(s.lower[i]))]);
      });
      if (steps && points.length) points.push([width - box.right, points[points.length - 1][1]]);
      if (band.length > 1) {
        const up = band.map((p) => `${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("L");
        const down = band.reverse().map((p) => `${p[0].toFixed(1)},${p[2].toFixed(1)}`).join("L");
        group.append(node("path", { class: "band", d: `M${up}L${down}Z`, style: `fill:${colour(s.series)}` }));
      }
      if (points.length) {
        const d = "M" + points.map((p) => `${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("L");
        group.append(node("path", { class: "line", d, style: `stroke:${colour(s.series)}`, "stroke-dasharray": dash(s.series) }));
        const end = points[points.length - 1];
        if (!steps) group.append(node("circle", { cx: end[0], cy: end[1], r: 3, style: `fill:${colour(s.series)}` }));
      }
      svg.append(group);
    }
    const move = (event) => {
      const frame = svg.getBoundingClientRect();
      const X = ((event.clientX - frame.left) / frame.width) * width, Y = ((event.clientY - frame.top) / frame.height) * height;
      let best = null, distance = 900;
      for (const p of at) {
        const d = (p.X - X) ** 2 + (p.Y - Y) ** 2;
        if (d < distance) { distance = d; best = p; }
      }
      for (const group of svg.querySelectorAll(".series")) group.classList.toggle("faint", best !== null && group !== best.group);
      if (!best) return hideTip();
      const { s, i } = best;
      const range = s.lower ? [`quartiles ${number(s.lower[i])} to ${number(s.upper[i])}`] : [];
      const value = linear ? `${Math.round(100 * s.y[i])}%` : number(s.y[i]);
      showTip(event, [data.contenders[s.series].label, `${xName}: ${number(s.x[i])}`, `${yName}: ${value}`, ...range]);
    };
    const leave = () => { hideTip(); for (const group of svg.querySelectorAll(".faint")) group.classList.remove("faint"); };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerleave", leave);
    holder.replaceChildren(svg);
  };
  redraw.push(draw);
  if (document.documentElement.dataset.ready) draw();
  return draw;
}

// -- maps -------------------------------------------------------------------------------------------------------------

function rgb(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(/\s+/).map(Number);
}
function paint(canvas, map) {
  const size = 448, n = map.size;
  canvas.width = canvas.height = size;
  const bytes = Uint8Array.from(atob(map.bytes), (c) => c.charCodeAt(0));
  const low = rgb("--low"), high = rgb("--high");
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  const bands = 14;
  for (let r = 0; r < size; r++) {
    const y = (r / (size - 1)) * (n - 1), i = Math.min(n - 2, Math.floor(y)), v = y - i;
    for (let c = 0; c < size; c++) {
      const x = (c / (size - 1)) * (n - 1), j = Math.min(n - 2, Math.floor(x)), u = x - j, k = i * n + j;
      const h = (bytes[k] * (1 - u) + bytes[k + 1] * u) * (1 - v) + (bytes[k + n] * (1 - u) + bytes[k + n + 1] * u) * v;
      const t = Math.floor((h / 255) * bands * 0.9999) / (bands - 1), o = 4 * (r * size + c);
      for (let q = 0; q < 3; q++) image.data[o + q] = high[q] + (low[q] - high[q]) * t;
      image.data[o + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}
function mapOf(problem, holder) {
  const [x0, x1, y0, y1] = problem.window;
  const canvas = node("canvas", { "aria-label": `Map of ${problem.name}` });
  const svg = node("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const px = (p) => (100 * (p[0] - x0)) / (x1 - x0), py = (p) => (100 * (y1 - p[1])) / (y1 - y0);
  const inside = (p) => [Math.max(-200, Math.min(300, px(p))).toFixed(2), Math.max(-200, Math.min(300, py(p))).toFixed(2)];
  const scale = { "vector-effect": "non-scaling-stroke" };
  holder.append(node("div", { class: "map" }, canvas, svg));
  let frame = 0;
  const clouds = problem.clouds || [];
  const length = Math.max(0, ...clouds.map((c) => c.frames.length));
  let painted = null;
  const draw = () => {
    // The map changes with the theme only; a new generation must not wait for two hundred thousand pixels.
    const shade = rgb("--low").join();
    if (problem.map && painted !== shade) paint(canvas, problem.map);
    painted = shade;
    const clip = `clip-${problem.name.replace(/[^a-z0-9]/gi, "-")}`;
    const content = node("g", { "clip-path": `url(#${clip})` });
    svg.replaceChildren(node("defs", {}, node("clipPath", { id: clip }, node("rect", { width: 100, height: 100 }))), content);
    for (const p of problem.minimisers) {
      const [a, b] = inside(p).map(Number);
      content.append(node("path", { class: "best", d: `M${a - 1.6},${b}H${a + 1.6}M${a},${b - 1.6}V${b + 1.6}`, ...scale }));
    }
    for (const path of problem.paths) {
      if (hidden.has(path.series)) continue;
      const group = node("g", { class: "series path", "data-series": path.series });
      const d = "M" + path.points.map((p) => inside(p).join(",")).join("L");
      group.append(node("path", { class: "line", d, style: `stroke:${colour(path.series)}`, "stroke-dasharray": dash(path.series), ...scale }));
      const [a, b] = inside(path.points[path.points.length - 1]);
      group.append(node("circle", { cx: a, cy: b, r: 1.1, style: `fill:${colour(path.series)}` }));
      content.append(group);
    }
    for (const cloud of clouds) {
      if (hidden.has(cloud.series)) continue;
      const now = cloud.frames[Math.min(frame, cloud.frames.length - 1)];
      const group = node("g", { class: "series cloud", "data-series": cloud.series });
      for (const p of now) {
        const [a, b] = inside(p);
        group.append(node("circle", { cx: a, cy: b, r: 1.15, style: `fill:${colour(cloud.series)};stroke:var(--card);stroke-width:.3` }));
      }
      content.append(group);
    }
  };
  redraw.push(draw);
  if (length < 2) return;
  const slider = node("input", { type: "range", min: 0, max: length - 1, value: 0, "aria-label": `Generation of the population on ${problem.name}` });
  const output = node("output");
  const longest = clouds.reduce((a, b) => (b.frames.length > a.frames.length ? b : a));
  const show = () => {
    frame = Number(slider.value);
    output.textContent = `generation ${longest.generations[frame]}`;
    if (document.documentElement.dataset.ready) draw();
  };
  slider.addEventListener("input", show);
  let timer = 0;
  const play = node("button", { type: "button", "aria-label": "Play the generations" }, "▶");
  play.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = 0; play.textContent = "▶"; return; }
    if (Number(slider.value) === length - 1) { slider.value = 0; show(); }
    play.textContent = "❚❚";
    timer = setInterval(() => {
      slider.value = Number(slider.value) + 1;
      show();
      if (Number(slider.value) === length - 1) { clearInterval(timer); timer = 0; play.textContent = "▶"; }
    }, 90);
  });
  holder.append(node("div", { class: "slide" }, play, slider, output));
  slider.value = Math.min(length - 1, Math.floor(length / 5));
  show();
}

// -- the page ---------------------------------------------------------------------------------------------------------

function lead() {
  const { contenders, problems, seeds } = data;
  const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const words = `${count(contenders.length, "optimizer")} on ${count(problems.length, "problem")} from ${count(seeds.length, "seed")}, ${data.started.slice(0, 10)}`;
  const line = document.getElementById("lead");
  line.textContent = words;
  if (!data.complete) line.append(node("span", { class: "warn" }, ` · not finished: ${data.finished} of ${data.expected} runs`));
}
function legend() {
  const bar = document.getElementById("legend");
  data.contenders.forEach((contender, s) => {
    const line = node("svg", { width: 22, height: 8, "aria-hidden": "true" });
    line.append(node("line", { x1: 1, x2: 21, y1: 4, y2: 4, style: `stroke:${colour(s)};stroke-width:3`, "stroke-dasharray": dash(s) }));
    const button = node("button", { type: "button", "aria-pressed": "true", title: contender.source, "data-series": s }, line, node("span", {}, contender.label));
    button.addEventListener("click", () => {
      if (hidden.has(s)) hidden.delete(s);
      else hidden.add(s);
      button.setAttribute("aria-pressed", String(!hidden.has(s)));
      redraw.forEach((draw) => draw());
    });
    bar.append(button);
  });
}
function overview() {
  const card = document.getElementById("overview");
  const holder = node("div", { id: "profile" });
  const choice = node("div", { class: "choice", role: "group", "aria-label": "How well a problem must be solved" });
  const names = { 0.1: "roughly (90%)", 0.001: "well (99.9%)", 0.000001: "to the end" };
  let draw = null;
  const show = (profile, button) => {
    for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
    if (draw) redraw.splice(redraw.indexOf(draw), 1);
    draw = chart(holder, { series: profile.series.map((s, i) => ({ ...s, series: i })), x: "times the evaluations of the best", y: "problems solved", linear: true, steps: true, height: 300 });
  };
  const buttons = data.profiles.map((profile) => {
    const button = node("button", { type: "button" }, names[profile.tolerance] || String(profile.tolerance));
    button.addEventListener("click", () => show(profile, button));
    choice.append(button);
    return button;
  });
  const text = "How many problems and seeds each optimizer solves within a multiple of the evaluations that the best one needed. Higher is better; the left edge says how often it was the best. Curves below are medians over seeds, their bands quartiles.";
  card.append(node("div", { class: "head" }, node("h2", {}, "Over all problems"), node("p", {}, text), choice), holder);
  show(data.profiles[1], buttons[1]);
}
function standings() {
  if (!data.standings.length) return;
  const card = document.getElementById("standings");
  const percent = (v) => `${Math.round(100 * v)}%`;
  const head = ["optimizer", "mean rank", "solved within 4×", "profile", "tied with"];
  const body = node("tbody", {}, ...data.standings.map((row) => node("tr", {},
    node("td", {}, node("span", { class: "name" }, node("span", { class: "dot", style: `background:${colour(row.series)}` }), row.contender)),
    node("td", { class: "number" }, `${number(row.rank, 3)} [${row.rank_interval.map((v) => number(v, 3)).join(", ")}]`),
    node("td", { class: "number" }, `${percent(row.solved)} [${row.solved_interval.map(percent).join(", ")}]`),
    node("td", { class: "number wide" }, `${number(row.profile, 2)} [${row.profile_interval.map((v) => number(v, 2)).join(", ")}]`),
    node("td", { class: "wide" }, row.tied.length ? row.tied.join(", ") : "nobody"))));
  const rules = data.tuning ? `Each optimizer had ${data.tuning.settings} settings in ${data.seeds.length} studies; the best of each study counts, and of the studies the median. ` : "";
  const text = `${rules}Ranks are by evaluations until all but 5% of the way to the least known value is done. In brackets is where 95% of bootstrap draws lie. Tied are those of which neither has the better rank in 97.5% of the draws.`;
  card.append(node("div", { class: "head" }, node("h2", {}, "Standings"), node("p", {}, text)));
  card.append(node("div", { class: "scroll" }, node("table", {}, node("thead", {}, node("tr", {}, ...head.map((title, i) => node("th", { scope: "col", class: i > 2 ? "wide" : "" }, title)))), body)));
}
function tuning() {
  if (!data.tuning) return;
  const card = document.getElementById("tuning");
  card.append(node("div", { class: "head" }, node("h2", {}, "Tuning"), node("p", {}, "Final loss against the step size (or the first number that was tuned), one curve per optimizer; the other numbers vary with it. Below, what the chains as they were written gave, and the best settings.")));
  const charts = node("div", { class: "charts" });
  card.append(charts);
  for (const problem of data.problems) {
    const lines = data.tuning.sensitivity[problem.name] || [];
    if (!lines.length) continue;
    const floor = problem.exact && problem.optimum !== null ? 1e-16 : 0;
    const holder = node("div", { class: "sensitivity" });
    charts.append(node("div", {}, node("h3", {}, `${problem.name}: final loss against ${[...new Set(lines.map((line) => line.number.split(".").pop()))].join(", ")}`), holder));
    const series = lines.map((line) => ({ series: line.series, x: line.x, y: line.y.map((v) => (v === null ? null : Math.max(v - problem.shift, floor))) }));
    chart(holder, { series, x: "number", y: problem.loss });
  }
  const rows = data.tuning.gains.map((row) => node("tr", {},
    node("td", {}, row.problem), node("td", {}, row.contender),
    node("td", { class: "number" }, number(row.written)), node("td", { class: "number" }, number(row.tuned)),
    node("td", {}, row.helped ? "yes" : "no"), node("td", { class: "wide" }, ...row.chosen.map((line) => node("div", {}, node("code", {}, line))))));
  const titles = ["problem", "optimizer", "as written", "tuned", "helped", "chosen"];
  card.append(node("div", { class: "scroll" }, node("table", {}, node("thead", {}, node("tr", {}, ...titles.map((title) => node("th", { scope: "col", class: title === "chosen" ? "wide" : "" }, title)))), node("tbody", {}, ...rows))));
}
function problems() {
  const place = document.getElementById("problems");
  for (const problem of data.problems) {
    const exact = problem.exact && problem.optimum !== null;
    const yName = problem.loss;
    const floor = exact ? 1e-16 : 0;
    const series = (key) =>
      problem.curves.map((curve) => {
        const c = curve[key], move = (v) => (v === null ? null : Math.max(v - problem.shift, floor));
        return { series: curve.series, x: c.x, y: c.median.map(move), lower: c.lower.map(move), upper: c.upper.map(move) };
      });
    const tags = node("div", { class: "tags" }, ...[`dimension ${problem.dimension}`, ...problem.tags].map((tag) => node("span", { class: "tag" }, tag)));
    const known = problem.optimum === null ? "" : ` · ${problem.exact ? "optimum" : "best known"} ${number(problem.optimum, 6)}`;
    const card = node("article", { class: "card", id: `problem-${problem.name}` }, node("div", { class: "head" }, node("h2", {}, problem.name), node("p", {}, problem.summary + known), tags));
    const charts = node("div", { class: "charts" });
    card.append(charts);
    place.append(card);
    for (const key of ["evaluations", "seconds"]) {
      const holder = node("div", { class: `curves ${key}` });
      charts.append(node("div", {}, node("h3", {}, `${yName} against ${key}`), holder));
      chart(holder, { series: series(key), x: key, y: yName, height: problem.window ? 340 : 270 });
    }
    if (problem.window) {
      const holder = node("div", { class: "landscape" });
      charts.append(node("div", {}, node("h3", {}, `paths from seed ${data.seeds[0]}, + optimum`), holder));
      mapOf(problem, holder);
    }
  }
}
function results() {
  const card = document.getElementById("results");
  const columns = [
    ["problem", "problem", ""], ["contender", "optimizer", ""], ["median", "final loss", "number"], ["best", "best", "number wide"],
    ["evaluations", "evaluations", "number"], ["seconds", "time", "number wide"], ["reached", "solved", "number wide"], ["why", "ended", "reason"],
  ];
  for (const row of data.rows) row.why = Object.entries(row.reasons).map(([why, n]) => (n === row.runs ? why : `${n}× ${why}`)).join(", ");
  const head = node("tr"), body = node("tbody");
  let key = null, up = true;
  const fill = () => {
    const rows = [...data.rows];
    if (key) {
      rows.sort((a, b) => {
        const [x, y] = [a[key], b[key]];
        if (x === y) return 0;
        if (x === null) return 1;
        if (y === null) return -1;
        return (x < y ? -1 : 1) * (up ? 1 : -1);
      });
    }
    body.replaceChildren(...rows.map((row) => {
      const line = node("tr", { class: `row${row.failed ? " failed" : ""}`, tabindex: 0, "aria-expanded": "false" });
      for (const [name, , style] of columns) {
        const cell = node("td", { class: style });
        if (name === "contender") cell.append(node("span", { class: "name" }, node("span", { class: "dot", style: `background:${colour(row.series)}` }), row.contender));
        else if (name === "seconds") cell.append(seconds(row.seconds));
        else if (name === "reached") cell.append(row.reached === null ? "–" : `${row.reached} of ${row.runs}`);
        else cell.append(typeof row[name] === "number" || row[name] === null ? number(row[name]) : row[name]);
        line.append(cell);
      }
      const toggle = () => {
        if (line.nextSibling && line.nextSibling.classList.contains("detail")) line.nextSibling.remove();
        else line.after(details(row, columns.length));
        line.setAttribute("aria-expanded", String(Boolean(line.nextSibling && line.nextSibling.classList.contains("detail"))));
      };
      line.addEventListener("click", toggle);
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
      return line;
    }));
  };
  columns.forEach(([name, title, style]) => {
    const cell = node("th", { class: style, scope: "col", tabindex: 0, "aria-sort": "none", "data-key": name }, title);
    const sort = () => {
      up = key === name ? !up : true;
      key = name;
      for (const other of head.children) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      fill();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    head.append(cell);
  });
  fill();
  card.append(node("div", { class: "head" }, node("h2", {}, "Results"), node("p", {}, "Medians over seeds. Click a heading to sort, a row for its runs and its command.")));
  card.append(node("div", { class: "scroll" }, node("table", {}, node("thead", {}, head), body)));
}
function details(row, span) {
  const cell = node("td", { colspan: span });
  cell.append(node("pre", { class: "command" }, row.command));
  for (const run of row.details) {
    const gradients = run.gradients === null ? "" : `, ${run.gradients} with gradient`;
    cell.append(node("div", {}, `seed ${run.seed}: ${number(run.value, 6)} after ${run.evaluations} evaluations${gradients}, ${seconds(run.seconds)}; ${run.reason}${run.detail ? ": " + run.detail : ""}`));
    if (run.chain) cell.append(node("pre", { class: "command" }, run.chain));
    if (run.traceback) cell.append(node("pre", { class: "traceback" }, run.traceback));
  }
  return node("tr", { class: "detail" }, cell);
}
function about() {
  const card = document.getElementById("about");
  const list = node("dl");
  const add = (term, text) => list.append(node("dt", {}, term), node("dd", {}, text));
  add("versions", Object.entries(data.versions).map(([k, v]) => `${k} ${v}`).join(", "));
  add("machine", `${data.machine.processor}, ${data.machine.cores} cores, ${data.machine.system}`);
  add("budget", data.budget === null ? "each problem's own" : `${data.budget} evaluations`);
  add("limits", `${data.seconds} s and ${data.threads} thread${data.threads === 1 ? "" : "s"} per run`);
  add("seeds", data.seeds.join(", "));
  add("started", data.started);
  card.append(node("h2", {}, "How to do this race again"), node("pre", { id: "command" }, data.command), list);
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  redraw.forEach((draw) => draw());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw.forEach((draw) => draw()));
let width = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => redraw.forEach((draw) => draw()));
});
lead();
legend();
overview();
standings();
tuning();
problems();
results();
about();
// Only now, when all cards are there, has every chart its width.
redraw.forEach((draw) => draw());
document.documentElement.dataset.ready = "true";
