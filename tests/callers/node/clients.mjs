// Chat, responses and messages by the packages "openai" and "@anthropic-ai/sdk". Prints one line of JSON.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const anthropic = new Anthropic({ baseURL: url, apiKey: "unused" });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const called = { parallel_tool_calls: false, tool_choice: "required" };
const asked = { model: "tiny", input: "Hello", max_output_tokens: 8, temperature: 0, ignore_eos: true };

const response = await openai.responses.create(asked);
let streamed = "";
const stream = await openai.responses.create({ ...asked, stream: true });
for await (const event of stream) if (event.type === "response.output_text.delta") streamed += event.delta;

const calling = await openai.responses
  .stream({
    model: "tiny",
    input: "Weather?",
    max_output_tokens: 200,
    tools: [{ type: "function", name: "weather", strict: true, parameters: schema }],
    ...called,
  })
  .finalResponse();

const chat = openai.chat.completions.stream({
  model: "tiny",
  messages: [{ role: "user", content: "Weather?" }],
  max_tokens: 200,
  tools: [{ type: "function", function: { name: "weather", parameters: schema } }],
  ...called,
});
const chosen = (await chat.finalChatCompletion()).choices[0];

const message = await anthropic.messages
  .stream({
    model: "tiny",
    max_tokens: 200,
    messages: [{ role: "user", content: "Weather?" }],
    tools: [{ name: "weather", input_schema: schema }],
    tool_choice: { type: "any", disable_parallel_tool_use: true },
  })
  .finalMessage();

let refused = null;
try {
  await openai.responses.create({ ...asked, background: true });
} catch (error) {
  refused = [error.status, error.param];
}

const found = {
  text: response.output_text,
  streamed,
  responses: JSON.parse(calling.output.find((item) => item.type === "function_call").arguments),
  chat: JSON.parse(chosen.message.tool_calls[0].function.arguments),
  reason: chosen.finish_reason,
  messages: message.content.find((block) => block.type === "tool_use").input,
  stop: message.stop_reason,
  refused,
};
console.log(JSON.stringify(found));
