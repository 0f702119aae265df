// The token ids of any text.

import { postJson } from "./api.js";
import { byId, debounce, el } from "./dom.js";
import { count, plural, visible } from "./format.js";

const MOST_SHOWN = 2000;

export class IdsPanel {
  #text = byId("ids-text");
  #special = byId("ids-special");
  #count = byId("ids-count");
  #list = byId("ids");
  #tokens = [];
  #pending = new AbortController();

  constructor() {
    const update = debounce(150, () => this.#update());
    this.#text.addEventListener("input", update);
    this.#special.addEventListener("change", update);
    this.#draw([]);
  }

  /** The ids as a list that Python and JSON can read. */
  get ids() {
    return `[${this.#tokens.join(", ")}]`;
  }

  async #update() {
    // Only the last text's answer may show.
    this.#pending.abort();
    this.#pending = new AbortController();
    if (this.#text.value === "") {
      this.#draw([]);
      return;
    }
    const body = {
      prompt: this.#text.value,
      add_special_tokens: this.#special.checked,
      return_token_strs: true,
    };
    try {
      const { tokens, token_texts: texts, token_strs: names } = await postJson("tokenize", body, this.#pending.signal);
      this.#draw(tokens, texts, names);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#draw([]);
      this.#count.textContent = error.message;
    }
  }

  #draw(tokens, texts, names) {
    this.#tokens = tokens;
    const shown = tokens.slice(0, MOST_SHOWN);
    this.#list.replaceChildren(
      ...shown.map((id, i) => {
        const text = el("span", { class: "id-text" }, visible(texts[i]));
        return el("li", { title: names[i] }, text, el("span", { class: "id" }, String(id)));
      }),
    );
    const more = tokens.length > MOST_SHOWN ? `, the first ${count(MOST_SHOWN)} of them shown` : "";
    this.#count.textContent = tokens.length ? plural(tokens.length, "token") + more : "";
    byId("copy-ids").disabled = tokens.length === 0;
  }
}
