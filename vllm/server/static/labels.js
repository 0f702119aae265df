// The labels as chips: what each is as tokens, its spaces shown.

import { postJson } from "./api.js";
import { byId, debounce, el } from "./dom.js";
import { plural, visible } from "./format.js";

const HINT = "Enter adds one. Leading spaces count: ·a is not a";

export class LabelEditor {
  #labels = [];
  #ids = new Map(); // text -> its token ids
  #list = byId("label-list");
  #input = byId("label-input");
  #hint = byId("label-hint");
  #changed;

  constructor(labels, changed) {
    this.#changed = changed;
    this.#labels = labels;
    this.#input.addEventListener("keydown", (event) => this.#onKey(event));
    this.#input.addEventListener("input", () => {
      this.#showHint();
      this.#preview();
    });
    this.#input.addEventListener("paste", (event) => this.#onPaste(event));
    this.#input.addEventListener("blur", () => this.commit());
    this.#list.addEventListener("click", (event) => this.#onClick(event));
    this.#draw();
    this.#showHint();
  }

  get labels() {
    return this.#labels;
  }

  set labels(labels) {
    this.#labels = labels;
    this.#draw();
    this.resolve();
  }

  /** Takes what is typed but not yet added. */
  commit() {
    this.#add([this.#input.value]);
    this.#input.value = "";
    this.#showHint();
  }

  /** Asks the server what the labels are as tokens. */
  async resolve() {
    await Promise.all(this.#labels.map((label) => this.#resolve(label)));
    this.#draw();
  }

  #preview = debounce(150, async () => {
    await this.#resolve(this.#input.value);
    this.#showHint();
  });

  async #resolve(text) {
    if (text === "" || this.#ids.has(text)) return;
    try {
      const { tokens } = await postJson("tokenize", { prompt: text, add_special_tokens: false });
      this.#ids.set(text, tokens);
    } catch {
      // The request itself will say what is wrong.
    }
  }

  #add(texts) {
    const fresh = texts.filter((text, i) => text !== "" && !this.#labels.includes(text) && texts.indexOf(text) === i);
    if (!fresh.length) return;
    this.#labels = [...this.#labels, ...fresh];
    this.#update();
  }

  #remove(index) {
    this.#labels = this.#labels.filter((_, i) => i !== index);
    this.#update();
  }

  #update() {
    this.#draw();
    this.#changed();
    this.resolve();
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.commit();
    } else if (event.key === "Backspace" && this.#input.value === "" && this.#labels.length) {
      this.#remove(this.#labels.length - 1);
    }
  }

  #onPaste(event) {
    const text = event.clipboardData.getData("text");
    if (!text.includes("\n")) return;
    event.preventDefault();
    this.#add(text.split(/\r?\n/));
  }

  #onClick(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const index = [...this.#list.children].indexOf(button.parentElement);
    this.#remove(index);
    const next = this.#list.children[Math.min(index, this.#list.children.length - 1)];
    (next?.querySelector("button") ?? this.#input).focus();
  }

  #draw() {
    this.#list.replaceChildren(...this.#labels.map((label) => this.#chip(label)));
  }

  #chip(label) {
    const ids = this.#ids.get(label);
    const isToken = !ids || ids.length === 1;
    return el(
      "li",
      { class: isToken ? "chip" : "chip invalid", title: isToken ? null : "A label is one token" },
      el("span", { class: "chip-text" }, visible(label)),
      el("span", { class: "chip-id" }, describe(ids)),
      el("button", { type: "button", "aria-label": `Remove label ${visible(label)}` }, "×"),
    );
  }

  #showHint() {
    const text = this.#input.value;
    this.#hint.textContent = text === "" ? HINT : `Enter adds ${visible(text)}  ${describe(this.#ids.get(text))}`;
  }
}

function describe(ids) {
  if (!ids) return "";
  return ids.length === 1 ? String(ids[0]) : plural(ids.length, "token");
}
