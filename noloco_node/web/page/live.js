// The node's state, kept up to date by its events. When the node is gone the last state stays, and the page reconnects.

const RETRY_MS = 2000;
const SILENT_MS = 25000; // a live node sends an event at least every ten seconds

const SERIES = ["points", "pieces", "rates", "meetings", "said"];

export class Picture {
  constructor(changed) {
    this.changed = changed;
    this.answers = null; // not known yet
    this.since = null; // when the last event came
    this.clear();
    this.listen();
  }

  clear() {
    Object.assign(this, { status: null, peers: null, names: {} });
    for (const series of SERIES) this[series] = [];
  }

  listen() {
    this.fresh = true;
    this.source = new EventSource("/api/live");
    this.source.onmessage = (event) => this.apply(JSON.parse(event.data));
    this.source.onopen = () => this.restartTimer();
    this.source.onerror = () => this.lost();
    this.restartTimer();
  }

  restartTimer() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.lost(), SILENT_MS);
  }

  lost() {
    clearTimeout(this.silence);
    this.source.close();
    setTimeout(() => this.listen(), RETRY_MS);
    if (this.answers === false) return;
    this.answers = false;
    this.changed(["answers"]);
  }

  apply(event) {
    const changed = [...Object.keys(event), "answers", ...(this.fresh ? SERIES : [])];
    if (this.fresh) this.clear(); // the first event of a connection starts from an empty state
    this.fresh = false;
    this.restartTimer();
    this.answers = true;
    this.since = Date.now() / 1000;
    if (event.status) [this.status, this.statusAt] = [event.status, this.since];
    if (event.peers) [this.peers, this.peersAt] = [event.peers, this.since];
    Object.assign(this.names, event.names);
    for (const series of SERIES) {
      if (event[series]) {
        const { gone, stay, then } = event[series];
        this[series] = [...this[series].slice(gone, gone + stay), ...then];
      }
    }
    this.changed(changed);
  }

  alive = () => this.answers === true;
  // The time of the state shown: it stops when the node is gone.
  now = () => (this.answers === false && this.since ? this.since : Date.now() / 1000);
  nameOf = (peer) => (peer === this.status?.peer_id ? this.status.name : null) ?? this.names[peer] ?? this.peers?.peers.find((row) => row.peer_id === peer)?.name ?? `${peer.slice(-6)}`;
}
