// The labels' probabilities over all positions, as lines.

import { colour } from "./bars.js";
import { byId, svg } from "./dom.js";
import { percent, visible } from "./format.js";

const HEIGHT = 168;
const MARGIN = { left: 46, right: 12, top: 10, bottom: 26 };
const TICK_WIDTH = 46; // room that a token's text below the axis needs
const CEILINGS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1];

export class Timeline {
  #root = byId("timeline");
  #draw = () => {};
  #numPositions = 0;

  constructor(select) {
    new ResizeObserver(() => this.#draw()).observe(this.#root);
    const pick = (event) => {
      if (!this.#numPositions) return;
      const box = this.#root.getBoundingClientRect();
      const inner = box.width - MARGIN.left - MARGIN.right;
      const fraction = (event.clientX - box.left - MARGIN.left) / inner;
      const last = this.#numPositions - 1;
      select(Math.min(last, Math.max(0, Math.round(fraction * last))));
    };
    this.#root.addEventListener("pointerdown", (event) => {
      this.#root.setPointerCapture(event.pointerId);
      pick(event);
    });
    this.#root.addEventListener("pointermove", (event) => event.buttons && pick(event));
  }

  draw(answer, selected, ofAll) {
    this.#draw = () => this.#drawNow(answer, selected, ofAll);
    this.#draw();
  }

  #drawNow(answer, selected, ofAll) {
    const width = this.#root.clientWidth;
    if (!width) return;
    const positions = answer.readings.map((_, i) => answer.shares(i, ofAll));
    this.#numPositions = positions.length;
    const highest = positions.reduce((most, shares) => Math.max(most, ...shares), 0);
    const ceiling = ofAll ? (CEILINGS.find((value) => value >= highest) ?? 1) : 1;
    const last = Math.max(1, positions.length - 1);
    const x = (i) => MARGIN.left + (i / last) * (width - MARGIN.left - MARGIN.right);
    const y = (share) => HEIGHT - MARGIN.bottom - (share / ceiling) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this.#root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#root.setAttribute("aria-label", summary(answer, positions));
    this.#root.replaceChildren(
      ...grid(ceiling, y, width),
      svg("line", { class: "cursor", x1: x(selected), x2: x(selected), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
      ...ticks(answer, selected, x, width),
      ...answer.labels.map((_, i) => line(positions.map((shares) => shares[i]), i, x, y)),
      ...answer.labels.map((_, i) => point(positions[selected]?.[i], i, x(selected), y)),
    );
  }
}

function grid(ceiling, y, width) {
  return [0, 0.5, 1].flatMap((part) => {
    const height = y(part * ceiling);
    const name = `${+(100 * part * ceiling).toPrecision(2)} %`;
    return [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: height, y2: height }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: height + 4, "text-anchor": "end" }, name),
    ];
  });
}

/** Tokens below the axis where there is room for them; numbers otherwise. */
function ticks(answer, selected, x, width) {
  const count = answer.readings.length;
  const room = Math.max(2, Math.floor((width - MARGIN.left - MARGIN.right) / TICK_WIDTH));
  const step = Math.max(1, Math.ceil(count / room));
  const shown = answer.readings.map((_, i) => i).filter((i) => i % step === 0 || i === selected);
  return shown
    .filter((i) => i === selected || Math.abs(i - selected) >= step / 2)
    .map((i) => {
      const text = step === 1 && answer.tokens[i] ? shorten(visible(answer.tokens[i].name)) : String(i + 1);
      const anchor = count > 1 && i === count - 1 ? "end" : "middle";
      const kind = i === selected ? "tick now" : "tick";
      return svg("text", { class: kind, x: x(i), y: HEIGHT - 8, "text-anchor": anchor }, text);
    });
}

const shorten = (text) => ([...text].length > 6 ? `${[...text].slice(0, 5).join("")}…` : text);

function line(shares, index, x, y) {
  let path = "";
  shares.forEach((share, i) => {
    if (share === null) return;
    path += `${i && shares[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${y(share).toFixed(1)}`;
  });
  return svg("path", { class: `line ${colour(index)}`, d: path || null });
}

function point(share, index, x, y) {
  if (share === null || share === undefined) return "";
  return svg("circle", { class: `point ${colour(index)}`, cx: x, cy: y(share), r: 4 });
}

function summary(answer, positions) {
  const at = (i) => answer.labels.map(({ label }, j) => `${visible(label)} ${percent(positions[i][j])}`).join(", ");
  if (!positions.length) return "No position yet";
  const first = `Line chart of ${positions.length} positions. First: ${at(0)}.`;
  return positions.length === 1 ? first : `${first} Last: ${at(positions.length - 1)}.`;
}
