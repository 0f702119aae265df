// Numbers and token texts as people read them.

const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };

/** The text with its white space and control characters made visible. */
export function visible(text) {
  return text.replace(/[ \n\r\t\u00a0]|[\p{Cc}\p{Cs}\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu, (sign) => {
    return SIGNS[sign] ?? `‹${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
  });
}

export function percent(p) {
  if (p === null || p === undefined) return "–";
  if (p === 0) return "0 %";
  return `${p < 0.0001 ? (100 * p).toPrecision(2) : (100 * p).toFixed(2)} %`;
}

/** A logprob or a logit; one that has no value belongs to a token made impossible. */
export function log(value) {
  return value === null || value === undefined ? "–∞" : value.toFixed(3).replace("-", "−");
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
