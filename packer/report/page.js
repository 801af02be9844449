// Draws the report from the JSON beside it. No library, no network.

const data = JSON.parse(document.getElementById("data").textContent);
const { summary, survey } = data;
const main = document.querySelector("main");

// ---- numbers ----
// halves to the even number, as the tables' figures are rounded
const whole = (x) => ((Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)) || 0).toLocaleString("en-US");
const counted = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : noun.endsWith("tch") ? "es" : "s"}`;
const percent = (x) => {
  if (x === 0) return "0%";
  const size = Math.abs(100 * x);
  if (size < 0.0005) return "under 0.001%";
  return (100 * x).toFixed(size >= 100 ? 0 : size >= 0.095 ? 1 : 3) + "%";
};
const amount = (x) => {
  if (Math.abs(x) < 100000) return whole(x);
  for (const unit of ["k", "M", "G", "T"]) {
    x /= 1000;
    if (Math.abs(x) < 999.5) return Number(x.toPrecision(3)) + " " + unit;
  }
  return whole(x) + " T";
};
const factor = (x) => Number(x.toPrecision(3)).toString();
const short = (x) => {
  if (Math.abs(x) < 10000) return Number(x.toPrecision(3)).toLocaleString("en-US");
  return amount(x).replace(" ", "");
};

// ---- elements ----
const SVG = "http://www.w3.org/2000/svg";
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function draw(tag, attributes = {}, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
function section(parent, title, lead) {
  const element = make("section", {}, make("h2", {}, title));
  if (lead) element.append(make("p", {}, lead));
  parent.append(element);
  return element;
}
function legend(parent, entries) {
  const row = make("div", { class: "legend" });
  for (const [colour, text] of entries) {
    row.append(make("span", {}, make("i", { style: `background:${colour}` }), text));
  }
  parent.append(row);
}

// Charts are drawn in real pixels and drawn again when the width changes, so that text keeps its size.
function chart(parent, height, label, paint) {
  const holder = make("div", { class: "chart", role: "img", "aria-label": label });
  parent.append(holder);
  let last = 0;
  const repaint = () => {
    const width = holder.clientWidth;
    if (!width || width === last) return;
    last = width;
    holder.replaceChildren();
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height });
    holder.append(svg);
    paint(svg, width, height, holder);
  };
  new ResizeObserver(repaint).observe(holder);
  repaint();
}
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}
function tooltip(svg, holder, width, pick) {
  const tip = make("div", { class: "tip" });
  const line = draw("line", { class: "axis", y1: 0, visibility: "hidden" });
  svg.append(line);
  holder.append(tip);
  const show = (event) => {
    const bounds = holder.getBoundingClientRect();
    const found = pick(event.clientX - bounds.left);
    if (!found) return hide();
    tip.replaceChildren(...found.lines.flatMap((text, i) => (i ? [make("br"), text] : [text])));
    line.setAttribute("x1", found.x);
    line.setAttribute("x2", found.x);
    line.setAttribute("y2", found.bottom);
    line.setAttribute("visibility", "visible");
    const left = Math.min(Math.max(found.x + 12, 0), Math.max(width - tip.offsetWidth, 0));
    tip.style.transform = `translate(${found.x + 12 + tip.offsetWidth > width ? Math.max(found.x - tip.offsetWidth - 12, 0) : left}px, 4px)`;
    tip.style.opacity = 1;
  };
  const hide = () => {
    tip.style.opacity = 0;
    line.setAttribute("visibility", "hidden");
  };
  holder.addEventListener("pointermove", show);
  holder.addEventListener("pointerleave", hide);
}

// ---- a quantity along the steps ----
// `random`: the mean and the spread that random steps would have, as a band of 95% behind the line
function along(parent, label, series, format, fromZero, least, exact = format, random = null) {
  chart(parent, 168, label, (svg, width, height, holder) => {
    const inset = { left: 52, right: 8, top: 8, bottom: 24 };
    let low = Math.min(...series.low), high = Math.max(...series.high);
    const expected = random ? [Math.max(random[0] - 1.96 * random[1], 0), random[0] + 1.96 * random[1]] : [];
    low = Math.min(low, ...expected);
    high = Math.max(high, ...expected);
    if (fromZero) low = Math.min(low, 0);
    if (high - low < 1e-9 * Math.max(Math.abs(high), 1e-9)) { high += Math.abs(high) * 0.1 || least; low -= fromZero ? 0 : Math.abs(low) * 0.1 || 1; }
    const margin = (high - low) * 0.06;
    high += margin;
    if (!fromZero) low -= margin;
    const count = series.mean.length;
    const x = (i) => inset.left + (count === 1 ? 0.5 : i / (count - 1)) * (width - inset.left - inset.right);
    const y = (v) => inset.top + ((high - v) / (high - low)) * (height - inset.top - inset.bottom);
    for (const tick of ticks(low, high, 4)) {
      svg.append(draw("line", { class: "grid", x1: inset.left, x2: width - inset.right, y1: y(tick), y2: y(tick) }));
      svg.append(draw("text", { x: inset.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    if (random) {
      svg.append(draw("rect", { x: inset.left, width: width - inset.left - inset.right, y: y(expected[1]), height: Math.max(y(expected[0]) - y(expected[1]), 1), fill: "var(--padding)", opacity: 0.35 }));
    }
    const path = (values) => values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`);
    if (count > 1) {
      const band = [...path(series.high), ...path(series.low).reverse()];
      svg.append(draw("polygon", { points: band.join(" "), fill: "var(--band)" }));
      svg.append(draw("polyline", { points: path(series.mean).join(" "), fill: "none", stroke: "var(--real)", "stroke-width": 2, "stroke-linejoin": "round" }));
    } else {
      svg.append(draw("circle", { cx: x(0), cy: y(series.mean[0]), r: 4, fill: "var(--real)" }));
    }
    const steps = summary.num_steps;
    for (const [i, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      if (steps === 1 && i) continue;
      const at = inset.left + i * (width - inset.left - inset.right);
      const text = i ? whole(i * (steps - 1)) : "step 0";
      svg.append(draw("text", { x: at, y: height - 6, "text-anchor": anchor }, text));
    }
    tooltip(svg, holder, width, (at) => {
      const i = Math.round(((at - inset.left) / (width - inset.left - inset.right)) * (count - 1)) || 0;
      if (i < 0 || i >= count) return null;
      const first = Math.floor((i * steps) / count), last = Math.max(Math.floor(((i + 1) * steps) / count) - 1, first);
      const lines = [first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`, `mean ${exact(series.mean[i])}`];
      if (series.low[i] !== series.high[i]) lines.push(`${exact(series.low[i])} to ${exact(series.high[i])}`);
      return { x: x(i), bottom: height - inset.bottom, lines };
    });
  });
}

// ---- lengths ----
function lengths(parent) {
  const { length_edges: edges, planned_lengths: planned, dropped_lengths: dropped } = survey;
  const lost = planned.map((_, i) => Object.values(dropped).reduce((sum, counts) => sum + counts[i], 0));
  const limits = data.limits.map(([name, at]) => [name, at, at > edges.at(-1)]);
  chart(parent, 250, "Histogram of sequence lengths", (svg, width, height, holder) => {
    const inset = { left: 52, right: 8, top: 20, bottom: 24 };
    const high = Math.max(...planned.map((n, i) => n + lost[i]), 1) * 1.04;
    const even = edges.length < 3 || edges.at(-1) - edges.at(-2) <= 2 * (edges[2] - edges[1]);
    const place = (v) => (even ? (v - edges[0]) / (edges.at(-1) - edges[0]) : Math.log(Math.max(v, 1) / Math.max(edges[0], 1)) / Math.log(edges.at(-1) / Math.max(edges[0], 1)));
    const x = (v) => inset.left + place(v) * (width - inset.left - inset.right);
    const y = (n) => inset.top + (1 - n / high) * (height - inset.top - inset.bottom);
    for (const tick of ticks(0, high, 4)) {
      svg.append(draw("line", { class: "grid", x1: inset.left, x2: width - inset.right, y1: y(tick), y2: y(tick) }));
      svg.append(draw("text", { x: inset.left - 8, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    planned.forEach((count, i) => {
      const left = x(edges[i]), gap = x(edges[i + 1]) - left > 3 ? 1 : 0;
      const bar = (from, to, fill) => {
        if (to > from) svg.append(draw("rect", { x: left, width: Math.max(x(edges[i + 1]) - left - gap, 0.5), y: y(to), height: y(from) - y(to), fill }));
      };
      bar(0, count, "var(--real)");
      bar(count, count + lost[i], "var(--drop)");
    });
    const marks = even ? ticks(edges[0], edges.at(-1), Math.max(Math.floor(width / 110), 2)) : edges.filter((_, i) => i % Math.ceil(edges.length / Math.max(Math.floor(width / 90), 2)) === 0);
    let free = 0;
    for (const mark of marks) {
      if (x(mark) < free || x(mark) > width - 20) continue;
      svg.append(draw("text", { x: x(mark), y: height - 6, "text-anchor": "middle" }, whole(mark)));
      free = x(mark) + 64;
    }
    limits.forEach(([name, at, beyond], i) => {
      if (beyond) {
        svg.append(draw("text", { class: "strong", x: width - inset.right, y: inset.top + 4 + 15 * i, "text-anchor": "end" }, `${name} ${whole(at)} →`));
        return;
      }
      svg.append(draw("line", { class: "limit", x1: x(at), x2: x(at), y1: inset.top - 8 + 15 * i, y2: height - inset.bottom }));
      const side = x(at) > width / 2 ? "end" : "start";
      svg.append(draw("text", { class: "strong", x: x(at) + (side === "end" ? -6 : 6), y: inset.top + 4 + 15 * i, "text-anchor": side }, `${name} ${whole(at)}`));
    });
    tooltip(svg, holder, width, (at) => {
      const i = planned.findIndex((_, bin) => at < x(edges[bin + 1]));
      if (i < 0 || at < inset.left) return null;
      const lines = [`${whole(edges[i])} to ${whole(edges[i + 1] - 1)} tokens`, survey.is_cut ? counted(planned[i], "planned piece") : `${whole(planned[i])} planned`];
      for (const [reason, counts] of Object.entries(dropped)) if (counts[i]) lines.push(`${whole(counts[i])} dropped: ${reason}`);
      return { x: (x(edges[i]) + x(edges[i + 1])) / 2, bottom: height - inset.bottom, lines };
    });
  });
  const entries = [["var(--real)", "planned"]];
  if (lost.some(Boolean)) entries.push(["var(--drop)", "dropped: " + Object.keys(dropped).join(", ")]);
  legend(parent, entries);
}

// ---- the sources' shares along the steps ----
const LINES = ["#3b6fd4", "#d9822b", "#2f9e6e", "#b0489c", "#7a6ff0", "#b8a11f", "#c4524b", "#4aa3b8"];
function shares() {
  const names = Object.keys(survey.source_shares).filter((name) => Math.max(...survey.source_shares[name].high) > 0);
  if (names.length < 2) return;
  const parent = section(main, "Shares of the sources", "Of the tokens of each step: the mean of a stretch of steps as a line, the least and the most of its steps as a band.");
  const colour = (i) => LINES[i % LINES.length];
  chart(parent, 220, "Shares of the sources along the steps", (svg, width, height, holder) => {
    const inset = { left: 52, right: 8, top: 8, bottom: 24 };
    const all = names.map((name) => survey.source_shares[name]);
    const high = Math.min(Math.max(...all.flatMap((series) => series.high)) * 1.06, 1);
    const count = all[0].mean.length;
    const x = (i) => inset.left + (count === 1 ? 0.5 : i / (count - 1)) * (width - inset.left - inset.right);
    const y = (v) => inset.top + (1 - v / high) * (height - inset.top - inset.bottom);
    for (const tick of ticks(0, high, 4)) {
      svg.append(draw("line", { class: "grid", x1: inset.left, x2: width - inset.right, y1: y(tick), y2: y(tick) }));
      svg.append(draw("text", { x: inset.left - 8, y: y(tick) + 4, "text-anchor": "end" }, percent(tick)));
    }
    const path = (values) => values.map((v, i) => `${x(i).toFixed(1)},${y(v).toFixed(1)}`);
    all.forEach((series, i) => {
      if (count === 1) return svg.append(draw("circle", { cx: x(0), cy: y(series.mean[0]), r: 4, fill: colour(i) }));
      svg.append(draw("polygon", { points: [...path(series.high), ...path(series.low).reverse()].join(" "), fill: colour(i), opacity: 0.18 }));
      svg.append(draw("polyline", { points: path(series.mean).join(" "), fill: "none", stroke: colour(i), "stroke-width": 2, "stroke-linejoin": "round" }));
    });
    const steps = summary.num_steps;
    for (const [i, anchor] of [[0, "start"], [1, "end"]]) {
      if (steps === 1 && i) continue;
      svg.append(draw("text", { x: inset.left + i * (width - inset.left - inset.right), y: height - 6, "text-anchor": anchor }, i ? whole(steps - 1) : "step 0"));
    }
    tooltip(svg, holder, width, (at) => {
      const i = Math.round(((at - inset.left) / (width - inset.left - inset.right)) * (count - 1)) || 0;
      if (i < 0 || i >= count) return null;
      const first = Math.floor((i * steps) / count), last = Math.max(Math.floor(((i + 1) * steps) / count) - 1, first);
      const lines = [first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`];
      names.forEach((name, n) => lines.push(`${name} ${percent(all[n].mean[i])}`));
      return { x: x(i), bottom: height - inset.bottom, lines };
    });
  });
  legend(parent, names.map((name, i) => [colour(i), name]));
}

// ---- horizontal bars ----
function bars(parent, rows, least = 1e-12) {
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, [size]) => sum + size, 0)), least);
  const group = make("div", { class: "bars" });
  for (const { name, text, parts } of rows) {
    const track = make("div", { class: "track bare", role: "img", "aria-label": `${name}: ${text}` });
    for (const [size, colour] of parts) {
      track.append(make("div", { style: `background:${colour};width:${(100 * size) / most}%` }));
    }
    group.append(make("div", { class: "bar" }, make("div", { class: "what" }, make("span", {}, name), make("span", {}, text)), track));
  }
  parent.append(group);
}

// ---- a step as rectangles ----
function padded(box, height) {
  const width = 100, rows = [...box.seqlens].sort((a, b) => b - a);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", height });
  svg.append(draw("rect", { width, height, fill: "var(--padding)" }));
  const each = height / rows.length;
  if (each >= 4) {
    rows.forEach((n, i) => svg.append(draw("rect", { y: i * each, width: (width * n) / box.padded_seqlen, height: each, fill: "var(--real)" })));
    rows.forEach((_, i) => i && svg.append(draw("rect", { y: i * each - 0.5, width, height: 1, fill: "var(--panel)" })));
  } else {
    const edge = rows.flatMap((n, i) => [i * each, (i + 1) * each].map((y) => `${(width * n) / box.padded_seqlen},${y}`));
    svg.append(draw("polygon", { points: `0,0 ${edge.join(" ")} 0,${height}`, fill: "var(--real)" }));
  }
  return svg;
}
function packed(box, widest) {
  const width = 1000, height = 18;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", height });
  svg.append(draw("rect", { width: (width * box.padded_seqlen) / widest, height, fill: "var(--padding)" }));
  let at = 0;
  box.seqlens.forEach((n, i) => {
    svg.append(draw("rect", { x: (width * at) / widest, width: (width * n) / widest, height, fill: i % 2 ? "var(--real-soft)" : "var(--real)" }));
    at += n;
  });
  if (box.rest) svg.append(draw("rect", { x: (width * at) / widest, width: (width * box.rest) / widest, height, fill: "var(--real)" }));
  return svg;
}
function pictures(parent) {
  const choice = make("div", { class: "choice" });
  const caption = make("p");
  const boxes = make("div", { class: summary.layout === "packed" ? "boxes rows" : "boxes" });
  parent.append(choice, caption, boxes);
  const show = (step, button) => {
    for (const other of choice.children) other.setAttribute("aria-pressed", other === button);
    const shown = step.microbatches.length, all = summary.dp_size * summary.grad_accum;
    caption.textContent =
      `Step ${whole(step.step)}${summary.num_epochs > 1 ? ` of epoch ${step.epoch}` : ""}: ${whole(step.num_samples)} samples, ${whole(step.num_tokens)} tokens, ${percent(step.padding)} padding, learning-rate factor ${factor(step.lr_scale)}.` +
      (shown < all ? ` The first ${shown} of its ${whole(all)} micro-batches:` : "");
    const widest = Math.max(...step.microbatches.map((box) => box.padded_seqlen));
    boxes.replaceChildren(...step.microbatches.map((box) => {
      const name = `rank ${box.dp_rank}` + (summary.grad_accum > 1 ? `·${box.accum}` : "");
      const shape = summary.layout === "packed" ? whole(box.num_samples) : `${whole(box.num_samples)} × ${whole(box.padded_seqlen)}`;
      const element = make("div", { class: box.is_filler || box.is_repeat ? "box copy" : "box" },
        make("div", { class: "what" }, make("b", {}, name), make("span", {}, box.is_filler ? "filler" : box.is_repeat ? "repeat" : shape)));
      element.title = `${name}: ${whole(box.num_samples)} samples, ${whole(box.num_tokens)} real of ${whole(box.padded_tokens)} tokens`;
      element.append(summary.layout === "packed" ? packed(box, widest) : padded(box, 84));
      return element;
    }));
  };
  data.steps.forEach((step) => {
    const button = make("button", { type: "button" }, step.name);
    button.addEventListener("click", () => show(step, button));
    choice.append(button);
  });
  show(data.steps[0], choice.firstChild);
  legend(parent, [["var(--real)", summary.layout === "packed" ? "samples, end to end" : "samples, one a row"], ["var(--padding)", "padding"]]);
}

// ---- tables ----
function table(parent, heads, rows, numbersFrom = 1) {
  const cells = (tag, row) => make("tr", {}, ...row.map((cell, i) => make(tag, i >= numbersFrom ? { class: "number" } : {}, String(cell))));
  const body = make("tbody");
  rows.forEach((row) => body.append(cells("td", row)));
  parent.append(make("div", { class: "scroll" }, make("table", {}, make("thead", {}, cells("th", heads)), body)));
}

// ---- the page ----
function card(parent, label, value, more) {
  parent.append(make("div", { class: "card" }, make("div", { class: "label" }, label), make("div", { class: "value" }, value), make("div", { class: "more" }, more)));
}
function render() {
  const header = make("header", {}, make("h1", {}, data.title), make("p", {}, data.subtitle), make("p", { class: "hash" }, data.content_hash));
  main.replaceChildren(header);
  const cards = make("div", { class: "cards" });
  const all = summary.offered_samples;
  card(cards, "Steps", whole(summary.num_steps), `${counted(summary.dp_size, "rank")} × ${counted(summary.grad_accum, "micro-batch")}`);
  card(cards, "Samples planned", all ? percent(summary.planned_samples / all) : "0", `${whole(summary.planned_samples)} of ${whole(all)}`);
  card(cards, "Padding", percent(summary.padding), survey.fixed_size ? `${percent(survey.fixed_size.padding)} in batches of ${whole(survey.fixed_size.num_rows)}` : "");
  if (summary.tokens_per_step) card(cards, "Tokens per step", amount(summary.tokens_per_step.median), `${amount(summary.tokens_per_step.min)} to ${amount(summary.tokens_per_step.max)}`);
  if (summary.lr_scale) card(cards, "LR factor", summary.lr_scaling === "none" ? "1" : `${factor(summary.lr_scale.min)}–${factor(summary.lr_scale.max)}`, summary.lr_scaling === "none" ? "no scaling" : `${summary.lr_scaling} in ${summary.lr_by}`);
  if (summary.over_bound !== null) card(cards, "Packs over the bound", whole(summary.over_bound), `of at least ${whole(summary.lower_bound)}`);
  if (summary.design_effect.seqlen !== null) card(cards, "Design effect", factor(summary.design_effect.seqlen), summary.order_is_given ? "by the order given" : "1: as random steps");
  if (summary.design_effect.source !== null) card(cards, "Design effect of sources", factor(summary.design_effect.source), "1: as random steps");
  if (summary.dp_size > 1) card(cards, "Rank imbalance", percent(summary.rank_imbalance), summary.rank_imbalance_before === null ? "time lost, by cost" : `${percent(summary.rank_imbalance_before)} before balancing`);
  main.append(cards);
  for (const note of summary.notes) main.append(make("p", { class: "note" }, note));
  if (!survey.fixed_size) return tables();

  const fixed = survey.fixed_size;
  const cost = section(main, "What padding costs", `Shuffled batches of ${counted(fixed.num_rows, survey.is_cut ? "piece" : "sample")}, as many as a micro-batch of this plan holds on average, so that a step has the same real tokens, would put ${factor(fixed.times_tokens)} times as many tokens through the model; the largest would take ${factor(fixed.times_largest)} times the room of this plan's.`);
  const real = summary.planned_tokens;
  bars(cost, [
    { name: "this plan", text: `${amount(summary.padded_tokens)} tokens, ${percent(summary.padding)} padding`, parts: [[real, "var(--real)"], [Math.max(summary.padded_tokens - real, 0), "var(--padding)"]] },
    { name: `shuffled batches of ${whole(fixed.num_rows)}`, text: `${amount(fixed.times_tokens * summary.padded_tokens)} tokens, ${percent(fixed.padding)} padding`, parts: [[real, "var(--real)"], [Math.max(fixed.times_tokens * summary.padded_tokens - real, 0), "var(--padding)"]] },
  ]);
  legend(cost, [["var(--real)", "real tokens"], ["var(--padding)", "padding"]]);

  pictures(section(main, "Steps, rank by rank", summary.layout === "packed" ? "Each line is one micro-batch: a row of samples end to end; the number is how many." : "Each box is one micro-batch, samples × padded length, its samples sorted by length."));
  lengths(section(main, "Sequence lengths", survey.is_cut ? "Of all pieces that samples are cut into, in all epochs." : "Of all samples, in all epochs."));

  let pair = make("div", { class: "pair" });
  main.append(pair);
  along(section(pair, "Tokens per step"), "Tokens per step along the steps", survey.tokens, short, true, 1, amount);
  along(section(pair, "Padding per step"), "Padding per step along the steps", survey.padding, percent, true, 0.01);
  pair = make("div", { class: "pair" });
  main.append(pair);
  along(section(pair, "Samples per step"), "Samples per step along the steps", survey.samples, short, true, 1, amount);
  const mix = section(pair, "Mean length of a step's samples", "A mean that leaves the band tells of steps that are biased in length; the design effect compares all lengths, not their mean alone.");
  along(mix, "Mean length of each step's samples along the steps", survey.mean_length, short, true, 1, amount, survey.random_length);
  legend(mix, [["var(--real)", "this plan, mean and range"], ["var(--padding)", "19 of 20 random steps"]]);
  shares();
  if (summary.lr_scaling !== "none") along(section(main, "Learning-rate factor"), "Learning-rate factor along the steps", survey.lr_scale, factor, false, 1);

  if (summary.dp_size > 1) {
    const ranks = section(main, "Do the ranks finish together?", "The share of time that is lost where the ranks wait for each other in every slot of micro-batches, by cost.");
    const rows = [{ name: summary.rank_imbalance_before === null ? "this plan" : "after balancing", text: percent(summary.rank_imbalance), parts: [[summary.rank_imbalance, "var(--real)"]] }];
    if (summary.rank_imbalance_before !== null) rows.unshift({ name: "before balancing", text: percent(summary.rank_imbalance_before), parts: [[summary.rank_imbalance_before, "var(--padding)"]] });
    if (summary.grad_accum > 1 && summary.rank_imbalance_by_step !== null) rows.push({ name: "where they wait once a step", text: percent(summary.rank_imbalance_by_step), parts: [[summary.rank_imbalance_by_step, "var(--real-soft)"]] });
    bars(ranks, rows, 0.25);
    const spread = Math.max(...survey.rank_costs) * summary.dp_size - 1;
    ranks.append(make("p", {}, `Over the whole plan the busiest rank has ${percent(spread)} more than the mean.`));
  }
  tables();
}
function tables() {
  const numbers = section(main, "All numbers");
  const facts = [["what", "value"], data.facts];
  table(numbers, facts[0], facts[1], 2);
  const spreads = [["tokens per step", summary.tokens_per_step, whole], ["samples per step", summary.samples_per_step, whole], ["learning-rate factor", summary.lr_scaling === "none" ? null : summary.lr_scale, factor]];
  const present = spreads.filter(([, values]) => values);
  if (present.length) {
    const names = ["min", "q05", "q25", "median", "q75", "q95", "max", "mean"];
    table(numbers, ["per step", "min", "5%", "25%", "median", "75%", "95%", "max", "mean"], present.map(([name, values, format]) => [name, ...names.map((key) => format(values[key]))]));
  }
  const sources = summary.sources.filter((source) => source.name !== null);
  if (sources.length) table(numbers, ["source", "share", "asked", "passes", "samples planned", "tokens planned", "of samples", "of tokens"], sources.map((source) => [source.name, percent(source.share || 0), source.asked.map((phase) => percent(phase.share)).join(" → ") || "–", factor(source.passes), whole(source.planned_samples || 0), whole(source.planned_tokens || 0), whole(source.num_samples), whole(source.num_tokens)]));
  const drops = Object.entries(summary.dropped);
  if (drops.length) table(numbers, ["dropped", "samples", "tokens"], drops.map(([reason, n]) => [reason, whole(n.num_samples), whole(n.num_tokens)]));
  if (data.shapes.length) table(numbers, ["shape", "micro-batches", "share", "padding"], data.shapes);
  const config = section(main, "Configuration");
  table(config, ["option", "value"], data.config, 2);
  main.append(make("footer", {}, "Made by packer inspect from the plan alone; it needs no network."));
}
render();
