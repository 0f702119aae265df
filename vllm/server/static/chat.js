// The turns of a chat: what was said so far, and how it is shown.

import { byId, el } from "./dom.js";
import { markdown } from "./markdown.js";
import { contentOf } from "./request.js";

export class Conversation {
  /** The messages so far, as requests send them. */
  turns = [];
  #body = byId("turns");
  #pending = null; // what is being answered
  #last = null; // the node of the answer that comes in
  #drawn = "";

  /** What the next text makes of the messages: calls of tools are answered by it. Pictures go before a user's. */
  withText(text, pictures = []) {
    const calls = this.openCalls;
    const said = calls.length
      ? calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: text }))
      : [{ role: "user", content: contentOf(text, pictures) }];
    return [...this.turns, ...said];
  }

  /** The calls of the last answer, which wait for their result. */
  get openCalls() {
    return this.turns.at(-1)?.tool_calls ?? [];
  }

  /** Shows the messages of a request that is sent. */
  begin(messages) {
    this.#pending = messages;
    this.redraw();
  }

  /** Shows an answer while it comes. */
  draw(answer) {
    if (!this.#pending) return;
    const key = JSON.stringify([answer.reasoning, answer.content, answer.calls]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    const node = turn({ role: "assistant", ...answer });
    if (this.#last) this.#last.replaceWith(node);
    else this.#body.append(node);
    this.#last = node;
  }

  /** Keeps the request's messages and the answer, or neither if there is none. Returns whether it does. */
  end(answer) {
    const messages = this.#pending;
    this.#pending = this.#last = null;
    this.#drawn = "";
    const hasAnswer = messages !== null && (answer.content !== "" || answer.reasoning !== "" || answer.calls.length > 0);
    if (hasAnswer) {
      const calls = answer.calls.length ? { tool_calls: answer.calls } : {};
      this.turns = [...messages, { role: "assistant", content: answer.content, ...calls }];
    }
    this.redraw(hasAnswer ? answer : null);
    return hasAnswer;
  }

  clear() {
    this.turns = [];
    this.#pending = this.#last = null;
    this.redraw();
  }

  redraw(last = null) {
    const messages = this.#pending ?? this.turns;
    const nodes = messages.map((message, i) => {
      const isLast = last && i === messages.length - 1;
      return turn(isLast ? { ...message, reasoning: last.reasoning, calls: last.calls } : message);
    });
    this.#body.replaceChildren(...nodes);
    this.#last = null;
    byId("turns-empty").hidden = nodes.length > 0;
    byId("new-chat").disabled = nodes.length === 0;
  }
}

const plainText = (content) =>
  typeof content === "string" ? content : content.map((part) => part.text ?? "[picture]").join(" ");

const WHO = { user: "You", assistant: "Model", tool: "Result" };

function turn({ role, content, reasoning, calls, tool_calls: kept }) {
  const parts = [el("h3", {}, WHO[role] ?? role)];
  if (reasoning) {
    parts.push(el("details", {}, el("summary", {}, "Reasoning"), el("div", { class: "said" }, ...markdown(reasoning))));
  }
  if (role === "assistant") parts.push(el("div", { class: "said" }, ...markdown(content ?? "")));
  else parts.push(el("p", { class: "said plain" }, plainText(content)));
  for (const { function: { name, arguments: given } } of calls?.length ? calls : kept ?? []) {
    parts.push(el("pre", {}, el("code", {}, `${name}(${given})`)));
  }
  return el("article", { class: `turn ${role}` }, ...parts);
}
