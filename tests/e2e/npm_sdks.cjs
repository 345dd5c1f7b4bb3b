// npm's SDKs against a server with scripted_model.py: each check's assertions are a test.
// Arguments: the server's URL and the names of checks. Prints the error of each that fails by its name, as JSON.
// NODE_PATH names the directory that holds the packages.

const assert = require("node:assert/strict");
const Anthropic = require("@anthropic-ai/sdk");
const OpenAI = require("openai");
const { generateText, streamText, tool, stepCountIs, Output } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const [server, ...names] = process.argv.slice(2);
const model = "scripted";
const apiKey = "sk-unused";
const baseURL = `${server}/v1`;
const thoughts = "The city is named.";
const think = `<think>\n${thoughts}\n</think>\n\n`;
const call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>';
const answer = "It is sunny in Paris.";
const paris = { city: "Paris" };
const weather = ({ city }) => `sunny in ${city}`;
const say = (...replies) => `Say: ${JSON.stringify(replies)}`;
const task = say(think + call, think + answer);
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const City = z.object({ city: z.string() });
const tools = { get_weather: tool({ description: "Gets the weather.", inputSchema: City, execute: weather }) };

// The loop of tools, streamed and whole, and an object by a schema, with a model of the Vercel AI SDK.
async function vercel(languageModel, providerOptions) {
  const asked = { model: languageModel, system: "Be brief.", maxRetries: 0, providerOptions };
  const whole = await generateText({ ...asked, prompt: task, tools, stopWhen: stepCountIs(3) });
  const stream = streamText({ ...asked, prompt: task, tools, stopWhen: stepCountIs(3) });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, answer);
  for (const result of [whole, stream]) {
    assert.equal(await result.text, answer);
    assert.equal(await result.finishReason, "stop");
    const [first, second] = await result.steps;
    assert.deepEqual(first.toolCalls.map(({ toolName, input }) => [toolName, input]), [["get_weather", paris]]);
    assert.deepEqual(first.toolResults.map(({ output }) => output), ["sunny in Paris"]);
    assert.equal(first.finishReason, "tool-calls");
    assert.ok(second.usage.outputTokens > 0);
  }
  const wanted = { tools, stopWhen: stepCountIs(3), output: Output.object({ schema: City }) };
  const object = await generateText({ ...asked, ...wanted, prompt: say(think + call, JSON.stringify(paris)) });
  assert.deepEqual(object.output, paris);
  return whole;
}

const checks = {
  async checkVercelChat() {
    await vercel(createOpenAI({ baseURL, apiKey }).chat(model));
  },

  async checkVercel() {
    const languageModel = createOpenAI({ baseURL, apiKey })(model);
    await vercel(languageModel);
    const openai = { store: false, reasoningSummary: "auto", forceReasoning: true };
    const { reasoningText, response, steps } = await vercel(languageModel, { openai });
    assert.equal(reasoningText, thoughts);
    const sentBack = steps[1].request.body.input.find(({ type }) => type === "reasoning");
    assert.deepEqual(sentBack.summary, [{ type: "summary_text", text: thoughts }]);
    const messages = [{ role: "user", content: task }, ...response.messages, { role: "user", content: say("Yes.") }];
    assert.equal((await generateText({ model: languageModel, messages, providerOptions: { openai } })).text, "Yes.");
    const stored = generateText({ model: languageModel, messages, maxRetries: 0 });
    await assert.rejects(stored, ({ message, statusCode }) => statusCode === 400 && message.includes("store"));
  },

  async checkOpenAI() {
    const { responses } = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
    const weatherTool = { type: "function", name: "get_weather", parameters: schema, strict: true };
    const asked = { model, tools: [weatherTool], reasoning: { effort: "low" } };
    const streamed = await responses.stream({ ...asked, input: task }).finalResponse();
    for (const first of [streamed, await responses.create({ ...asked, input: task })]) {
      assert.deepEqual(first.output.map(({ type }) => type), ["reasoning", "function_call"]);
      const [reasoning, { call_id, arguments: given }] = first.output;
      assert.equal(reasoning.content[0].text, thoughts);
      assert.deepEqual(JSON.parse(given), paris);
      const result = { type: "function_call_output", call_id, output: weather(paris) };
      const input = [{ role: "user", content: task }, ...first.output, result];
      assert.equal((await responses.create({ ...asked, input })).output_text, answer);
    }
    const format = { type: "json_schema", name: "city", schema, strict: true };
    const parsed = await responses.parse({ model, input: say(JSON.stringify(paris)), text: { format } });
    assert.deepEqual(parsed.output_parsed, paris);
  },

  async checkAnthropic() {
    const { messages } = new Anthropic({ baseURL: server, apiKey, maxRetries: 0 });
    const weatherTool = { name: "get_weather", description: "Gets the weather.", input_schema: schema };
    const asked = { model, max_tokens: 5000, tools: [weatherTool], thinking: { type: "enabled", budget_tokens: 1024 } };
    const turns = [{ role: "user", content: task }];
    const streamed = await messages.stream({ ...asked, messages: turns }).finalMessage();
    for (const first of [streamed, await messages.create({ ...asked, messages: turns })]) {
      assert.deepEqual(first.content.map(({ type }) => type), ["thinking", "tool_use"]);
      const [{ thinking }, { id, input }] = first.content;
      assert.deepEqual([thinking, input, first.stop_reason], [thoughts, paris, "tool_use"]);
      const result = { type: "tool_result", tool_use_id: id, content: weather(paris) };
      const history = [...turns, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
      const last = await messages.create({ ...asked, messages: history });
      assert.equal(last.content[1].text, answer);
      assert.ok((await messages.countTokens({ model, messages: history })).input_tokens > 0);
    }
  },
};

async function main() {
  const failures = {};
  for (const name of names) {
    try {
      await checks[name]();
    } catch (error) {
      failures[name] = error.stack;
    }
  }
  console.log(JSON.stringify(failures));
}

main();
