// The request that the form describes: its body, and how to send it from a shell or from Python.

import { TOP } from "./answer.js";

// Fields that OpenAI's SDK does not know.
const OF_THIS_SERVER = new Set(["labels", "diagnostics", "structured_outputs", "choice_readings", "field_readings"]);

/** The content of a user's message: a text, behind its pictures if there are some. */
export function contentOf(text, pictures) {
  if (!pictures?.length) return text;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

/** What a decision is about. */
function inputOf(text, pictures) {
  if (!pictures?.length) return text;
  const content = [...pictures.map((url) => ({ type: "input_image", image_url: url })), { type: "input_text", text }];
  return [{ role: "user", content }];
}

const MOST_SHOWN = 2000;

/** A request as it is shown: long pictures are left out. */
export function shortened(value) {
  if (typeof value === "string") {
    const isLong = value.startsWith("data:image/") && value.length > MOST_SHOWN;
    return isLong ? `${value.slice(0, value.indexOf(",") + 1)}…` : value;
  }
  if (Array.isArray(value)) return value.map(shortened);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, own]) => [key, shortened(own)]));
}

/** A route and the body for it, from {mode, model, prompt, labels, maxTokens, temperature, topP, stop, form}, of a chat
 *  with {system, messages, tools} in place of the prompt, of a decision {mode, model, prompt, pictures, questions}, of a
 *  ranking {mode, model, prompt, documents}. `pictures` are data URLs. `tools` and `form` are fields of the body. Numbers that are NaN are left out, so
 *  that the server's defaults hold. */
export function requestOf(form) {
  const body = { model: form.model };
  if (form.mode === "decision") {
    Object.assign(body, { input: inputOf(form.prompt, form.pictures), questions: form.questions, diagnostics: true });
    return { path: "v1/decisions", body };
  }
  if (form.mode === "rerank") {
    Object.assign(body, { query: form.prompt, documents: form.documents });
    return { path: "v1/rerank", body };
  }
  const chat = form.mode === "chat";
  if (chat) {
    const system = form.system ? [{ role: "system", content: form.system }] : [];
    body.messages = [...system, ...(form.messages ?? [{ role: "user", content: form.prompt }])];
    Object.assign(body, form.tools);
  } else {
    body.prompt = form.prompt;
  }
  if (!Number.isNaN(form.maxTokens)) body.max_tokens = form.maxTokens;
  if (!Number.isNaN(form.temperature)) body.temperature = form.temperature;
  if (Number.isFinite(form.topP)) body.top_p = form.topP;
  if (form.stop?.length) body.stop = form.stop;
  if (form.maxTokens !== 0) Object.assign(body, chat ? { logprobs: true, top_logprobs: TOP } : { logprobs: TOP });
  if (form.labels.length) body.labels = form.labels;
  Object.assign(body, form.form);
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

export function streamed(body) {
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

/** A command for any POSIX shell. The key is never shown: the shell reads it from its environment. */
export function curlOf({ path, body }, base, { stream, needsKey }) {
  const lines = [
    `curl ${stream ? "-N " : ""}${shellString(base + path)}`,
    "-H 'Content-Type: application/json'",
    ...(needsKey ? ['-H "Authorization: Bearer $OPENAI_API_KEY"'] : []),
    `-d ${shellString(escapeUnseen(JSON.stringify(stream ? streamed(body) : body, null, 2)))}`,
  ];
  return lines.join(" \\\n  ");
}

/** A program for OpenAI's SDK. */
export function pythonOf({ path, body }, base, { stream, needsKey }) {
  const all = Object.entries(stream ? streamed(body) : body);
  const own = Object.fromEntries(all.filter(([name]) => !OF_THIS_SERVER.has(name)));
  const extra = Object.fromEntries(all.filter(([name]) => OF_THIS_SERVER.has(name)));
  const { labels } = body;
  const [, ...names] = path.split("/");
  const isRanking = "documents" in body;
  // The SDK has no method of its own for rankings.
  const call = isRanking ? "post" : `${names.join(".")}.create`;
  const fields = isRanking
    ? ['    "/rerank",', "    cast_to=object,", `    body=${python(own, 1)},`]
    : Object.entries(own).map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(extra).length) fields.push(`    extra_body=${python(extra, 1)},`);
  const chat = "messages" in body;
  const key = needsKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonString(base + "v1")}, api_key=${key})`,
    `${stream ? "stream" : "answer"} = client.${call}(`,
    ...fields,
    ")",
    ...readWhole(body) ?? (stream ? readStream(chat, labels) : readAnswer(chat, labels)),
    "",
  ].join("\n");
}

/** For answers that are shown as they are; null: for others. */
function readWhole({ documents, diagnostics }) {
  if (documents) return ['for result in answer["results"]:', '    print(result["relevance_score"], result["document"]["text"])'];
  return diagnostics ? ["print(answer.to_json())"] : null;
}

function readAnswer(chat, labels) {
  const lines = ["choice = answer.choices[0]", `print(choice.${chat ? "message.content" : "text"})`];
  return labels ? [...lines, ...printReading("choice.readings[0]", "")] : lines;
}

function readStream(chat, labels) {
  const lines = [
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    `        print(choice.${chat ? "delta.content or \"\"" : "text"}, end="", flush=True)`,
  ];
  if (!labels) return lines;
  return [
    ...lines,
    '        for reading in getattr(choice, "readings", None) or []:',
    ...printReading("reading", "            "),
  ];
}

function printReading(reading, indent) {
  return [
    `${indent}for entry in ${reading}["ids"].values():`,
    `${indent}    if entry["label"] is not None:`,
    `${indent}        print(repr(entry["label"]), entry["probability"], entry["logprob"], entry["rank"])`,
  ];
}

/** Single quotes take everything as it is but themselves. */
function shellString(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** What cannot be seen, or turns the direction of what can, as JSON's escapes. */
function escapeUnseen(json) {
  return json.replace(/[\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, escapeUnit);
}

const escapeUnit = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;

function python(value, depth) {
  const indent = "    ".repeat(depth + 1);
  const end = "    ".repeat(depth);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return pythonText(value, indent, end);
  if (Array.isArray(value)) {
    const items = value.map((item) => python(item, depth + 1));
    const line = `[${items.join(", ")}]`;
    if (line.length < 80 && !line.includes("\n")) return line;
    return `[\n${items.map((item) => `${indent}${item},\n`).join("")}${end}]`;
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(([key, item]) => `${pythonString(key)}: ${python(item, depth)}`);
    return `{${items.join(", ")}}`;
  }
  return String(value);
}

/** A text of several lines as one literal a line, put together by Python. */
function pythonText(text, indent, end) {
  const lines = text.match(/[^\n]*\n|[^\n]+$/g) ?? [""];
  if (lines.length === 1) return pythonString(text);
  return `(\n${lines.map((line) => `${indent}${pythonString(line)}\n`).join("")}${end})`;
}

function pythonString(text) {
  const inner = text
    .replace(/["\\]/g, "\\$&")
    .replaceAll("\n", "\\n")
    .replaceAll("\r", "\\r")
    .replaceAll("\t", "\\t")
    .replace(/[\x00-\x1f\x7f-\xa0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, escapeUnit)
    .replace(/\p{Cs}/gu, escapeUnit);
  return `"${inner}"`;
}
