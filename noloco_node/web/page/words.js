// Numbers for people, written as in the terminal. A dash is a value that is not known yet.

export const NOTHING = "–";

export const known = (value) => value !== null && value !== undefined;

const scaled = (value, units, base = 1000) => {
  let at = 0;
  while (Math.round(value) >= base && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return [at === 0 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1), units[at]];
};

export const size = (bytes) => (known(bytes) ? scaled(bytes, ["B", "kB", "MB", "GB", "TB"]).join(" ") : NOTHING);
export const rate = (perSecond) => (known(perSecond) ? scaled(perSecond, ["", "k", "M", "G"]).join("") : NOTHING);
export const loss = (value) => (known(value) ? value.toFixed(3) : NOTHING);
export const small = (value) => (known(value) ? value && value.toExponential(2).replace("e+", "e") : NOTHING);
export const share = (part, digits = 0) => (known(part) ? `${(100 * part).toFixed(digits)}%` : NOTHING);
export const whole = (number) => (known(number) ? number.toLocaleString("en") : NOTHING);
export const count = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;
// Codes that do not say it themselves; base/reasons.py has the same.
const REASONS = {
  backing_off: "waiting to call again",
  partner_diverged: "partner says diverged",
  quarantined: "quarantined by a peer",
  all_quarantined: "all peers quarantined",
};
export const plain = (code) => REASONS[code] ?? (code ?? "").replaceAll("_", " ");
export const clock = (seconds) =>
  new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
export const shortId = (peer) => (peer.length <= 13 ? peer : `${peer.slice(0, 8)}…${peer.slice(-4)}`);

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

export const span = (seconds) => {
  if (!known(seconds)) return NOTHING;
  const thousandths = Math.round(1000 * Math.max(0, seconds));
  if (thousandths < 1000) return thousandths ? `${thousandths} ms` : "0 s";
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const at = UNITS.findIndex(([, unit]) => whole >= unit);
  const [large, largeS] = UNITS[at];
  const [small, smallS] = UNITS[at + 1] ?? ["", Infinity];
  const rest = Math.floor((whole % largeS) / smallS);
  return `${Math.floor(whole / largeS)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
};

const SHORTEST_SHOWN_S = 10;

// `46%, 1 min 10 s left`; empty for a phase of a few seconds.
export const left = (phase) =>
  !known(phase?.left_s) || phase.left_s < SHORTEST_SHOWN_S * (1 - phase.part) ? "" : `${share(phase.part)}, ${span(phase.left_s)} left`;
