// Uses the page as people do, and prints what it saw as JSON: {scenario: {...}}, {failed: stack} for one that broke.
// Environment: PAGE_URL, PAGE_KEY (the server's API key), PAGE_CHROMIUM, PAGE_MODULES (a folder with node_modules);
// PAGE_PICTURE: a PNG in base64, for the scenarios of a model that reads pictures.

import { createRequire } from "node:module";
import { join } from "node:path";

const { PAGE_URL, PAGE_KEY, PAGE_CHROMIUM, PAGE_MODULES } = process.env;
const { chromium } = createRequire(join(PAGE_MODULES, "/"))("playwright-core");
const NO_SANDBOX = process.getuid() === 0 ? ["--no-sandbox"] : [];

const visibleBars = (page) =>
  page.$$eval("#bars tr", (rows) =>
    rows.map((row) => {
      const meter = row.querySelector("[role=meter]");
      const width = meter.firstElementChild.getBoundingClientRect().width / meter.getBoundingClientRect().width;
      return {
        label: row.querySelector("th").innerText,
        tokenId: Number(row.dataset.tokenId),
        name: meter.getAttribute("aria-label"),
        value: Number(meter.getAttribute("aria-valuenow")),
        drawn: width,
        cells: [...row.querySelectorAll("td.num")].map((cell) => cell.innerText),
      };
    }),
  );

const facts = (page) =>
  page.$eval("#tip", (tip) => ({
    shown: tip.checkVisibility(),
    name: tip.querySelector(".tip-name").textContent,
    top: [...tip.querySelectorAll("tbody th")].map((cell) => cell.textContent),
    ...Object.fromEntries([...tip.querySelectorAll("dd")].map((fact) => [fact.dataset.fact, fact.textContent])),
  }));

/** Until what was asked to be drawn is drawn. */
const frame = (page) =>
  page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

const serverIsMet = (page) =>
  page.waitForFunction(() => document.getElementById("server-state").textContent !== "");

const focused = (page) => page.evaluate(() => document.activeElement.id);

const status = (page, pattern) =>
  page.waitForFunction((source) => new RegExp(source).test(document.getElementById("status").textContent), pattern);

/** The modes that the page offers for a model of these tasks, which one is chosen, and whether it can be run. */
async function offered(page, tasks) {
  await page.evaluate((given) => {
    const { fetch } = window;
    window.fetch = async (...request) => {
      const answer = await fetch(...request);
      if (!String(request[0]).endsWith("v1/models")) return answer;
      const list = await answer.json();
      list.data[0].tasks = given;
      window.fetch = fetch;
      return new Response(JSON.stringify(list), { status: 200 });
    };
  }, tasks);
  await page.click("#key-panel summary");
  await page.press("#api-key", "Enter");
  await page.waitForFunction(() => !document.getElementById("key-panel").open);
  await frame(page);
  const shown = await page.$$eval("input[name=mode]", (radios) =>
    radios.filter((radio) => !radio.parentElement.hidden).map((radio) => radio.value),
  );
  return { shown, runs: await page.isEnabled("#run"), alert: await page.textContent("#alert") };
}

/** Fills the form by keys alone, beginning in the prompt. */
async function typeRequest(page, { prompt, labels, maxTokens }) {
  await page.focus("#prompt");
  await page.keyboard.press("Control+A");
  await page.keyboard.insertText(prompt);
  await page.keyboard.press("Tab");
  while ((await focused(page)) !== "label-input") await page.keyboard.press("Tab"); // over the chips' own buttons
  while (await page.locator("#label-list li").count()) await page.keyboard.press("Backspace");
  for (const label of labels) {
    await page.keyboard.type(label);
    await page.keyboard.press("Enter");
  }
  await page.keyboard.press("Tab");
  await page.keyboard.press("Control+A");
  await page.keyboard.type(String(maxTokens));
}

async function submit(page) {
  await page.keyboard.press("Control+Enter");
  await status(page, "^Done$");
  await frame(page);
}

const REQUEST = { prompt: "Stop the clock \u{1f600} at", labels: [" the", "A", " stop"], maxTokens: 6 };

const DECISION = {
  input: "The screen came broken \u{1f600}.",
  questions: [
    { type: "predicate", name: "broken", instructions: "Is it broken?" },
    { type: "choice", instructions: "Who?", choices: [{ value: "me", description: null }, { value: true }, { value: "a b" }] },
    { type: "score", name: "much", instructions: "How much?", levels: [{ label: "no" }, { label: "a bit" }] },
  ],
};

const FORMS = {
  schema: {
    type: "object",
    properties: { mood: { enum: ["the <b>stop</b>", "the", null] }, sure: { type: "boolean" } },
    required: ["mood", "sure"],
    additionalProperties: false,
  },
  choices: [" the", " stop", "A b"],
};

const WEATHER = {
  name: "weather",
  description: "Of <b>today</b>",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

// As it comes, in pieces that cut words and marks.
const MARKDOWN = [
  "## Two *th",
  "ings*\n\n1. **bold** and `co<de>`\n2. a [link](https://example.org/a?b=1) and [no](javascript:window.hacked=1)\n",
  "\n```js\nif (a < b) { <script>\n```\n\n<img src=x onerror=\"window.hacked = 1\"> <script>window.hacked = 1</script>\n",
  "\n> quoted\n\n| a | b |\n|---|---|\n| 1 | ~~2~~ |\n\n![pic](https://example.org/p.png) 2 * 3 * 4, snake_case_name\n",
];

const RANKING = { query: "Where is <b>it</b>?", documents: ["the stop", "<i>on</i> the roof \u{1f600}", "no"] };

// Answers are replaced by replacing fetch(): after page.route(), the next request of an open page may still pass.

const scenarios = {
  async key(page) {
    await page.waitForSelector("#key-panel[open]");
    const refused = await page.textContent("#server-state");
    const asked = await focused(page);
    await page.keyboard.type("wrong");
    await page.keyboard.press("Enter");
    await page.waitForTimeout(300);
    const stillOpen = await page.$eval("#key-panel", (panel) => panel.open);
    await page.fill("#api-key", PAGE_KEY);
    await page.keyboard.press("Enter");
    await page.waitForSelector("#key-panel:not([open])");
    await page.waitForFunction(() => document.querySelectorAll(".chip-id")[1].textContent !== "");
    const kept = await page.evaluate(() => [Object.values(sessionStorage), localStorage.length, document.cookie]);
    return { refused, focused: asked, stillOpen, kept, accepted: await page.textContent("#server-state") };
  },

  async completion(page) {
    await typeRequest(page, REQUEST);
    await submit(page);
    await page.waitForTimeout(300); // bars glide
    const bars = await visibleBars(page);
    const mass = Number(await page.getAttribute("#mass", "aria-valuenow"));
    const text = await page.$$eval("#tokens .token", (nodes) => nodes.map((node) => node.getAttribute("aria-label")));
    const lines = await page.locator("#timeline path").count();
    const described = await page.getAttribute("#timeline", "aria-label");
    await page.focus("#tokens [tabindex='0']");
    const tokens = [await facts(page)];
    for (let i = 1; i < text.length; i++) {
      await page.keyboard.press("ArrowRight");
      tokens.push(await facts(page));
    }
    await frame(page);
    const lastBars = await visibleBars(page);
    const lastPosition = await page.inputValue("#position");
    await page.keyboard.press("Escape");
    const hidden = await page.isHidden("#tip");
    await page.focus("#position");
    await page.keyboard.press("Home");
    await page.focus("input[name=share]");
    await page.keyboard.press("ArrowRight");
    await page.focus("#numbers summary");
    await page.keyboard.press("Enter");
    await page.waitForSelector("#numbers-body tr");
    const ofAll = (await visibleBars(page)).map((bar) => bar.value);
    const numbers = await page.$$eval("#numbers-body tr", (rows) => rows.map((row) => row.innerText.split("\t")));
    const usage = await page.textContent("#usage");
    const chips = await page.$$eval("#label-list li", (items) => items.map((item) => item.innerText.split("\n")));
    return { bars, mass, text, lines, described, tokens, lastBars, lastPosition, hidden, ofAll, numbers, usage, chips };
  },

  async chat(page) {
    await page.focus("input[name=mode]");
    await page.keyboard.press("ArrowRight");
    await typeRequest(page, REQUEST);
    await page.fill("#system", "Be brief.");
    await submit(page);
    return { bars: await visibleBars(page) };
  },

  async tools(page) {
    const seen = { hidden: await page.isHidden("#tools-field") };
    await page.check("input[name=mode][value=chat]", { force: true });
    await typeRequest(page, REQUEST);
    await page.fill("#tools", "[");
    await page.keyboard.press("Control+Enter");
    await status(page, "^Failed$");
    seen.refused = { text: await page.textContent("#tools-error"), focused: await focused(page) };
    const tool = { type: "function", function: WEATHER };
    for (const given of [WEATHER, [tool, { ...WEATHER, name: "now" }], ""]) {
      await page.fill("#tools", given && JSON.stringify(given));
      await page.fill("#prompt", REQUEST.prompt);
      await submit(page);
      await page.click("#new-chat");
    }
    await page.fill("#tools", JSON.stringify(WEATHER));
    await page.fill("#prompt", REQUEST.prompt);
    await page.check("input[name=language][value=python]", { force: true });
    seen.code = await page.textContent("#code");
    return seen;
  },

  async sampling(page) {
    const seen = {};
    await page.check("input[name=mode][value=chat]", { force: true });
    await page.fill("#tools", JSON.stringify([WEATHER, { ...WEATHER, name: "now" }]));
    seen.choices = await page.$$eval("#tool-choice option", (options) => options.map(({ value }) => value));
    await page.fill("#max-tokens", "4");
    await page.fill("#top-p", "0.5");
    await page.fill("#stop-texts", "END\n\\n\\n\n");
    for (const choice of ["none", "now"]) {
      await page.selectOption("#tool-choice", choice);
      await page.fill("#prompt", "A");
      seen.code = await page.textContent("#code");
      await submit(page);
      // A call that was cut is no answer, of which nothing is kept.
      if (await page.isEnabled("#new-chat")) await page.click("#new-chat");
    }
    await page.fill("#prompt", "A");
    await page.fill("#top-p", "7");
    await page.keyboard.press("Control+Enter");
    await status(page, "^Failed$");
    seen.refused = { text: await page.textContent("#top-p-error"), focused: await focused(page) };
    return seen;
  },

  async conversation(page) {
    const seen = { examples: {} };
    for (const mode of ["chat", "decision", "rerank", "completion", "chat"]) {
      await page.check(`input[name=mode][value=${mode}]`, { force: true });
      seen.examples[mode] = await page.inputValue("#prompt");
    }
    // Answers are written here; what is asked is kept.
    const answers = (pieces) =>
      page.evaluate((pieces) => {
        const { fetch } = window;
        window.sent = window.sent ?? [];
        window.fetch = async (address, options) => {
          if (!String(address).endsWith("v1/chat/completions")) return fetch(address, options);
          window.sent.push(JSON.parse(options.body));
          const chunks = pieces.map((delta) => ({ choices: [{ index: 0, delta }] }));
          chunks.push({ choices: [], usage: { prompt_tokens: 1, completion_tokens: 1 } });
          const lines = chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`);
          window.fetch = fetch;
          return new Response(`${lines.join("")}data: [DONE]\n\n`, { status: 200 });
        };
      }, pieces);
    const say = async (text, ...pieces) => {
      await answers(pieces);
      await page.fill("#prompt", text);
      await submit(page);
    };
    await say("<b>Hello</b>", ...MARKDOWN.map((content) => ({ content })));
    seen.turns = await page.$$eval("#turns .turn", (nodes) => nodes.map((node) => node.querySelector(".said").innerHTML));
    if (process.env.PAGE_SHOTS) await page.screenshot({ path: `${process.env.PAGE_SHOTS}/chat.png`, fullPage: true });
    seen.prompt = await page.inputValue("#prompt");
    seen.links = await page.$$eval("#turns a", (nodes) => nodes.map((node) => [node.href, node.rel, node.textContent]));
    const call = { index: 0, id: "call-1", type: "function", function: { name: "weather", arguments: '{"city": ' } };
    await say("And?", { tool_calls: [call] }, { tool_calls: [{ index: 0, function: { arguments: '"Oslo"}' } }] });
    seen.label = await page.textContent("#prompt-label");
    seen.call = await page.textContent("#turns .turn:last-child pre");
    await say("rain", { content: "It **rains**." });
    seen.sent = await page.evaluate(() => window.sent.map((body) => body.messages));
    await page.fill("#prompt", "a draft");
    await page.fill("#system", "Be brief.");
    await page.fill("#top-p", "0.5");
    await page.reload();
    await serverIsMet(page);
    seen.after = {
      mode: await page.$eval("input[name=mode]:checked", (radio) => radio.value),
      prompt: await page.inputValue("#prompt"),
      system: await page.inputValue("#system"),
      topP: await page.inputValue("#top-p"),
      turns: await page.$$eval("#turns .turn .said", (nodes) => nodes.map((node) => node.textContent)),
    };
    await page.check("input[name=mode][value=completion]", { force: true });
    seen.completion = await page.inputValue("#prompt");
    await page.check("input[name=mode][value=chat]", { force: true });
    await page.click("#new-chat");
    seen.cleared = { turns: await page.locator("#turns .turn").count(), prompt: await page.inputValue("#prompt") };
    seen.hacked = await page.evaluate(() => window.hacked ?? null);
    return seen;
  },

  async fields(page) {
    const seen = {};
    await page.fill("#schema", "{");
    await page.keyboard.press("Control+Enter");
    await status(page, "^Failed$");
    seen.refused = { text: await page.textContent("#schema-error"), focused: await focused(page) };
    for (const [name, form] of Object.entries(FORMS)) {
      await typeRequest(page, { ...REQUEST, labels: [], maxTokens: 60 });
      await page.fill("#schema", JSON.stringify(form));
      await submit(page);
      await page.waitForTimeout(300); // bars glide
      seen[name] = await page.$$eval("#fields article", (nodes) =>
        nodes.map((node) => ({
          path: node.querySelector("h3").textContent,
          values: [...node.querySelectorAll("tbody tr")].map((row) => {
            const meter = row.querySelector("[role=meter]");
            return {
              name: row.querySelector("th").innerText,
              elements: row.querySelectorAll("th *").length,
              best: row.classList.contains("best"),
              value: Number(meter.getAttribute("aria-valuenow")),
              drawn: meter.firstElementChild.getBoundingClientRect().width / meter.getBoundingClientRect().width,
              cells: [...row.querySelectorAll("td.num")].map((cell) => cell.innerText),
            };
          }),
        })),
      );
      await page.check("input[name=language][value=python]", { force: true });
      seen[`${name}Code`] = await page.textContent("#code");
    }
    await page.fill("#schema", "");
    seen.hidden = await page.isHidden("#fields-card");
    return seen;
  },

  async rerank(page) {
    await page.check("input[name=mode][value=rerank]", { force: true });
    const sample = (await page.inputValue("#documents")).split("\n").length;
    await page.fill("#prompt", RANKING.query);
    await page.fill("#documents", `${RANKING.documents.join("\n")}\n\n`);
    await submit(page);
    await page.waitForTimeout(300); // bars glide
    const rows = await page.$$eval("#ranking tbody tr", (nodes) =>
      nodes.map((row) => {
        const meter = row.querySelector("[role=meter]");
        return {
          text: row.querySelector("th").textContent,
          elements: row.querySelector("th").childElementCount,
          value: Number(meter.getAttribute("aria-valuenow")),
          drawn: meter.firstElementChild.getBoundingClientRect().width / meter.getBoundingClientRect().width,
          cells: [...row.querySelectorAll("td.num")].map((cell) => cell.innerText),
        };
      }),
    );
    const hidden = [];
    for (const id of ["labels-card", "text-card", "answers-card", "sampling"]) hidden.push(await page.isHidden(`#${id}`));
    const code = {};
    for (const language of ["curl", "python"]) {
      await page.check(`input[name=language][value=${language}]`, { force: true });
      code[language] = await page.textContent("#code");
    }
    const usage = await page.textContent("#ranking-usage");
    const modes = {};
    for (const tasks of [["embed", "score", "pool"], ["token_classify", "pool"]]) {
      modes[tasks[0]] = await offered(page, tasks);
    }
    return { sample, rows, hidden, code, usage, modes };
  },

  async decision(page) {
    await page.check("input[name=mode][value=decision]", { force: true });
    const sample = JSON.parse(await page.inputValue("#questions"));
    await page.fill("#prompt", DECISION.input);
    await page.fill("#questions", "[{");
    await page.keyboard.press("Control+Enter");
    await status(page, "^Failed$");
    const refused = { text: await page.textContent("#questions-error"), focused: await focused(page) };
    await page.fill("#questions", JSON.stringify(DECISION.questions));
    await submit(page);
    await page.waitForTimeout(300); // bars glide
    const answers = await page.$$eval("#answers article", (nodes) =>
      nodes.map((node) => ({
        title: node.querySelector("h3").firstChild.textContent,
        result: node.querySelector(".result").textContent,
        mass: Number(node.querySelector(".mass [role=meter]").getAttribute("aria-valuenow")),
        options: [...node.querySelectorAll("tbody tr")].map((row) => {
          const meter = row.querySelector("[role=meter]");
          return {
            name: row.querySelector("th").innerText,
            value: Number(meter.getAttribute("aria-valuenow")),
            drawn: meter.firstElementChild.getBoundingClientRect().width / meter.getBoundingClientRect().width,
            cells: [...row.querySelectorAll("td.num")].map((cell) => cell.innerText),
          };
        }),
      })),
    );
    const hidden = [];
    for (const id of ["labels-card", "text-card", "labels-field", "sampling"]) hidden.push(await page.isHidden(`#${id}`));
    const code = {};
    for (const language of ["curl", "python"]) {
      await page.check(`input[name=language][value=${language}]`, { force: true });
      code[language] = await page.textContent("#code");
    }
    return { sample, refused, answers, hidden, code, error: await page.textContent("#questions-error") };
  },

  async hover(page) {
    const seen = {};
    await page.evaluate(() => {
      const { fetch } = window;
      window.fetch = async (address, options) => {
        if (!address.includes("/v1/")) return fetch(address, options);
        const body = JSON.stringify({ ...JSON.parse(options.body), seed: 1, ignore_eos: true });
        const response = await fetch(address, { ...options, body });
        window.lastStream = await response.text();
        return new Response(window.lastStream, response);
      };
    });
    for (const mode of ["completion", "chat"]) {
      await page.check(`input[name=mode][value=${mode}]`, { force: true });
      await typeRequest(page, REQUEST);
      await page.fill("#temperature", "3"); // so that unlikely tokens come, too, and the same each time
      await submit(page);
      const tips = [];
      await page.locator("#tokens").scrollIntoViewIfNeeded(); // scrolling closes an explanation
      await frame(page);
      for (let i = 1; i <= REQUEST.maxTokens; i++) {
        await page.hover(`#tokens .token:nth-child(${i})`);
        tips.push(await facts(page));
      }
      await page.mouse.move(5, 5);
      await page.waitForSelector("#tip", { state: "hidden" });
      seen[mode] = { stream: await page.evaluate(() => window.lastStream), tips };
    }
    return seen;
  },

  async next(page) {
    await typeRequest(page, { ...REQUEST, maxTokens: 0 });
    await submit(page);
    return { bars: await visibleBars(page), tokens: await page.locator("#tokens .token").count() };
  },

  async ids(page) {
    const text = "Once the\n\tstop  \u{1f600} <s> \u4f60";
    await page.focus("#ids-text");
    await page.keyboard.insertText(text);
    await page.waitForSelector("#ids li");
    const items = await page.$$eval("#ids li", (all) =>
      all.map((item) => [...item.children].map((part) => part.textContent)),
    );
    const count = await page.textContent("#ids-count");
    await page.click("#copy-ids");
    const copied = await page.evaluate(() => navigator.clipboard.readText());
    return { text, items, count, copied };
  },

  async code(page) {
    await typeRequest(page, REQUEST);
    await page.fill("#temperature", "0");
    const seen = {};
    for (const language of ["curl", "python"]) {
      await page.check(`input[name=language][value=${language}]`);
      for (const stream of [false, true]) {
        await page.setChecked("#code-stream", stream);
        await page.click("#copy-code");
        seen[`${language}${stream ? "-stream" : ""}`] = await page.evaluate(() => navigator.clipboard.readText());
      }
    }
    return seen;
  },

  async quoting(page) {
    return page.evaluate(async () => {
      const { requestOf, curlOf, pythonOf } = await import("./static/request.js");
      const texts = [
        "plain",
        "it's \"quoted\" `too`",
        "a\nb\r\n\tc\n",
        "\n\n",
        "$HOME $(id) !! \\ \\n \\u0041 %s {x}",
        "\u{1f600} \u4f60\u597d \u00e9",
        "'''\"\"\"",
        "\u0000\u0001\u001b[31m\u007f\u0085",
        "\u202eright to left\u200b\u2028\ufeff",
        "\ud800 alone \udc00",
        "#{1} -- ; & | > <",
        "trailing \\",
        "",
      ];
      const cases = texts.flatMap((text) =>
        ["completion", "chat"].map((mode) => {
          const texts = { model: text, system: text, prompt: text, labels: [text, "b"] };
          const request = requestOf({ mode, ...texts, maxTokens: NaN, temperature: 0.5 });
          const options = { stream: false, needsKey: false };
          const base = "http://127.0.0.1:1/";
          return { request, curl: curlOf(request, base, options), python: pythonOf(request, base, options) };
        }),
      );
      return { cases };
    });
  },

  async events(page) {
    return page.evaluate(async () => {
      const { events } = await import("./static/sse.js");
      const text =
        ': note\r\ndata: {"a":"\u{1f600}"}\r\n\r\ndata:two\ndata: lines\n\n' +
        "event: x\rdata: \u4f60\r\rdata: [DONE]\n\ndata: cut";
      const bytes = new TextEncoder().encode(text);
      const read = async (...parts) => {
        const found = [];
        const stream = new ReadableStream({
          start(controller) {
            parts.forEach((part) => controller.enqueue(part));
            controller.close();
          },
        });
        for await (const data of events(stream)) found.push(data);
        return JSON.stringify(found);
      };
      const seen = new Set([await read(...Array.from(bytes, (byte) => new Uint8Array([byte])))]);
      for (let i = 0; i <= bytes.length; i++) seen.add(await read(bytes.slice(0, i), bytes.slice(i)));
      return { readings: [...seen].map((one) => JSON.parse(one)) };
    });
  },

  async errors(page) {
    const seen = {};
    const failure = async (control) => {
      await page.keyboard.press("Control+Enter");
      await status(page, "^Failed$");
      return {
        text: control ? await page.textContent(`#${control}-error`) : await page.textContent("#alert"),
        focused: await focused(page),
        invalid: control ? await page.getAttribute(`#${control}`, "aria-invalid") : null,
      };
    };
    seen.labels = await failure("label-input"); // the page's own labels are several tokens of this model
    await page.waitForSelector(".chip.invalid:nth-child(2)");
    await typeRequest(page, { ...REQUEST, labels: ["A"], maxTokens: -3 });
    seen.maxTokens = await failure("max-tokens");
    await page.fill("#max-tokens", "4");
    const answer = (body) =>
      page.evaluate((body) => {
        const { fetch } = window;
        window.fetch = async () => {
          window.fetch = fetch;
          return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
        };
      }, body);
    const event = (data) => `data: ${JSON.stringify(data)}\n\n`;
    const token = { text_offset: [0], tokens: ["<b>x"], token_ids: [5], ranks: [7] };
    const logprobs = { ...token, token_logprobs: [-1], top_logprobs: [{ "<b>x": -1 }] };
    const chunk = event({ choices: [{ index: 0, text: "<b>x", logprobs }] });
    const error = { message: "the model <i>failed</i>", type: "internal_error", param: null, code: null };
    await answer(`${chunk}${event({ error })}data: [DONE]\n\n`);
    seen.inside = await failure();
    await frame(page);
    seen.kept = await page.$$eval("#tokens .token", (nodes) =>
      nodes.map((node) => [node.textContent, node.children.length, node.getAttribute("aria-label")]),
    );
    await answer(chunk);
    seen.cut = await failure();
    await page.keyboard.press("Control+Enter");
    await status(page, "^Done$");
    seen.after = await page.isHidden("#alert");
    await page.check("input[name=mode][value=decision]", { force: true });
    await page.fill("#questions", JSON.stringify([{ ...DECISION.questions[1], choices: [{ value: "one" }] }]));
    seen.questions = await failure("questions");
    await page.check("input[name=mode][value=rerank]", { force: true });
    await page.fill("#documents", "\n");
    seen.documents = await failure("documents");
    return seen;
  },

  async stop(page) {
    await typeRequest(page, { ...REQUEST, maxTokens: 60000 });
    await page.keyboard.press("Control+Enter");
    await page.waitForSelector("#tokens .token:nth-child(3)");
    const during = { status: await page.textContent("#status"), bars: (await visibleBars(page)).length };
    // A click waits for frames, which are rare while all cores are busy: the request would end before it.
    await page.focus("#stop");
    await page.keyboard.press("Enter");
    await status(page, "^Stopped after");
    await frame(page);
    const shown = await page.locator("#tokens .token").count();
    const isIdle = async () => (await (await fetch(`${PAGE_URL}/load`)).json()).server_load === 0;
    while (!(await isIdle())) await page.waitForTimeout(20);
    return { during, shown, status: await page.textContent("#status"), focused: await focused(page) };
  },

  async schemes(page) {
    const seen = {};
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      seen[colorScheme] = await page.evaluate(() =>
        ["body", ".card", "#prompt"].map((selector) => {
          const style = getComputedStyle(document.querySelector(selector));
          return [style.backgroundColor, style.color];
        }),
      );
    }
    await page.setViewportSize({ width: 360, height: 700 });
    seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    return seen;
  },

  async prefix(page) {
    await page.route("**/some/where/**", (route) => {
      route.continue({ url: route.request().url().replace("/some/where", "") });
    });
    const paths = [];
    page.on("request", (request) => paths.push(new URL(request.url()).pathname));
    await page.goto(`${PAGE_URL}/some/where/`);
    await serverIsMet(page);
    await typeRequest(page, REQUEST);
    await submit(page);
    return { paths, bars: (await visibleBars(page)).length, code: await page.textContent("#code") };
  },
};

// Of a model that reads pictures.
const ofPictures = {
  async pictures(page) {
    const seen = { completion: await page.isHidden("#pictures-field") };
    await page.check("input[name=mode][value=chat]", { force: true });
    await typeRequest(page, { prompt: "what", labels: ["a", "b"], maxTokens: 1 });
    const drop = (name, data, target) =>
      page.evaluate(
        ([name, data, target]) => {
          const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], name, { type: "image/png" }));
          const drop = new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
          document.querySelector(target).dispatchEvent(drop);
        },
        [name, data, target],
      );
    const names = (count) =>
      page.waitForFunction((count) => document.querySelectorAll("#picture-list li").length === count, count);
    await drop("first.png", process.env.PAGE_PICTURE, "#prompt");
    await names(1);
    await drop("other.png", process.env.PAGE_PICTURE, "#pictures-field");
    await names(2);
    seen.names = await page.$$eval("#picture-list .chip-text", (nodes) => nodes.map((node) => node.textContent));
    seen.drawn = await page.$eval("#picture-list canvas", (canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.some((value) => value > 0);
    });
    await page.click("#picture-list li:nth-child(2) button");
    await names(1);
    seen.code = await page.textContent("#code");
    await page.focus("#prompt");
    await submit(page);
    seen.bars = await visibleBars(page);
    seen.said = await page.textContent("#turns .user .said");
    seen.left = await page.locator("#picture-list li").count();
    await page.check("input[name=mode][value=decision]", { force: true });
    await page.fill("#questions", JSON.stringify([DECISION.questions[0]]));
    await drop("first.png", process.env.PAGE_PICTURE, "#prompt");
    await names(1);
    await page.focus("#prompt");
    await submit(page);
    seen.answers = await page.textContent("#answers");
    return seen;
  },
};

const browser = await chromium.launch({ executablePath: PAGE_CHROMIUM, args: NO_SANDBOX });
const results = {};
for (const [name, scenario] of Object.entries(process.env.PAGE_PICTURE ? ofPictures : scenarios)) {
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"] });
  context.setDefaultTimeout(15000);
  if (name !== "key") await context.addInitScript((key) => sessionStorage.setItem("vllm-api-key", key), PAGE_KEY);
  const page = await context.newPage();
  const hosts = new Set();
  const complaints = [];
  const bodies = [];
  page.on("request", (request) => {
    hosts.add(new URL(request.url()).host);
    if (request.postData() && request.url().includes("/v1/")) bodies.push(request.postDataJSON());
  });
  page.on("console", (message) => complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.stack));
  try {
    await page.goto(PAGE_URL);
    await serverIsMet(page);
    results[name] = await scenario(page);
  } catch (error) {
    results[name] = { failed: error.stack };
  }
  results[name].log = { hosts: [...hosts], complaints, bodies };
  await context.close();
}
await browser.close();
console.log(JSON.stringify(results));
