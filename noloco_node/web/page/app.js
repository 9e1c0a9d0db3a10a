// The page of one node: puts words and numbers in their places whenever the picture changes.

import { CURVES, lossChart, rates, timeline } from "./charts.js";
import { $, element, legend, refill, say } from "./dom.js";
import { Picture } from "./live.js";
import { meetingsTable, peersTable, runsTable } from "./tables.js";
import { NOTHING, clock, count, left, loss, plain, rate, share, size, small, span, whole } from "./words.js";

const REACHABLE = {
  directly: "reachable directly",
  mapped: "reachable at a port of the router",
  relayed: "reachable through a relay",
  outgoing: "not reachable, only outgoing connections",
};

const here = (peers) => (peers?.peers ?? []).filter((row) => row.state !== "gone"); // else only its quarantine is left

// ---- the first lines ----

// A node that does not answer has done its part of the run, has left, or nobody knows.
const isOver = (status) => status.state === "finished" || (status.rounds_target !== null && status.round >= status.rounds_target);
const lastState = (status) => (isOver(status) ? "finished" : status.state === "leaving" ? "left" : "gone");

const showHead = ({ status, answers, points }) => {
  say($("#name"), status.name);
  say($("#run"), status.run ? `in ${status.run}${status.amended ? `, ${status.amended}` : ""}` : status.state === "rendezvous" ? "helps nodes find each other" : "no run yet");
  const state = answers ? status.state : lastState(status);
  say($("#state"), state);
  $("#state").dataset.state = state;
  const beginning = ["starting", "joining"].includes(status.state) && !points.length;
  document.body.dataset.kind = status.state === "rendezvous" ? "rendezvous" : beginning ? "beginning" : "trainer";
  const bits = [state, status.round && `round ${status.round}`, status.loss !== null && `loss ${loss(status.loss)}`];
  document.title = `${bits.filter(Boolean).join(" · ")} – ${status.name}`;
  showProgress($("#progress"), status.round, status.rounds_target);
};

const showProgress = (bar, done, target) => {
  bar.hidden = !target;
  if (bar.hidden) return;
  bar.firstElementChild.style.width = share(Math.min(1, done / target), 1);
  for (const [name, value] of [["min", 0], ["max", target], ["now", done]]) bar.setAttribute(`aria-value${name}`, value);
};

let refused = ""; // why the node did not do what a button asked for

const showBanner = ({ status, answers, since }) => {
  const banner = $("#banner");
  const state = status ? lastState(status) : "gone";
  const gone = answers === false && state !== "finished"; // else the note says so
  banner.hidden = !gone && !refused;
  if (banner.hidden) return;
  banner.dataset.state = state;
  const what = state === "left" ? "This node left at" : "The node does not answer since";
  const last = status // else the server may have refused: a page does not hear why
    ? `${what} ${clock(since)}. This page shows its last state. It continues by itself when the node is back.`
    : "The node does not answer, or too many pages of it are open: close another one. This one begins by itself then.";
  say(banner, gone ? last : refused);
};

// Of a download that the node waits for: it says so in words, like `state from calm-otter, 46% of 12.6 MB, 12 s left`.
const downloaded = ({ waiting_for: words }) => /, (\d+)%/.exec(words ?? "")?.[1];
const waits = (status, otherwise) => (status.waiting_for ? `It waits for ${status.waiting_for}.` : otherwise);

// When it is shown, its title, its words, and a line to copy.
const NOTES = [
  [({ status, answers }) => status.state === "finished" || (!answers && isOver(status)), "Finished", ({ status, answers, since }) =>
    [`Round ${whole(status.round)}, the last one, is done`, status.eval_loss === null ? "" : `: held-out loss ${loss(status.eval_loss_first)} → ${loss(status.eval_loss)}`,
      answers ? "." : `. The node has ended; this page shows its last state, of ${clock(since)}.`, " This command writes the model as a Hugging Face folder (with --home, if the node was given one):"].join(""), () => "noloco-node export --to my-model"],
  [({ answers }) => !answers],
  [({ status }) => status.state === "rendezvous", "A rendezvous", () => "This node does not train: it helps others find each other. Join a run that it knows with this line:", ({ status }) => status.join],
  [({ status }) => status.state === "starting", "Starting", ({ status }) => waits(status, "It is about to join its run.")],
  [({ status }) => status.state === "joining", "Joining", ({ status }) => `It takes the weights of a peer that trains. ${waits(status, "")}`],
  [({ status }) => status.state === "paused", "Paused", ({ status }) => `No training and no swaps. ${waits(status, "It waits for `noloco-node resume`.")}`],
  [({ status }) => status.state === "leaving", "Leaving", ({ status }) => `It finishes its swap, saves, and announces that it leaves. ${waits(status, "")}`],
  [({ status, peers }) => status.state === "training" && !here(peers).length, "No other node yet", () => "Until one joins, this node trains alone. Others join with this line:", ({ status }) => status.join],
];

const showNote = (picture) => {
  const [, title, words, line] = NOTES.find(([when]) => when(picture)) ?? [];
  const note = $("#note");
  note.hidden = !title;
  if (!title) return;
  say($("h2", note), title);
  say($("p", note), words(picture));
  const part = downloaded(picture.status);
  showProgress($(".progress", note), Number(part), part && 100);
  const copied = line?.(picture) ?? "";
  $(".copy", note).hidden = !copied;
  say($("code", note), copied);
};

const copyLine = async (event) => {
  const code = $("#note code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    say(event.target, "Copied");
    setTimeout(() => say(event.target, "Copy"), 2000);
  } catch {
    getSelection().selectAllChildren(code); // copying is not allowed here: at least select it
  }
};

const showHealth = ({ status }) => {
  const found = [...status.health];
  if (status.last_error) found.push({ level: "warning", text: `last error: ${status.last_error}`, remedy: "" });
  const at = $("#health");
  at.hidden = !found.length;
  refill(at, ...found.map(({ level, text, remedy }) =>
    element("p", { class: level }, element("strong", {}, `${level}: `), text, remedy ? `. ${remedy[0].toUpperCase()}${remedy.slice(1)}.` : "")));
};

// ---- figures ----

const figures = (status, peers) => {
  const { committed, solo } = status.rounds;
  const { device, device_limit, host, host_limit } = status.memory;
  const { busy_fraction_minute: minute, gpu: { watts, utilization } } = status;
  const quarantined = status.peers_quarantined ? `${status.peers_quarantined} quarantined` : "";
  const reasons = Object.entries(status.rounds.by_reason).sort(([, one], [, other]) => other - one);
  const trained = status.loss === null && status.phase ? status.phase : status;
  const still = left(status.phase);
  const learned = status.loss_first === null || status.loss === null ? "" : `from ${loss(status.loss_first)}`;
  const of = (limit, words) => (limit ? `of ${words(limit)}` : "");
  const onHost = [host && `this machine ${size(host)}`, of(host_limit, size)].filter(Boolean).join(" ");
  return [
    ["Loss", loss(trained.loss), learned],
    ["Held-out loss", loss(status.eval_loss), status.eval_loss_first === null ? "" : `from ${loss(status.eval_loss_first)}`],
    ["Step", whole(status.step), [of(status.steps_target, whole), `round ${[whole(status.round), of(status.rounds_target, whole)].join(" ")}`].filter(Boolean).join(", ")],
    ["Time left", status.left_s === 0 ? "none" : span(status.left_s), still && `of this phase: ${still}`],
    ["Tokens per second", rate(trained.tokens_per_s), [`${rate(status.tokens)} so far`, status.mfu !== null && `MFU ${share(status.mfu)}`].filter(Boolean).join(", ")],
    ["Learning rate", small(status.learning_rate), "of the last step"],
    ["Gradient norm", status.gradient_norm === null ? NOTHING : status.gradient_norm.toFixed(2), "before clipping"],
    ["Memory", size(device ?? host), device === null ? of(host_limit, size) : [of(device_limit, size), onHost].filter(Boolean).join("; ")],
    ["Busy", share(status.busy_fraction, 1), [minute !== null && minute !== status.busy_fraction && `${share(minute)} in the last minute`, utilization !== null && `GPU ${share(utilization)} utilised`, watts !== null && `${watts.toFixed(0)} W`].filter(Boolean).join(", ")],
    ["With a partner", whole(committed), solo ? `${solo} solo: ${reasons.map(([reason]) => plain(reason)).join(", ")}` : committed ? "none solo" : ""],
    ["Sent", size(status.bytes.sent), `received ${size(status.bytes.received)}${status.bytes.per_param_round === null ? "" : `, ${status.bytes.per_param_round.toFixed(2)} B per parameter`}`],
    ...(status.stage ? stageFigures(status.stage) : []),
    ["Peers", String(peers ? here(peers).length : status.peers_seen), [REACHABLE[status.reachable], quarantined].filter(Boolean).join(", ")],
  ];
};

// The first stage has micro-batches under way, the last one has some queued, one between them both.
const stageFigures = (stage) => {
  const under_way = stage.most_under_way ? `${stage.under_way} of ${stage.most_under_way} under way` : stage.number < stage.stages && `${stage.under_way} under way`;
  const bits = [under_way, stage.number > 1 && `${stage.queued} queued`, stage.lost > 0 && `${whole(stage.lost)} lost`];
  return [
    ["Stage", `${stage.number} of ${stage.stages}`, `nodes at each: ${stage.nodes.join(", ")}`],
    ["Micro-batches a second", stage.micro_batches_per_s === null ? NOTHING : stage.micro_batches_per_s.toFixed(1), bits.filter(Boolean).join(", ")],
    ["Activations sent", size(stage.sent), `received ${size(stage.received)}`],
  ];
};

const showFigures = ({ status, peers }) =>
  refill($("#figures"), ...figures(status, peers).map(([title, value, more]) =>
    element("div", {}, element("dt", {}, title), element("dd", {}, value), element("dd", { class: "quiet" }, more))));

const ACCOUNTS = { step: "training steps", data: "reading data", boundary: "boundaries", apply: "corrections", evaluate: "evaluation", sample: "sample text", checkpoint: "checkpoints", waiting: "waiting", other: "the rest" };

const WORTH_SHOWING = 0.0005; // a tenth of a per cent, rounded

const showTime = ({ status }) => {
  const called = (account) => (status.stage && account === "data" ? "waiting for other stages" : (ACCOUNTS[account] ?? account));
  const spent = Object.entries(status.time_s).filter(([account]) => account !== "paused");
  const total = spent.reduce((sum, [, seconds]) => sum + seconds, 0);
  const all = spent.map(([account, seconds]) => [account, seconds / (total || 1)]);
  const parts = all.filter(([, part]) => part >= WORTH_SHOWING).sort(([, one], [, other]) => other - one);
  const words = parts.map(([account, part]) => [`part ${account}`, element("span", {}, called(account)), element("b", {}, share(part, 1))]);
  const stack = $("#time .stack");
  stack.setAttribute("aria-label", parts.map(([account, part]) => `${called(account)} ${share(part, 1)}`).join(", ") || "nothing yet");
  stack.replaceChildren(...parts.map(([account, part]) => {
    const made = element("div", { class: `part ${account}` });
    made.style.flexGrow = part;
    return made;
  }));
  legend($("#time .legend"), words);
  const bits = [status.stall_ms !== null && `the last round cost ${status.stall_ms.toFixed(0)} ms of training`, status.time_s.paused && `paused for ${span(status.time_s.paused)}`];
  say($("#time .quiet"), total ? bits.filter(Boolean).join(", ") : "training has not begun");
};

const showSample = ({ status }) => {
  const { sample } = status;
  $("#sample").hidden = !sample;
  if (!sample) return;
  say($("#sample .quiet"), `after round ${whole(sample.round)}`);
  say($("#sample b"), sample.prompt);
  say($("#sample span"), sample.text);
};

const showAbout = ({ status, nameOf }) => {
  const { last_round: last, last_taken_back: back } = status;
  const kept = status.checkpoint;
  const rows = [
    ["peer id", status.peer_id],
    ["up for", span(status.uptime_s)],
    ["reachable", REACHABLE[status.reachable] ?? "not known yet"],
    ["trains on", status.device && `${status.device}${status.parameters ? `, ${rate(status.parameters)} parameters` : ""}`],
    ["last swap", last && `with ${nameOf(last.partner)}: ${span(last.seconds)}, sent ${size(last.sent)}, received ${size(last.received)}, ${share(last.resent_block_fraction, 1)} of blocks resent`],
    ["taken back", back && `${count(status.taken_back, "correction")}, the last that of ${nameOf(back.partner)} in round ${back.round}: held-out loss ${loss(back.loss_with)} with it, ${loss(back.loss_without)} without`],
    ["checkpoint", kept && `${size(kept.bytes)}, ${kept.saved_round === null ? "none saved yet" : `saved at round ${kept.saved_round}`}, ${size(kept.free_bytes)} left on the disk`],
    ["today", status.today && `sent ${of(status.today.sent, status.today.sent_limit)}, received ${of(status.today.received, status.today.received_limit)}`],
    ["others join with", status.join],
    ["version", status.version],
  ];
  refill($("#about dl"), ...rows.filter(([, value]) => value).flatMap(([title, value]) => [element("dt", {}, title), element("dd", {}, value)]));
};

const of = (used, limit) => size(used) + (limit === null ? "" : ` of ${size(limit)}`);

// ---- rows ----

const showPeers = ({ status, peers }) => {
  const trains = status.state !== "rendezvous";
  const self = { ...status, self: true, lag: null, last_seen_s: null, via: null, exchanges: status.rounds.committed, sent: status.bytes.sent, received: status.bytes.received, run: null, stage: status.stage?.number ?? 0 };
  say($("#peers .quiet"), count(here(peers).length, "other", "others"));
  tables.peers.show([...(trains ? [self] : []), ...peers.peers], (row) => row.self === true);
  const runs = status.runs.length ? status.runs : peers.runs;
  $("#runs").hidden = trains && !runs.length;
  tables.runs.show(runs);
};

const showMeetings = (picture) =>
  say($("#meetings .quiet"), meetingsTable($("#meetings .scroll"), picture.meetings, picture.nameOf, picture.status.peer_id));

// The log's end stays in sight until somebody scrolls away from it. A new size scrolls too, and that is nobody's wish.
const end = { inSight: true, size: "" };
const sizeOf = ({ scrollHeight, clientHeight }) => `${scrollHeight} ${clientHeight}`;
const toEnd = () => {
  const at = $("#log ol");
  end.size = sizeOf(at);
  if (end.inSight) at.scrollTop = at.scrollHeight;
};
const scrolled = ({ target }) => {
  if (sizeOf(target) === end.size) end.inSight = target.scrollHeight - target.scrollTop - target.clientHeight < 24;
};

const showLog = ({ said }) => {
  refill($("#log ol"), ...said.map((line) => element("li", { class: line.level },
    element("time", {}, clock(line.at)), ...(line.level === "info" ? [] : [element("strong", {}, `${line.level} `)]), line.text)));
  toEnd();
};

const grow = () => {
  if (!picture.alive()) return;
  for (const cell of document.querySelectorAll("[data-since]")) say(cell, `${span(picture.now() - cell.dataset.since)} ago`);
  for (const cell of document.querySelectorAll("[data-until]")) say(cell, span(cell.dataset.until - picture.now()));
  charts.timeline.draw();
};

// ---- actions, which need the token ----

const token = (() => {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname); // it is a secret, and others may see the address bar
  }
  return given ?? sessionStorage.getItem("token");
})();

const act = async (what) => {
  const answer = await fetch(`/api/${what}`, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  refused = answer.ok ? "" : await answer.text();
  showBanner(picture);
};

const showActs = ({ status, answers }) => {
  const [pause, leave] = [$("#pause"), $("#leave")];
  $("#acts").hidden = !token || !answers || ["leaving", "finished"].includes(status.state);
  pause.hidden = !["training", "joining", "paused"].includes(status.state);
  say(pause, status.state === "paused" ? "Resume" : "Pause");
  pause.onclick = () => act(status.state === "paused" ? "resume" : "pause");
  leave.onclick = () => {
    if (leave.dataset.asked) return act("leave");
    leave.dataset.asked = "yes";
    say(leave, "Really leave?");
    return setTimeout(() => {
      delete leave.dataset.asked;
      say(leave, "Leave");
    }, 5000);
  };
};

// ---- together ----

const SHOWS = [
  [["status", "answers"], [showHead, showBanner, showActs]],
  [["status", "peers", "answers"], [showNote]],
  [["status", "peers"], [showFigures, showPeers]],
  [["status"], [showHealth, showTime, showSample, showAbout]],
  [["meetings", "names"], [showMeetings]],
  [["said"], [showLog]],
  [["points"], [() => charts.loss.draw(), () => showChoice()]],
  [["pieces", "status"], [() => charts.timeline.draw()]],
  [["rates"], [() => charts.rates.draw()]],
];

const LATEST = 100; // rounds, to show more than the first steep fall

const pending = new Set();
const show = () => {
  const changed = new Set(pending);
  pending.clear();
  if (!picture.status) {
    showBanner(picture);
    return;
  }
  document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
  for (const [parts, shows] of SHOWS) {
    if (parts.some((part) => changed.has(part))) for (const one of shows) one(picture);
  }
};

const picture = new Picture((changed) => {
  if (!pending.size) requestAnimationFrame(show); // a hidden page draws nothing
  for (const part of changed) pending.add(part);
});
const tables = { peers: peersTable($("#peers .scroll"), picture.now, () => picture.peersAt), runs: runsTable($("#runs .scroll")) };
const charts = {
  loss: lossChart($("#loss .chart"), picture),
  timeline: timeline($("#timeline .chart"), picture),
  rates: rates($("#network .chart"), picture),
};
const showChoice = () => {
  const choice = $("#loss .choice");
  choice.hidden = picture.points.length < 1.5 * LATEST;
  refill(choice, ...[[Infinity, "whole run"], [LATEST, `last ${LATEST} rounds`]].map(([rounds, words]) =>
    element("button", {
      type: "button",
      "aria-pressed": String(charts.loss.rounds === rounds),
      onclick: () => {
        charts.loss.rounds = rounds;
        charts.loss.draw();
        showChoice();
      },
    }, words)));
};
legend($("#loss .legend"), CURVES.toReversed().map(({ mark, words }) => [`line ${mark}`, words]));
legend($("#timeline .legend"), [["phase", "inner phase"], ["swap", "swap, committed"], ["solo", "solo, with its reason"]]);
legend($("#network .legend"), [["sent", "sent"], ["received", "received"]]);
$("#note .copy button").addEventListener("click", copyLine);
$("#log ol").addEventListener("scroll", scrolled);
new ResizeObserver(toEnd).observe($("#log ol"));
setInterval(grow, 1000);
