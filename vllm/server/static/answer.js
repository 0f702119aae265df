// A generation as it comes in: what its chunks have in common between completions and chat.

export const TOP = 5;

export class Answer {
  /** Generated tokens: {text, name, id, logprob, rank, top: [{name, id, logprob}]}. `text` is what the token adds to
   *  the text: nothing, while a character is incomplete. `rank` is null where only "beyond the top 5" is known.
   *  `part`: reasoning, content or tool_call, where the server parts them. */
  tokens = [];
  /** The labels' readings, one a position. */
  readings = [];
  /** [{label, token_id}], in the order asked. */
  labels = [];
  usage = null;
  finishReason = null;
  /** {path: entries} of the values that the answer's form leaves to its places; null until the answer has ended. */
  places = null;
  /** Of a chat: what it says, its reasoning, and its calls, as messages have them. */
  content = "";
  reasoning = "";
  calls = [];
  #decoder = new TextDecoder();

  add(chunk) {
    if (chunk.labels) this.labels = chunk.labels;
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      if (choice.delta) this.#addDelta(choice.delta);
      if (choice.logprobs) this.tokens.push(...this.#tokensOf(choice.logprobs));
      if (choice.readings) this.readings.push(...choice.readings);
      if (choice.field_readings) this.places = choice.field_readings;
      if (choice.choice_readings) this.places = { choices: choice.choice_readings };
      if (choice.finish_reason) this.finishReason = choice.finish_reason;
    }
  }

  #addDelta({ content, reasoning, reasoning_content: older, tool_calls: calls }) {
    this.content += content ?? "";
    this.reasoning += reasoning ?? older ?? "";
    for (const { index, id, function: said } of calls ?? []) {
      const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += said?.name ?? "";
      call.function.arguments += said?.arguments ?? "";
    }
  }

  get numPositions() {
    return Math.max(this.tokens.length, this.readings.length);
  }

  /** Each label's share at a position, null where it has none: among the labels, or of the whole vocabulary. */
  shares(position, ofAll) {
    return this.labels.map(({ token_id: id }) => {
      const reading = this.readings[position]?.ids[id];
      if (!reading) return null;
      if (!ofAll) return reading.probability;
      return reading.logprob === null ? 0 : Math.exp(reading.logprob);
    });
  }

  #tokensOf(logprobs) {
    if (logprobs.content) return logprobs.content.map((entry) => this.#chatToken(entry));
    return logprobs.tokens.map((_, i) => completionToken(logprobs, i));
  }

  #chatToken(entry) {
    const text = entry.bytes ? this.#decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
    // The true top-k come first, then the labels.
    const top = entry.top_logprobs.slice(0, TOP);
    return {
      text,
      name: nameOf(entry),
      id: entry.token_id,
      logprob: entry.logprob,
      rank: entry.rank,
      part: entry.part ?? null,
      top: top.map((one) => ({ name: nameOf(one), id: one.token_id, logprob: one.logprob })),
    };
  }
}

/** A part of a character has no text, but bytes. */
function nameOf({ token, bytes }) {
  if (!bytes?.length || (token !== "" && !token.includes("\ufffd"))) return token;
  return bytes.map((byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
}

function completionToken({ tokens, token_ids: ids, token_logprobs: logprobs, top_logprobs: tops, ranks }, i) {
  // By text, the generated token, the labels and the true top-k in one: the most likely of them are the top-k.
  const top = Object.entries(tops[i])
    .map(([name, logprob]) => ({ name, id: null, logprob }))
    .sort((a, b) => b.logprob - a.logprob)
    .slice(0, TOP);
  const numLikelier = top.filter((one) => one.logprob > logprobs[i]).length;
  return {
    text: tokens[i],
    name: tokens[i] === "" ? "(part of a character)" : tokens[i],
    id: ids[i],
    logprob: logprobs[i],
    rank: ranks?.[i] ?? (numLikelier < TOP ? numLikelier + 1 : null),
    top,
  };
}
