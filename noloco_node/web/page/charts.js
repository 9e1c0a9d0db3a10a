// The charts: curves of the loss, the timeline of rounds, bytes per second. A chart has stops: places whose values are
// shown when the pointer or the arrow keys reach them.

import { drawn, element, say } from "./dom.js";
import { clock, known, loss, plain, rate, size, small, span } from "./words.js";

class Chart {
  // `draw(width)` returns { height, content, stops }; a stop is { x, y, lines }.
  constructor(at, label, draw) {
    this.svg = drawn("svg", { role: "img", "aria-label": label, tabindex: "0" });
    this.layer = drawn("g");
    this.mark = drawn("line", { class: "mark" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.spoken = element("p", { class: "unseen", "aria-live": "polite" });
    this.svg.append(this.layer, this.mark);
    at.replaceChildren(this.svg, this.tip, this.spoken);
    Object.assign(this, { at, paint: draw, stops: [], chosen: null });
    new ResizeObserver(() => this.draw()).observe(at);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerdown", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.walk(event));
  }

  draw() {
    const width = Math.floor(this.at.clientWidth);
    if (width < 50) return;
    const { height, content, stops } = this.paint(width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.layer.replaceChildren(...content);
    this.stops = stops;
    this.height = height;
    const key = this.chosen?.key;
    if (key !== undefined) this.choose(stops.find((stop) => stop.key === key) ?? null);
  }

  point(x) {
    const nearest = (best, stop) => (best && Math.abs(best.x - x) <= Math.abs(stop.x - x) ? best : stop);
    this.choose(this.stops.reduce(nearest, null));
  }

  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (by === undefined || !this.stops.length) return;
    event.preventDefault();
    const last = this.stops.length - 1;
    const from = this.chosen ? this.stops.indexOf(this.chosen) : last + 1;
    this.choose(this.stops[Math.min(last, Math.max(0, from + by))]);
    say(this.spoken, this.chosen.lines.map((line) => line.filter(Boolean).join(" ")).join(", "));
  }

  choose(stop) {
    this.chosen = stop;
    this.mark.classList.toggle("shown", stop !== null);
    this.tip.hidden = stop === null;
    if (stop === null) return;
    for (const [name, value] of Object.entries({ x1: stop.x, x2: stop.x, y1: 4, y2: this.height - 24 })) this.mark.setAttribute(name, value);
    this.tip.replaceChildren(
      ...stop.lines.map(([text, mark], at) =>
        element(at ? "p" : "strong", {}, ...(mark ? [element("i", { class: mark })] : []), text)),
    );
    const room = this.at.clientWidth - this.tip.offsetWidth;
    const left = stop.x + 14 > room ? stop.x - 14 - this.tip.offsetWidth : stop.x + 14;
    this.tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
    this.tip.style.top = `${stop.y ?? 8}px`;
  }
}

// Round numbers that divide a range into about so many parts.
const ticks = (low, high, about, whole = false) => {
  const rough = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * ([1, 2, 5].find((nice) => nice * power >= rough) ?? 10);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
};

const text = (words, x, y, attributes = {}) => drawn("text", { x, y, ...attributes }, words);
const line = (x1, y1, x2, y2, kind) => drawn("line", { x1, y1, x2, y2, class: kind });
const nothing = (words, width, height) => ({
  height, stops: [], content: [text(words, width / 2, height / 2, { class: "empty", "text-anchor": "middle" })],
});

export const CURVES = [
  { field: "swarm_loss", mark: "swarm", words: "swarm" },
  { field: "swarm_eval_loss", mark: "swarm eval", words: "swarm, held-out" },
  { field: "loss", mark: "own", words: "this node" },
  { field: "eval_loss", mark: "own eval", words: "this node, held-out" },
];

const FIGURES = [
  ["learning_rate", (value) => `learning rate ${small(value)}`],
  ["gradient_norm", (value) => `gradient norm ${value.toFixed(2)}`],
  ["tokens_per_s", (value) => `${rate(value)} tokens/s`],
];

export const lossChart = (at, picture) => {
  const chart = new Chart(at, "loss of this node and of the swarm, by round; the arrow keys walk through it", (width) => {
    const height = Math.max(220, Math.min(320, Math.round(width * 0.42)));
    const points = picture.points.filter((point) => point.round > picture.points.at(-1).round - chart.rounds);
    const values = points.flatMap((point) => CURVES.map(({ field }) => point[field]).filter((value) => value !== null));
    if (!values.length) return nothing("the first round is not over yet", width, height);
    const box = { left: 40, right: width - 12, top: 26, bottom: height - 40 };
    const first = points[0].round;
    const last = Math.max(points.at(-1).round, first + 1);
    const spread = Math.max(Math.max(...values) - Math.min(...values), 0.05);
    const [low, high] = [Math.min(...values) - 0.08 * spread, Math.max(...values) + 0.06 * spread];
    const x = (round) => box.left + ((round - first) / (last - first)) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
    const digits = spread < 0.5 ? 2 : 1;
    const content = [
      ...ticks(low, high, height / 46).flatMap((value) => [
        line(box.left, y(value), box.right, y(value), "grid"),
        text(value.toFixed(digits), box.left - 8, y(value) + 4, { "text-anchor": "end" }),
      ]),
      ...ticks(first, last, Math.min(10, width / 70), true).map((round) => text(round, x(round), box.bottom + 18, { "text-anchor": "middle" })),
      line(box.left, box.bottom, box.right, box.bottom, "axis"),
      text("round", box.right, height - 4, { "text-anchor": "end", class: "label" }),
      text("loss", box.left - 8, 12, { class: "label", "text-anchor": "end" }),
    ];
    for (const { field, mark } of CURVES) {
      const known = points.filter((point) => point[field] !== null).map((point) => [x(point.round), y(point[field])]);
      if (!known.length) continue;
      content.push(drawn("polyline", { class: `curve ${mark}`, points: known.map((at) => at.map((n) => n.toFixed(1)).join(",")).join(" ") }));
      const dots = known.length > 12 ? known.slice(-1) : known;
      content.push(...dots.map(([cx, cy]) => drawn("circle", { cx, cy, r: mark.includes("eval") ? 2.5 : 2, class: `dot ${mark}` })));
    }
    const stops = points.map((point) => ({
      x: x(point.round),
      key: point.round,
      lines: [
        [`round ${point.round}, step ${point.step}`],
        ...CURVES.filter(({ field }) => point[field] !== null).toReversed().map(({ field, mark, words }) => [`${loss(point[field])} ${words}`, mark]),
        ...FIGURES.filter(([field]) => known(point[field])).map(([field, words]) => [words(point[field])]),
      ],
    }));
    return { height, content, stops };
  });
  chart.rounds = Infinity; // how many of the last rounds are shown
  return chart;
};

const SHOWN_ROUNDS = (width) => Math.max(6, Math.min(24, Math.round(width / 45)));

const seen = (pieces, width) => {
  const phases = pieces.filter((piece) => piece.kind === "phase");
  const from = phases.at(-SHOWN_ROUNDS(width))?.began ?? Math.min(...pieces.map((piece) => piece.began));
  return [from, pieces.filter((piece) => piece.ended > from)];
};

const linesOf = (piece, nameOf) => {
  const lasted = span(piece.ended - piece.began);
  const partner = piece.partner ? ` with ${nameOf(piece.partner)}` : "";
  switch (piece.kind) {
    case "phase": return [[`round ${piece.round}: inner phase`], [lasted]];
    case "swap": return [[`round ${piece.round}: swap${partner}`, "swap"], [`${lasted}, sent ${size(piece.sent)}, received ${size(piece.received)}`]];
    case "taken_back": return [[`round ${piece.round}: correction taken back`, "back"], [`${nameOf(piece.partner)}'s had made the model worse`]];
    default: return [[`round ${piece.round}: solo`, "solo"], [`${plain(piece.reason)}${partner}`]];
  }
};

export const timeline = (at, picture) =>
  new Chart(at, "timeline of the last rounds; the arrow keys walk through it", (width) => {
    const height = 168;
    if (!picture.pieces.length) return nothing("the first round is not over yet", width, height);
    const [from, pieces] = seen(picture.pieces, width);
    const to = Math.max(picture.now(), ...pieces.map((piece) => piece.ended));
    const box = { left: width < 500 ? 8 : 72, right: width - 8 };
    const x = (time) => box.left + ((Math.max(time, from) - from) / Math.max(to - from, 1e-3)) * (box.right - box.left);
    const lanes = { phase: 30, swap: 74, solo: 114 };
    const content = [];
    for (const [kind, words] of [["phase", "training"], ["swap", "swap"], ["solo", "solo"]]) {
      content.push(width < 500 ? text(words, box.left, lanes[kind] - 18, { class: "label" }) : text(words, 0, lanes[kind] + 4, { class: "label" }));
      content.push(line(box.left, lanes[kind] + 13, box.right, lanes[kind] + 13, "grid"));
    }
    const phases = pieces.filter((piece) => piece.kind === "phase");
    for (const piece of phases) {
      const [left, right] = [x(piece.began), x(piece.ended)];
      content.push(drawn("rect", { x: left, y: lanes.phase - 11, width: Math.max(1, right - left - 2), height: 22, rx: 4, class: "phase" }));
      if (right - left > 8 + 8 * String(piece.round).length) content.push(text(piece.round, (left + right) / 2 - 1, lanes.phase + 4, { "text-anchor": "middle", class: "inside" }));
    }
    if (picture.status?.state === "training" && phases.length && picture.alive()) {
      const left = x(phases.at(-1).ended);
      content.push(drawn("rect", { x: left, y: lanes.phase - 11, width: Math.max(1, x(to) - left), height: 22, rx: 4, class: "phase open" }));
    }
    const swaps = pieces.filter((piece) => piece.kind === "swap");
    swaps.forEach((piece, number) => {
      const left = x(piece.began);
      const end = Math.max(left + 4, x(piece.ended));
      content.push(drawn("rect", { x: left, y: lanes.swap - 11, width: end - left, height: 22, rx: 2, class: "swap" }));
      const room = (swaps[number + 1] ? x(swaps[number + 1].began) : box.right) - end - 8;
      const name = picture.nameOf(piece.partner);
      if (name.length * 6.6 < room) content.push(text(name, end + 5, lanes.swap + 4, {}));
    });
    const solos = pieces.filter((piece) => ["solo", "taken_back"].includes(piece.kind));
    solos.forEach((piece, number) => {
      const left = x(piece.ended);
      content.push(drawn("path", { d: `M${left} ${lanes.solo - 7}l7 7-7 7-7-7z`, class: piece.kind === "solo" ? "solo" : "back" }));
      const room = (solos[number + 1] ? x(solos[number + 1].ended) - 8 : box.right) - left - 16;
      if (plain(piece.reason).length * 6.6 < room) content.push(text(plain(piece.reason), left + 12, lanes.solo + 4, {}));
    });
    for (const ago of ticks(0, to - from, Math.min(8, width / 110)).filter((ago) => ago < 0.97 * (to - from))) {
      content.push(text(ago === 0 ? "now" : `${span(ago).replace(".0 s", " s")} ago`, x(to - ago), height - 6, { "text-anchor": ago === 0 ? "end" : "middle" }));
    }
    const stops = pieces
      .map((piece) => ({ x: piece.kind === "phase" ? (x(piece.began) + x(piece.ended)) / 2 : x(piece.ended), key: `${piece.kind}${piece.round}/${piece.ended}`, y: 0, lines: linesOf(piece, picture.nameOf) }))
      .sort((one, other) => one.x - other.x);
    return { height, content, stops };
  });

export const rates = (at, picture) =>
  new Chart(at, "bytes sent and received per second; the arrow keys walk through it", (width) => {
    const height = 168;
    const samples = picture.rates;
    if (samples.length < 2) return nothing("nothing has been measured yet", width, height);
    const box = { left: 4, right: width - 4, top: 14, bottom: height - 26 };
    const middle = (box.top + box.bottom) / 2;
    const high = Math.max(1000, ...samples.flatMap((one) => [one.sent_per_s, one.received_per_s]));
    const [from, to] = [samples[0].at, samples.at(-1).at];
    const x = (time) => box.left + ((time - from) / (to - from)) * (box.right - box.left);
    const y = (value, sign) => middle - sign * (Math.max(0, value) / high) * (middle - box.top);
    const area = (field, sign) => `M${x(from)} ${middle}${samples.map((one) => `L${x(one.at).toFixed(1)} ${y(one[field], sign).toFixed(1)}`).join("")}L${x(to)} ${middle}z`;
    const content = [
      drawn("path", { d: area("sent_per_s", 1), class: "sent" }),
      drawn("path", { d: area("received_per_s", -1), class: "received" }),
      line(box.left, middle, box.right, middle, "axis"),
      text(`${size(high)}/s`, box.left, box.top - 2, {}),
      text(`${span(to - from)} ago`, box.left, height - 6, {}),
      text("now", box.right, height - 6, { "text-anchor": "end" }),
    ];
    const stops = samples.map((one) => ({
      x: x(one.at), key: one.at,
      lines: [[clock(one.at)], [`${size(one.sent_per_s)}/s sent`, "sent"], [`${size(one.received_per_s)}/s received`, "received"]],
    }));
    return { height, content, stops };
  });
