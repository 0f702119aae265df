// The page: its form, one run at a time, and what the runs show.

import { Answer } from "./answer.js";
import { apiKey, BASE, getJson, postJson, postStream } from "./api.js";
import { Bars } from "./bars.js";
import { askForKey, clearComplaints, complain } from "./complaints.js";
import { Answers, Questions } from "./decisions.js";
import { Conversation } from "./chat.js";
import { byId, copyText, el, perFrame } from "./dom.js";
import { Draft } from "./draft.js";
import { FieldTables, FormField, stopTexts, ToolsField } from "./fields.js";
import { count, plural, seconds, visible } from "./format.js";
import { IdsPanel } from "./ids.js";
import { LabelEditor } from "./labels.js";
import { Numbers } from "./numbers.js";
import { Documents, Ranking } from "./rerank.js";
import { Pictures } from "./pictures.js";
import { curlOf, pythonOf, requestOf, shortened, streamed } from "./request.js";
import { Timeline } from "./timeline.js";
import { TokenList } from "./tokens.js";

let answer = new Answer();
let selected = 0; // the position whose bars are shown
let running = null; // the AbortController of the run in progress
let readsPictures = false; // as /v1/models says
let usage = ""; // the last run's counts and times, as a text

const labels = new LabelEditor([], () => {
  drawCode();
  draft.save();
});
const conversation = new Conversation();
const pictures = new Pictures(() => drawCode());
const draft = new Draft(labels, conversation);
const bars = new Bars();
const numbers = new Numbers();
const timeline = new Timeline(select);
const tokens = new TokenList(select);
const ids = new IdsPanel();
const questions = new Questions();
const answers = new Answers();
const formField = new FormField();
const toolsField = new ToolsField();
const fields = new FieldTables();
const documents = new Documents();
const ranking = new Ranking();

// The task that a model must be able to do for a mode, as /v1/models says it.
const TASKS = { completion: "generate", chat: "generate", decision: "generate", rerank: "score" };

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

/** Throws an Error with `param` for questions, tools or a form that are not JSON. */
function currentRequest() {
  const mode = chosen("mode");
  const isGenerated = mode === "completion" || mode === "chat";
  return requestOf({
    mode,
    questions: mode === "decision" ? questions.value : null,
    documents: documents.value,
    model: byId("model").value,
    system: byId("system").value,
    prompt: byId("prompt").value,
    pictures: pictures.urls,
    messages: conversation.withText(byId("prompt").value, pictures.urls),
    tools: mode === "chat" ? toolsField.fields : {},
    labels: labels.labels,
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    topP: byId("top-p").valueAsNumber,
    stop: stopTexts(),
    form: isGenerated ? formField.fields : {},
  });
}

// ---- Running

async function run() {
  running?.abort();
  const own = (running = new AbortController());
  labels.commit();
  clearComplaints();
  answer = new Answer();
  selected = 0;
  usage = "";
  tokens.clear();
  answers.clear();
  ranking.clear();
  draw();
  byId("stop").disabled = false;
  say("Running …");
  const mode = chosen("mode");
  const isWhole = mode === "decision" || mode === "rerank";
  try {
    const { path, body } = currentRequest();
    if (mode === "chat") conversation.begin(conversation.withText(byId("prompt").value, pictures.urls));
    if (mode === "decision") answers.draw(body.questions, await postJson(path, body, own.signal));
    else if (mode === "rerank") ranking.draw(body.documents, await postJson(path, body, own.signal));
    else await stream(path, body, own.signal);
    say("Done");
  } catch (error) {
    if (running !== own) return; // another run has begun
    if (error.name === "AbortError") {
      say(isWhole ? "Stopped" : `Stopped after ${plural(answer.tokens.length, "token")}`);
    } else {
      say("Failed");
      complain(error);
    }
  }
  if (mode === "chat") endTurn();
  finish();
}

/** Keeps what was said, and makes room for the next message. */
function endTurn() {
  if (!conversation.end(answer)) return;
  byId("prompt").value = "";
  pictures.clear();
  drawMode();
  drawCode();
}

async function stream(path, body, signal) {
  const start = performance.now();
  let first = null;
  for await (const chunk of postStream(path, streamed(body), signal)) {
    first ??= performance.now();
    answer.add(chunk);
    draw();
  }
  usage = describeUsage(first - start, performance.now() - start);
}

function finish() {
  running = null;
  const stop = byId("stop");
  if (document.activeElement === stop) byId("run").focus();
  stop.disabled = true;
  draft.save();
  draw();
}

function describeUsage(untilFirst, elapsed) {
  const numTokens = answer.tokens.length;
  const parts = [
    `${count(answer.usage.prompt_tokens)} prompt + ${plural(answer.usage.completion_tokens, "generated token")}`,
    `first after ${seconds(untilFirst)}, all after ${seconds(elapsed)}`,
  ];
  if (numTokens > 1) parts.push(`${((1000 * (numTokens - 1)) / (elapsed - untilFirst)).toPrecision(3)} tokens/s`);
  if (answer.finishReason) parts.push(`finish reason: ${answer.finishReason}`);
  return parts.join(" · ");
}

function say(text) {
  byId("status").textContent = text;
}

// ---- Showing

function select(position) {
  selected = position;
  draw();
}

const draw = perFrame(() => {
  if (chosen("mode") === "chat") conversation.draw(answer);
  tokens.draw(answer.tokens, selected);
  byId("usage").textContent = usage;
  byId("legend").hidden = answer.tokens.length === 0;
  showEmpty("text-empty", answer.tokens.length, "Every token appears here as it comes, with its rank and logprob.");
  showEmpty("labels-empty", answer.readings.length, "The labels' probabilities appear here, position by position.");
  showEmpty("fields-empty", Object.keys(answer.places ?? {}).length, "The values of the form's fields appear here.");
  fields.draw(answer.places);
  showEmpty("answers-empty", byId("answers").children.length, "Each question's options appear here.");
  showEmpty("ranking-empty", byId("ranking").children.length, "The documents appear here, the best first.");
  byId("labels-body").hidden = answer.readings.length === 0;
  if (answer.readings.length) drawReadings();
});

function showEmpty(id, length, text) {
  byId(id).hidden = length > 0;
  byId(id).textContent = running ? "Waiting for the server …" : text;
}

function drawReadings() {
  const ofAll = chosen("share") === "all";
  const position = byId("position");
  position.max = answer.readings.length;
  position.value = selected + 1;
  byId("position-value").textContent = positionText();
  bars.draw(answer, selected, ofAll);
  timeline.draw(answer, selected, ofAll);
  if (byId("numbers").open) numbers.draw(answer, ofAll);
}

function positionText() {
  const token = answer.tokens[selected];
  const place = `${count(selected + 1)} of ${count(answer.readings.length)}`;
  return token ? `${place}: ${visible(token.name)}` : place;
}

function drawCode() {
  const write = chosen("language") === "curl" ? curlOf : pythonOf;
  const isStream = byId("code-stream").checked && !["decision", "rerank"].includes(chosen("mode"));
  let request;
  try {
    request = currentRequest();
  } catch {
    return; // while JSON is typed, the last that was whole stays
  }
  byId("code").textContent = write(shortened(request), BASE, { stream: isStream, needsKey: apiKey.get() !== "" });
}

function drawMode() {
  const mode = chosen("mode");
  draft.show(mode);
  toolsField.drawChoices();
  for (const id of ["system-field", "tools-field", "chat-card"]) byId(id).hidden = mode !== "chat";
  const called = conversation.openCalls.map((call) => call.function.name).join(", ");
  const chat = called ? `Result of ${called}` : "User message";
  byId("prompt-label").textContent = { completion: "Prompt", chat, decision: "Input", rerank: "Query" }[mode];
  const isWhole = mode === "decision" || mode === "rerank";
  for (const id of ["labels-field", "sampling", "schema-field", "labels-card", "text-card", "code-stream-field"]) {
    byId(id).hidden = isWhole;
  }
  byId("fields-card").hidden = isWhole || byId("schema").value.trim() === "";
  pictures.show(readsPictures && (mode === "chat" || mode === "decision"));
  for (const id of ["questions-field", "answers-card"]) byId(id).hidden = mode !== "decision";
  for (const id of ["documents-field", "ranking-card"]) byId(id).hidden = mode !== "rerank";
}

// ---- The server

/** Leaves out the modes that the model cannot do. */
function offer(tasks) {
  const radios = [...document.getElementsByName("mode")];
  for (const radio of radios) radio.parentElement.hidden = !tasks.includes(TASKS[radio.value]);
  const possible = radios.filter((radio) => !radio.parentElement.hidden);
  byId("run").disabled = possible.length === 0;
  if (!possible.length) complain(new Error("This page has no view of what the model does; see docs."));
  else if (!possible.some((radio) => radio.checked)) possible[0].checked = true;
  drawMode();
}

async function meetServer() {
  const state = byId("server-state");
  try {
    const { data, models } = await getJson("v1/models");
    readsPictures = models[0].capabilities.includes("multimodal");
    byId("model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    byId("model-field").hidden = data.length === 1;
    state.textContent = `${data[0].id} · ${count(data[0].max_model_len)} tokens of context`;
    byId("key-panel").open = false;
    clearComplaints();
    offer(data[0].tasks);
    drawCode();
    labels.resolve();
    const { version } = await getJson("version");
    byId("version").textContent = `version ${version}`;
  } catch (error) {
    state.textContent = error.status === 401 ? "This server asks for a key" : error.message;
    if (error.status === 401) askForKey();
  }
}

// ---- Events

async function copy(button, text) {
  const name = button.textContent;
  await copyText(text);
  byId("copied").textContent = "Copied";
  button.textContent = "Copied";
  setTimeout(() => {
    button.textContent = name;
    byId("copied").textContent = "";
  }, 1500);
}

function listen() {
  const form = byId("form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  form.addEventListener("input", () => {
    drawMode();
    drawCode();
    draft.save();
  });
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    conversation.clear();
    drawMode();
    drawCode();
    draft.save();
    byId("prompt").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    } else if (event.key === "Escape") {
      running?.abort();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("position").addEventListener("input", (event) => select(event.target.valueAsNumber - 1));
  byId("numbers").addEventListener("toggle", draw);
  for (const radio of document.getElementsByName("share")) radio.addEventListener("change", draw);
  for (const radio of document.getElementsByName("language")) radio.addEventListener("change", drawCode);
  byId("code-stream").addEventListener("change", drawCode);
  byId("copy-code").addEventListener("click", (event) => copy(event.currentTarget, byId("code").textContent));
  byId("copy-ids").addEventListener("click", (event) => copy(event.currentTarget, ids.ids));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey.set(byId("api-key").value);
    meetServer();
  });
}

byId("api-key").value = apiKey.get();
draft.restore();
listen();
drawMode();
drawCode();
draw();
meetServer();
