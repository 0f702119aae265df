// An answer's form: the fields where it and tools are given, and how likely each value is that it leaves to a place.

import { colour, meter } from "./bars.js";
import { byId, el } from "./dom.js";
import { log, percent, visible } from "./format.js";

/** The field of the form. */
export class FormField {
  #field = byId("schema");

  /** The fields of a request; throws an Error whose `param` is the field, if the text is not JSON. */
  get fields() {
    const form = parsed(this.#field.value, "structured_outputs");
    if (form === undefined) return {};
    if (Array.isArray(form)) return { structured_outputs: { choice: form }, choice_readings: true };
    return { structured_outputs: { json: form }, field_readings: true };
  }
}

/** The field of the tools: a list, one tool, or one function. */
export class ToolsField {
  #field = byId("tools");

  /** As of FormField. */
  get fields() {
    const given = parsed(this.#field.value, "tools");
    if (given === undefined) return {};
    const isFunction = (tool) => typeof tool?.name === "string" && tool.function === undefined;
    const whole = (tool) => (isFunction(tool) ? { type: "function", function: tool } : tool);
    const tools = [given].flat().map(whole);
    const choice = byId("tool-choice").value;
    if (choice === "auto") return { tools };
    const isName = !["none", "required"].includes(choice);
    return { tools, tool_choice: isName ? { type: "function", function: { name: choice } } : choice };
  }

  /** Offers the tools' names as choices. */
  drawChoices() {
    let names = [];
    try {
      names = (this.fields.tools ?? []).map((tool) => tool?.function?.name).filter((name) => typeof name === "string");
    } catch {
      return; // while JSON is typed
    }
    const select = byId("tool-choice");
    const all = ["auto", "none", "required", ...names.filter((name) => !["auto", "none", "required"].includes(name))];
    if (JSON.stringify(all) === JSON.stringify([...select.options].map(({ value }) => value))) return;
    const chosen = select.value;
    select.replaceChildren(...all.map((name) => el("option", { value: name }, name)));
    select.value = all.includes(chosen) ? chosen : "auto";
  }
}

/** The texts that end an answer: one a line, in which \n is a line's end. */
export function stopTexts() {
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  const lines = byId("stop-texts").value.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\[nt\\]/g, (escape) => escapes[escape]));
}

/** What a field's text stands for; undefined: it is empty. */
function parsed(text, param) {
  if (text.trim() === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`Not JSON: ${error.message}`), { param });
  }
}

/** The values of one answer's places, a table a place. */
export class FieldTables {
  #body = byId("fields");
  #drawn = null;

  /** `places`: {path: entries}, as the server answers them; null: none yet. */
  draw(places) {
    if (places === this.#drawn) return;
    this.#drawn = places;
    this.#body.replaceChildren(...Object.entries(places ?? {}).map(([path, entries], i) => article(path, entries, i)));
  }
}

function article(path, entries, index) {
  const id = `field-${index}`;
  const head = (name, kind) => el("th", { scope: "col", class: kind }, name);
  const columns = [head("Value"), head(el("span", { class: "hidden" }, "Bar")), head("Share", "num")];
  return el(
    "article",
    { class: "answer", "aria-labelledby": id },
    el("h3", { id }, visible(path)),
    el(
      "table",
      { class: "bars" },
      el("thead", {}, el("tr", {}, ...columns, head("Logprob", "num"))),
      el("tbody", {}, ...entries.map((entry, i) => row(path, entry, i))),
    ),
  );
}

function row(path, { value, text, logprob, share, chosen }, index) {
  const name = typeof value === "string" ? visible(value) : String(value);
  return el(
    "tr",
    { class: `${colour(index)}${chosen ? " best" : ""}` },
    el("th", { scope: "row", title: `read as ${visible(text)}` }, el("i", { class: "swatch" }), name),
    el("td", { class: "bar" }, meter(share, `Share of ${name} at ${path}`)),
    el("td", { class: "num strong" }, percent(share)),
    el("td", { class: "num" }, log(logprob)),
  );
}
