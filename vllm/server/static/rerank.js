// Documents by how well they answer a query, as bars.

import { colour, setMeter } from "./bars.js";
import { byId, el } from "./dom.js";
import { count, plural } from "./format.js";

const SAMPLE = ["The bus stop is across the street.", "Bananas are yellow.", "Trains leave from platform two."];

/** The field of the documents, one a line. */
export class Documents {
  #field = byId("documents");

  constructor() {
    this.#field.value = SAMPLE.join("\n");
  }

  get value() {
    return this.#field.value.split("\n").filter((line) => line.trim() !== "");
  }
}

/** The results of one request; none: of nothing yet. */
export class Ranking {
  #body = byId("ranking");

  clear() {
    this.#body.replaceChildren();
    byId("ranking-usage").textContent = "";
  }

  draw(documents, { results, usage }) {
    // Scores are probabilities or cosines, and of some models larger numbers.
    const longest = Math.max(1, ...results.map((result) => result.relevance_score ?? 0));
    const rows = results.map((result, place) => row(documents[result.index], result, place, longest));
    const head = (name, kind) => el("th", { scope: "col", class: kind }, name);
    const bar = head(el("span", { class: "hidden" }, "Bar"));
    const header = el("tr", {}, head("Document"), bar, head("Score", "num"), head("Line", "num"));
    this.#body.replaceChildren(
      el("table", { class: "bars ranking" }, el("thead", {}, header), el("tbody", {}, ...rows)),
    );
    byId("ranking-usage").textContent = plural(usage.prompt_tokens, "prompt token");
  }
}

function row(text, { index, relevance_score: score }, place, longest) {
  const shown = score === null ? "–" : score.toFixed(4).replace("-", "−");
  const track = el(
    "span",
    { class: "track", role: "meter", "aria-valuemin": 0, "aria-valuemax": longest, "aria-label": `Score of ${text}` },
    el("span", { class: "fill" }),
  );
  setMeter(track, Math.max(score ?? 0, 0) / longest, shown);
  track.setAttribute("aria-valuenow", score ?? 0);
  return el(
    "tr",
    { class: `${colour(0)}${place === 0 ? " best" : ""}` },
    el("th", { scope: "row", title: text }, text),
    el("td", { class: "bar" }, track),
    el("td", { class: "num strong" }, shown),
    el("td", { class: "num" }, count(index + 1)),
  );
}
