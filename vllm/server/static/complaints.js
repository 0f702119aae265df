// The server's complaints, each beside the field that it is about.

import { byId } from "./dom.js";

// The control for each field of a request.
const CONTROLS = {
  model: "model",
  prompt: "prompt",
  messages: "prompt",
  tools: "tools",
  tool_choice: "tool-choice",
  top_p: "top-p",
  stop: "stop-texts",
  labels: "label-input",
  max_tokens: "max-tokens",
  temperature: "temperature",
  structured_outputs: "schema",
  choice_readings: "schema",
  field_readings: "schema",
  input: "prompt",
  questions: "questions",
  query: "prompt",
  documents: "documents",
};

const noteOf = (control) => byId(`${control}-error`);

export function clearComplaints() {
  byId("alert").hidden = true;
  for (const control of new Set(Object.values(CONTROLS))) {
    byId(control).removeAttribute("aria-invalid");
    noteOf(control).textContent = "";
  }
}

/** Shows an error of a run, and takes the keyboard to where it can be mended. */
export function complain(error) {
  if (error.status === 401) askForKey();
  const control = CONTROLS[error.param?.split(/[.[]/)[0]];
  if (control && byId(control).checkVisibility()) {
    noteOf(control).textContent = error.message;
    byId(control).setAttribute("aria-invalid", "true");
    byId(control).focus();
    return;
  }
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  byId("alert").textContent = error.message + again;
  byId("alert").hidden = false;
}

export function askForKey() {
  byId("key-panel").open = true;
  byId("api-key").focus();
}
