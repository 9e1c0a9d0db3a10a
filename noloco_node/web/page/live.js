// The picture of the node, kept up to date by its events. When the node is gone the picture stays, and asking goes on.

const RETRY_MS = 2000;
const SILENT_MS = 25000; // a node that is there says something every ten seconds

const SERIES = ["points", "pieces", "rates", "meetings", "said"];

export class Picture {
  constructor(changed) {
    this.changed = changed;
    this.answers = null; // not known yet
    this.since = null; // when it last said something
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
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onopen = () => this.heard();
    this.source.onerror = () => this.lost();
    this.heard();
  }

  heard() {
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

  take(told) {
    const changed = [...Object.keys(told), "answers", ...(this.fresh ? SERIES : [])];
    if (this.fresh) this.clear(); // the first event of a connection begins from nothing
    this.fresh = false;
    this.heard();
    this.answers = true;
    this.since = Date.now() / 1000;
    if (told.status) [this.status, this.statusAt] = [told.status, this.since];
    if (told.peers) this.peers = told.peers;
    Object.assign(this.names, told.names);
    for (const series of SERIES) {
      if (told[series]) {
        const { gone, stay, then } = told[series];
        this[series] = [...this[series].slice(gone, gone + stay), ...then];
      }
    }
    this.changed(changed);
  }

  alive = () => this.answers === true;
  // The last moment that this picture is of: it stands still when the node is gone.
  now = () => (this.answers === false && this.since ? this.since : Date.now() / 1000);
  nameOf = (peer) => (peer === this.status?.peer_id ? this.status.name : null) ?? this.names[peer] ?? this.peers?.peers.find((row) => row.peer_id === peer)?.name ?? `${peer.slice(-6)}`;
}
