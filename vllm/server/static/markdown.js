// Markdown as elements. Texts become text nodes and nothing else, as everywhere (see dom.js): what a model writes as HTML
// is shown as it is written.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ROW = /\|/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// In the order in which they are looked for: code, links, bold, italic, struck out.
const INLINE =
  /(?<code>(`+)(?!`)(.+?)(?<!`)\2(?!`))|!?\[(?<name>[^\]]*)\]\((?<url>[^\s)]+)(?:\s+"[^"]*")?\)|(?<bold>\*\*(?=\S)(.+?)(?<=\S)\*\*|__(?=\S)(.+?)(?<=\S)__)|(?<italic>\*(?=\S)([^*]+?)(?<=\S)\*|(?<!\w)_(?=\S)([^_]+?)(?<=\S)_(?!\w))|(?<struck>~~(?=\S)(.+?)(?<=\S)~~)|\\(?<escaped>[\\`*_{}[\]()#+.!~|>-])/s;
const SAFE_URL = /^(https?:\/\/|mailto:)/i;
const MOST_LEVELS = 20;

/** The elements of a text in Markdown. */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, level) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (line.trim() === "") at += 1;
    else if ((match = FENCE.exec(line))) at = fenced(lines, at, match, found);
    else if ((match = HEADING.exec(line))) {
      found.push(el(`h${Math.min(match[1].length + 3, 6)}`, {}, ...inline(match[2])));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(el("hr"));
      at += 1;
    } else if (QUOTE.test(line) && level < MOST_LEVELS) {
      const end = lines.findIndex((other, i) => i > at && !QUOTE.test(other));
      const own = lines.slice(at, end < 0 ? lines.length : end);
      found.push(el("blockquote", {}, ...blocks(own.map((each) => QUOTE.exec(each)[1]), level + 1)));
      at += own.length;
    } else if (ITEM.test(line) && level < MOST_LEVELS) at = list(lines, at, found, level);
    else if (ROW.test(line) && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) at = table(lines, at, found);
    else at = paragraph(lines, at, found);
  }
  return found;
}

function fenced(lines, at, [, fence, language], found) {
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(fence)) end += 1;
  const code = el("code", {}, lines.slice(at + 1, end).join("\n"));
  found.push(el("pre", { "data-language": language.trim() || null }, code));
  return end + 1;
}

function list(lines, at, found, level) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first);
  const items = [];
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (match && match[1].length <= indent.length + 1) {
      if (/\d/.test(match[2]) !== isOrdered) break;
      items.push([match[3]]);
    } else if (items.length && (lines[at].trim() === "" || /^\s+/.test(lines[at]))) {
      // An indented line belongs to the item, and an empty line if something of the list follows.
      const next = lines[at + 1] ?? "";
      if (lines[at].trim() === "" && !/^\s+\S/.test(next) && !ITEM.test(next)) break;
      items.at(-1).push(lines[at].replace(new RegExp(`^\\s{0,${indent.length + 4}}`), ""));
    } else break;
    at += 1;
  }
  const start = isOrdered ? parseInt(first, 10) : null;
  const nodes = items.map((own) => el("li", {}, ...unwrapped(blocks(own, level + 1))));
  found.push(el(isOrdered ? "ol" : "ul", { start: start === 1 ? null : start }, ...nodes));
  return at;
}

/** An item's first paragraph without its margins. */
function unwrapped(nodes) {
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(lines, at, found) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (tag, line) => el("tr", {}, ...cells(line).map((cell) => el(tag, {}, ...inline(cell))));
  const head = row("th", lines[at]);
  const body = [];
  for (at += 2; at < lines.length && ROW.test(lines[at]); at += 1) body.push(row("td", lines[at]));
  found.push(el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  return at;
}

function paragraph(lines, at, found) {
  const own = [lines[at]];
  const ends = [FENCE, HEADING, QUOTE, ITEM, RULE];
  for (at += 1; at < lines.length && lines[at].trim() !== "" && !ends.some((end) => end.test(lines[at])); at += 1) {
    own.push(lines[at]);
  }
  found.push(el("p", {}, ...inline(own.join("\n"))));
  return at;
}

function inline(text) {
  const nodes = [];
  let rest = text;
  while (rest) {
    const match = INLINE.exec(rest);
    if (!match) break;
    if (match.index) nodes.push(rest.slice(0, match.index));
    nodes.push(element(match));
    rest = rest.slice(match.index + match[0].length);
  }
  return rest ? [...nodes, rest] : nodes;
}

function element(match) {
  const { code, name, url, bold, italic, struck, escaped } = match.groups;
  if (code !== undefined) return el("code", {}, code.replace(/^`+|`+$/g, "").replace(/^ (.+) $/s, "$1"));
  if (escaped !== undefined) return escaped;
  if (bold !== undefined) return el("strong", {}, ...inline(bold.slice(2, -2)));
  if (italic !== undefined) return el("em", {}, ...inline(italic.slice(1, -1)));
  if (struck !== undefined) return el("s", {}, ...inline(struck.slice(2, -2)));
  // Images are not loaded: another host would learn of the reader.
  if (!SAFE_URL.test(url)) return match[0];
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, name || url);
}
