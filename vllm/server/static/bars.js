// The labels' probabilities at one position, as a table with bars.

import { byId, el } from "./dom.js";
import { count, log, percent, visible } from "./format.js";

export const colour = (index) => `c${index % 8}`;

export class Bars {
  #body = byId("bars");
  #rows = [];
  #key = "";

  draw(answer, position, ofAll) {
    this.#prepare(answer.labels);
    const shares = answer.shares(position, ofAll);
    const best = Math.max(...shares);
    answer.labels.forEach(({ token_id: id }, i) => {
      const reading = answer.readings[position]?.ids[id];
      const row = this.#rows[i];
      const share = shares[i] ?? 0;
      setMeter(row.track, share, percent(shares[i]));
      row.node.classList.toggle("best", reading !== undefined && shares[i] === best);
      row.probability.textContent = percent(shares[i]);
      row.logprob.textContent = reading ? log(reading.logprob) : "–";
      row.logit.textContent = reading ? log(reading.logit) : "–";
      row.rank.textContent = reading ? count(reading.rank) : "–";
    });
    const mass = answer.readings[position]?.mass ?? null;
    setMeter(byId("mass"), mass ?? 0, percent(mass));
    byId("mass-value").textContent = percent(mass);
    byId("bars-caption").textContent = `Probabilities of the labels at position ${position + 1}`;
  }

  /** Makes rows for the labels, unless they are there: bars glide from one position to the next. */
  #prepare(labels) {
    const key = JSON.stringify(labels);
    if (key === this.#key) return;
    this.#key = key;
    this.#rows = labels.map(({ label, token_id: id }, i) => makeRow(label, id, i));
    this.#body.replaceChildren(...this.#rows.map((row) => row.node));
  }
}

function makeRow(label, id, index) {
  const cell = (kind) => el("td", { class: kind });
  const name = visible(label);
  const track = emptyMeter(`Probability of ${name}`);
  const row = {
    track,
    probability: cell("num strong"),
    logprob: cell("num"),
    logit: cell("num wide"),
    rank: cell("num"),
  };
  row.node = el(
    "tr",
    { class: colour(index), "data-token-id": id },
    el("th", { scope: "row", title: `token ${id}` }, el("i", { class: "swatch" }), name),
    el("td", { class: "bar" }, track),
    row.probability,
    row.logprob,
    row.logit,
    row.rank,
  );
  return row;
}

/** Draws a track of role meter, and says its value. */
export function setMeter(track, value, text) {
  track.setAttribute("aria-valuenow", value);
  track.setAttribute("aria-valuetext", text);
  track.firstElementChild.style.width = `${100 * value}%`;
}

/** A track with the bar of a probability; null: it has none. */
export function meter(value, label) {
  const track = emptyMeter(label);
  setMeter(track, value ?? 0, percent(value));
  return track;
}

function emptyMeter(label) {
  const attributes = { class: "track", role: "meter", "aria-valuemin": 0, "aria-valuemax": 1, "aria-label": label };
  return el("span", attributes, el("span", { class: "fill" }));
}
