// The generated text, one element a token: coloured by how surprising it was, explained on hover and on focus.

import { byId, el } from "./dom.js";
import { count, log, percent, visible } from "./format.js";
import { TOP } from "./answer.js";

const MOST_SURPRISING = 6; // nats at which the colour is full
const UNSEEN = /([\p{Cc}\p{Cs}\u2028-\u202e\u2066-\u2069])/u; // line ends and controls; not what joins letters or emoji
const LINGER = 120; // ms in which the pointer may reach the tooltip

export class TokenList {
  #root = byId("tokens");
  #tip = byId("tip");
  #tokens = [];
  #selected = -1;
  #described = null;
  #leaving;
  #select;

  constructor(select) {
    this.#select = select;
    const root = this.#root;
    root.addEventListener("mouseover", (event) => this.#explain(event.target.closest("[role=option]")));
    root.addEventListener("mouseout", () => this.#leave());
    root.addEventListener("focusin", (event) => this.#explain(event.target.closest("[role=option]")));
    root.addEventListener("focusout", () => this.#hide());
    root.addEventListener("click", (event) => this.#choose(event.target.closest("[role=option]")));
    root.addEventListener("keydown", (event) => this.#onKey(event));
    this.#tip.addEventListener("mouseenter", () => clearTimeout(this.#leaving));
    this.#tip.addEventListener("mouseleave", () => this.#leave());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#hide());
    document.addEventListener("scroll", () => this.#hide(), { capture: true, passive: true });
  }

  clear() {
    this.#tokens = [];
    this.#selected = -1;
    this.#root.replaceChildren();
    this.#hide();
  }

  /** Appends what is new. */
  draw(tokens, selected) {
    const fresh = tokens.slice(this.#root.children.length);
    this.#tokens = tokens;
    this.#root.append(...fresh.map((token) => option(token)));
    if (selected === this.#selected && this.#root.querySelector("[tabindex='0']")) return;
    const options = this.#root.children;
    const before = options[this.#selected];
    before?.setAttribute("aria-selected", "false");
    before?.setAttribute("tabindex", "-1");
    options[selected]?.setAttribute("aria-selected", "true");
    options[selected]?.setAttribute("tabindex", "0");
    this.#selected = selected;
  }

  #choose(node) {
    if (!node) return;
    this.#select([...this.#root.children].indexOf(node));
    node.focus();
  }

  #onKey(event) {
    const last = this.#root.children.length - 1;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -last, End: last };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const index = [...this.#root.children].indexOf(event.target);
    const target = Math.min(last, Math.max(0, index + steps[event.key]));
    this.#choose(this.#root.children[target]);
  }

  #explain(node) {
    if (!node) return;
    clearTimeout(this.#leaving);
    const token = this.#tokens[[...this.#root.children].indexOf(node)];
    this.#described?.removeAttribute("aria-describedby");
    node.setAttribute("aria-describedby", "tip");
    this.#described = node;
    this.#tip.replaceChildren(...explanation(token));
    this.#tip.hidden = false;
    this.#place(node.getClientRects()[0] ?? node.getBoundingClientRect());
  }

  #place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.#tip;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - width - 8);
    const above = box.bottom + height + 12 > window.innerHeight && box.top > height + 12;
    this.#tip.style.left = `${left}px`;
    this.#tip.style.top = `${above ? box.top - height - 6 : box.bottom + 6}px`;
  }

  #leave() {
    this.#leaving = setTimeout(() => this.#hide(), LINGER);
  }

  #hide() {
    clearTimeout(this.#leaving);
    this.#tip.hidden = true;
    this.#described?.removeAttribute("aria-describedby");
    this.#described = null;
  }
}

function option(token) {
  const about = `${visible(token.name)}, id ${token.id}, logprob ${log(token.logprob)}, rank ${rankOf(token)}`;
  const state = { role: "option", tabindex: -1, "aria-selected": "false", "aria-label": about };
  const node = el("span", { class: "token", ...state });
  const surprise = Math.min(1, -token.logprob / MOST_SURPRISING);
  node.style.setProperty("--surprise", `${Math.round(100 * surprise)}%`);
  if (token.part) node.dataset.part = token.part;
  if (token.text === "") {
    node.classList.add("part");
    node.append("◌");
  }
  for (const part of token.text.split(UNSEEN)) {
    node.append(UNSEEN.test(part) ? el("span", { class: "sign" }, visible(part)) : part);
    if (part === "\n") node.append(part);
  }
  return node;
}

const rankOf = (token) => (token.rank === null ? `beyond ${TOP}` : count(token.rank));

function explanation(token) {
  const facts = [
    ["id", String(token.id)],
    ["logprob", log(token.logprob)],
    ["probability", percent(Math.exp(token.logprob))],
    ["rank", rankOf(token)],
    ...(token.part ? [["part", token.part.replace("_", " ")]] : []),
  ];
  return [
    el("p", { class: "tip-name" }, visible(token.name)),
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { "data-fact": name }, value)])),
    el(
      "table",
      {},
      el("caption", {}, `Top ${token.top.length}`),
      el("tbody", {}, ...token.top.map((one) => topRow(one, one.logprob === token.logprob && one.name === token.name))),
    ),
  ];
}

function topRow({ name, id, logprob }, isOwn) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * Math.exp(logprob)}%`;
  return el(
    "tr",
    { class: isOwn ? "own" : null, title: id === null ? null : `token ${id}` },
    el("th", { scope: "row" }, visible(name)),
    el("td", { class: "bar" }, el("span", { class: "track" }, fill)),
    el("td", { class: "num" }, percent(Math.exp(logprob))),
    el("td", { class: "num" }, log(logprob)),
  );
}
