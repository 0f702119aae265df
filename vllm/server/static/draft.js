// The form's contents, for as long as the tab is open: a reload gives it back, and each mode has its own texts.

import { byId } from "./dom.js";

const KEY = "vllm-draft";
// Fields that all modes share, and those that each mode has for itself.
const SHARED = ["system", "questions", "documents", "tools", "tool-choice", "temperature", "top-p", "stop-texts", "schema"];
const OWN = ["prompt", "max-tokens"];
const EXAMPLES = {
  completion: { prompt: "Review: It broke after a day.\nSentiment:", "max-tokens": "16", labels: [" positive", " negative"] },
  chat: { prompt: "What is the capital of France? Answer in one sentence.", "max-tokens": "256", labels: [] },
  decision: { prompt: "The screen arrived with a crack, and nobody answers my letters.", "max-tokens": "16", labels: [] },
  rerank: { prompt: "Where do trains to the coast leave?", "max-tokens": "16", labels: [] },
};

export class Draft {
  #labels;
  #conversation;
  #own = structuredClone(EXAMPLES);
  #mode = null;

  constructor(labels, conversation) {
    this.#labels = labels;
    this.#conversation = conversation;
  }

  /** Fills the form with what the tab had; returns whether it had anything. */
  restore() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(KEY));
    } catch {
      sessionStorage.removeItem(KEY);
    }
    if (kept) {
      for (const id of SHARED) if (typeof kept.shared?.[id] === "string") byId(id).value = kept.shared[id];
      for (const mode of Object.keys(EXAMPLES)) Object.assign(this.#own[mode], kept.own?.[mode]);
      if (Array.isArray(kept.turns)) this.#conversation.turns = kept.turns;
      const radio = [...document.getElementsByName("mode")].find(({ value }) => value === kept.mode);
      if (radio) radio.checked = true;
    }
    this.#conversation.redraw();
  }

  /** Shows the texts of a mode, and remembers those of the one before. */
  show(mode) {
    if (mode === this.#mode) return;
    if (this.#mode) this.#take();
    this.#mode = mode;
    const own = this.#own[mode];
    for (const id of OWN) byId(id).value = own[id];
    this.#labels.labels = [...own.labels];
  }

  save() {
    this.#take();
    const shared = Object.fromEntries(SHARED.map((id) => [id, byId(id).value]));
    const kept = { mode: this.#mode, shared, own: this.#own, turns: this.#conversation.turns };
    try {
      sessionStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // A conversation that is larger than the browser keeps.
    }
  }

  #take() {
    if (!this.#mode) return;
    const own = this.#own[this.#mode];
    for (const id of OWN) own[id] = byId(id).value;
    own.labels = [...this.#labels.labels];
  }
}
