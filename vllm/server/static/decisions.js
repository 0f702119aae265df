// Decisions: the questions of the form, and their answers with the options' probabilities as bars.

import { colour, meter } from "./bars.js";
import { byId, el } from "./dom.js";
import { count, log, percent, plural, visible } from "./format.js";

const SAMPLE = `[
  {
    "type": "predicate",
    "name": "broken",
    "instructions": "Does the customer report damage?"
  },
  {
    "type": "choice",
    "name": "department",
    "instructions": "Which department should answer?",
    "choices": [{"value": "returns"}, {"value": "sales"}]
  },
  {
    "type": "score",
    "name": "anger",
    "instructions": "How angry is the customer?",
    "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}]
  }
]`;

/** The field of the questions. */
export class Questions {
  #field = byId("questions");

  constructor() {
    this.#field.value = SAMPLE;
  }

  /** The questions; throws an Error whose `param` is the field, if the text is not JSON. */
  get value() {
    try {
      return JSON.parse(this.#field.value);
    } catch (error) {
      throw Object.assign(new Error(`Not JSON: ${error.message}`), { param: "questions" });
    }
  }
}

/** The answers of one decision; none: of nothing yet. */
export class Answers {
  #body = byId("answers");

  clear() {
    this.#body.replaceChildren();
    byId("answers-usage").textContent = "";
  }

  draw(questions, { answers, usage }) {
    this.#body.replaceChildren(...answers.map((answer, i) => article(questions[i], answer, i)));
    const { cached_tokens: cached } = usage.input_tokens_details;
    byId("answers-usage").textContent = `${plural(usage.input_tokens, "prompt token")}, ${count(cached)} of them cached`;
  }
}

function article(question, answer, index) {
  const title = answer.name ?? (typeof question.instructions === "string" ? question.instructions : `question ${index}`);
  const id = `answer-${index}`;
  return el(
    "article",
    { class: "answer", "aria-labelledby": id },
    el("h3", { id }, title, el("span", { class: "result" }, result(answer))),
    table(answer),
    massOf(answer.diagnostics.label_mass, title),
  );
}

/** The answer in a few words. */
function result(answer) {
  if (answer.type === "refusal") return "refused";
  if (answer.type === "predicate") return `${percent(answer.probability)} true`;
  const confidence = `confidence ${percent(answer.confidence)}`;
  if (answer.type === "score") return `${answer.score?.toFixed(2) ?? "–"}, ${confidence}`;
  return `${answer.choice}, ${confidence}`;
}

/** Each option's probability: as answered, or as read where the question was refused. */
function shares(answer) {
  if (answer.type === "predicate") return [answer.probability, 1 - answer.probability];
  return (answer.probabilities ?? answer.diagnostics.options).map((option) => option.probability);
}

function names(answer) {
  if (answer.type === "score") return answer.probabilities.map((level) => level.label);
  return answer.diagnostics.options.map((option) => String(option.value));
}

function table(answer) {
  const head = (name, kind) => el("th", { scope: "col", class: kind }, name);
  const probabilities = shares(answer);
  const best = Math.max(...probabilities);
  const texts = names(answer);
  const rows = answer.diagnostics.options.map((option, i) => {
    const name = texts[i];
    const label = visible(option.label);
    return el(
      "tr",
      { class: `${colour(i)}${probabilities[i] === best ? " best" : ""}` },
      el("th", { scope: "row", title: `read as ${label}` }, el("i", { class: "swatch" }), name),
      el("td", { class: "bar" }, meter(probabilities[i], `Probability of ${name}`)),
      el("td", { class: "num strong" }, percent(probabilities[i])),
      el("td", { class: "num" }, log(option.logprob)),
      el("td", { class: "num" }, count(option.rank)),
    );
  });
  const columns = [head("Option"), head(el("span", { class: "hidden" }, "Bar")), head("Probability", "num")];
  const header = el("tr", {}, ...columns, head("Logprob", "num"), head("Rank", "num"));
  return el("table", { class: "bars" }, el("thead", {}, header), el("tbody", {}, ...rows));
}

function massOf(mass, title) {
  const track = meter(mass ?? 0, `Label mass of ${title}`);
  return el("p", { class: "mass" }, el("span", {}, "Label mass"), track, el("output", {}, percent(mass)));
}
