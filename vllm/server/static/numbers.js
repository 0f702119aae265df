// The labels' probabilities at all positions, as a table of numbers.

import { byId, el } from "./dom.js";
import { percent, visible } from "./format.js";

export class Numbers {
  #head = byId("numbers-head");
  #body = byId("numbers-body");
  #answer = null;
  #ofAll = false;

  /** Appends what is new; begins anew for another answer, or another kind of share. */
  draw(answer, ofAll) {
    if (answer !== this.#answer || ofAll !== this.#ofAll) {
      this.#answer = answer;
      this.#ofAll = ofAll;
      const names = answer.labels.map(({ label }) => el("th", { scope: "col", class: "num" }, visible(label)));
      const mass = el("th", { scope: "col", class: "num" }, "mass");
      const position = el("th", { scope: "col", class: "num" }, "#");
      this.#head.replaceChildren(el("tr", {}, position, el("th", { scope: "col" }, "Token"), ...names, mass));
      this.#body.replaceChildren();
    }
    const shown = this.#body.children.length;
    this.#body.append(...answer.readings.slice(shown).map((_, i) => row(answer, shown + i, ofAll)));
  }
}

function row(answer, position, ofAll) {
  return el(
    "tr",
    {},
    el("th", { scope: "row", class: "num" }, String(position + 1)),
    el("td", {}, visible(answer.tokens[position]?.name ?? "–")),
    ...answer.shares(position, ofAll).map((share) => el("td", { class: "num" }, percent(share))),
    el("td", { class: "num" }, percent(answer.readings[position].mass)),
  );
}
