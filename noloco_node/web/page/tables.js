// Tables of peers, of runs, and of who swapped with whom. The head and the sort order stay when rows change.

import { element, refill } from "./dom.js";
import { NOTHING, count, loss, plain, rate, shortId, size, span } from "./words.js";

export class Table {
  // A column: { title, hint for the pointer, of(row) for sorting, show(row) text or element, words: true for text, which
  // is aligned left }.
  constructor(at, columns, sortedBy, down = false) {
    Object.assign(this, { columns, sortedBy, down, rows: [], first: () => false });
    this.heads = columns.map((column, number) =>
      element("th", { scope: "col", class: column.words ? null : "number" },
        element("button", { type: "button", title: column.hint ?? null, onclick: () => this.sort(number) }, column.title)));
    this.body = element("tbody");
    at.replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...this.heads)), this.body));
  }

  sort(number) {
    this.down = number === this.sortedBy ? !this.down : !this.columns[number].words;
    this.sortedBy = number;
    this.show(this.rows, this.first);
  }

  show(rows, first = () => false) {
    Object.assign(this, { rows, first });
    this.heads.forEach((head, number) => {
      head.hidden = this.columns[number].when?.(rows) === false;
      if (number === this.sortedBy) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const shown = this.columns.filter((_, number) => !this.heads[number].hidden);
    const { of } = this.columns[this.sortedBy];
    const ordered = [...rows].sort((one, other) => first(other) - first(one) || (this.down ? -1 : 1) * compare(of(one), of(other)));
    refill(this.body, ...ordered.map((row) =>
      element("tr", { class: first(row) ? "self" : null }, ...shown.map((column, number) =>
        element(number ? "td" : "th", { scope: number ? null : "row", class: column.words ? null : "number" }, column.show(row))))));
  }
}

const compare = (one, other) => {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  return one < other ? -1 : 1;
};

const state = (row) => element("span", { class: "dotted", "data-state": row.state }, plain(row.state));

// `heard`: when the rows came.
export const peersTable = (at, now, heard) => new Table(at, [
  { title: "name", words: true, of: (row) => row.name, show: (row) => element("span", { title: row.peer_id }, row.name) },
  { title: "run", words: true, of: (row) => row.run, show: (row) => row.run ?? NOTHING, when: (rows) => rows.some((row) => row.run) },
  { title: "stage", of: (row) => row.stage, show: (row) => (row.stage ? String(row.stage) : NOTHING), when: (rows) => rows.some((row) => row.stage) },
  { title: "state", words: true, of: (row) => row.state, show: state },
  { title: "quarantined", words: true, of: (row) => row.quarantined_s ?? 0, show: (row) => quarantine(row, now, heard), when: some("quarantined_s") },
  { title: "taken back", of: (row) => row.taken_back, show: counted("taken_back"), when: some("taken_back") },
  { title: "refused", of: (row) => row.refused, show: counted("refused"), when: some("refused") },
  { title: "failed", of: (row) => row.failed, show: counted("failed"), when: some("failed") },
  { title: "round", of: (row) => (gone(row) ? null : row.round), show: (row) => (gone(row) ? NOTHING : String(row.round)) },
  { title: "lag", hint: "rounds behind this node when that peer was last seen, as its round", of: (row) => (gone(row) ? null : row.lag), show: (row) => (row.self || gone(row) ? NOTHING : String(row.lag)) },
  { title: "loss", of: (row) => row.loss, show: (row) => loss(row.loss) },
  { title: "held-out", of: (row) => row.eval_loss, show: (row) => loss(row.eval_loss) },
  { title: "tokens/s", of: (row) => row.tokens_per_s, show: (row) => rate(row.tokens_per_s) },
  { title: "together", of: (row) => row.exchanges, show: (row) => (row.self ? NOTHING : String(row.exchanges)) },
  { title: "sent", of: (row) => row.sent, show: (row) => size(row.sent) },
  { title: "received", of: (row) => row.received, show: (row) => size(row.received) },
  { title: "path", words: true, of: (row) => row.via, show: (row) => row.via ?? NOTHING },
  { title: "last seen", of: (row) => row.last_seen_s, show: (row) => (row.self ? "this node" : ago(row, now, heard)) },
], 0);

const gone = (row) => row.state === "gone";
// Of this node's own experience with its peers: there only where a figure is not 0.
const some = (field) => (rows) => rows.some((row) => !row.self && row[field] > 0);
const counted = (field) => (row) => (row.self ? NOTHING : String(row[field]));

const ago = (row, now, heard) => {
  if (row.last_seen_s === null) return NOTHING;
  const since = heard() - row.last_seen_s;
  return element("span", { "data-since": since }, `${span(now() - since)} ago`);
};

const quarantine = (row, now, heard) => {
  if (row.self || !(row.quarantined_s > 0)) return NOTHING;
  const until = heard() + row.quarantined_s;
  return element("span", {}, element("span", { "data-until": until }, span(until - now())), row.quarantined_why ? `, ${plain(row.quarantined_why)}` : "");
};

export const runsTable = (at) => new Table(at, [
  { title: "run", words: true, of: (row) => row.run, show: (row) => element("span", { title: row.run_id }, row.run) },
  { title: "peers", of: (row) => row.peers, show: (row) => String(row.peers) },
  { title: "training", of: (row) => row.training, show: (row) => String(row.training) },
  { title: "round", of: (row) => row.round, show: (row) => `${row.round} of ${row.rounds}` },
  { title: "author", words: true, of: (row) => row.author, show: (row) => element("span", { title: row.author }, shortId(row.author)) },
], 0);

const MOST_NAMES = 40; // a larger table is not readable

// A square table: the number of rounds as a colour and, where there is room, as a number.
export const meetingsTable = (at, meetings, nameOf, me) => {
  if (!meetings.length) {
    at.replaceChildren(element("p", { class: "quiet" }, "no round together yet"));
    return "";
  }
  const rounds = new Map();
  const total = new Map([[me, Infinity]]);
  for (const { peer, partner, rounds: together } of meetings) {
    const pair = [peer, partner].sort().join("|");
    rounds.set(pair, Math.max(together, rounds.get(pair) ?? 0)); // either of the two may have reported it
    for (const one of [peer, partner]) total.set(one, (total.get(one) ?? 0) + together);
  }
  const all = [...total.keys()];
  const shown = all.sort((one, other) => total.get(other) - total.get(one)).slice(0, MOST_NAMES);
  shown.sort((one, other) => (other === me) - (one === me) || nameOf(one).localeCompare(nameOf(other)));
  const most = Math.max(1, ...rounds.values());
  const cell = (row, column) => {
    if (row === column) return element("td", { class: "same" });
    const together = rounds.get([row, column].sort().join("|")) ?? 0;
    const words = `${nameOf(row)} and ${nameOf(column)}: ${count(together, "round")} together`;
    return element("td", { class: `met m${Math.ceil((5 * together) / most)}`, title: words }, together ? String(together) : "");
  };
  at.replaceChildren(element("table", { class: "matrix" },
    element("thead", {}, element("tr", {}, element("td"), ...shown.map((peer) => element("th", { scope: "col" }, element("span", {}, nameOf(peer)))))),
    element("tbody", {}, ...shown.map((row) => element("tr", { class: row === me ? "self" : null }, element("th", { scope: "row" }, nameOf(row)), ...shown.map((column) => cell(row, column)))))));
  return shown.length < all.length ? `the ${shown.length} of ${all.length} with most rounds` : "";
};
