// npm's SDKs against a server with scripted_model.py: each check's assertions are a test.
// Arguments: the server's URL and the names of checks. Prints the error of each that fails by its name, as JSON.
// NODE_PATH names the directory that holds the packages.

const assert = require("node:assert/strict");
const OpenAI = require("openai");
const { generateText, streamText, tool, stepCountIs, Output } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

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
  const object = await generateText({
    ...asked, prompt: say(think + JSON.stringify(paris)), output: Output.object({ schema: City }),
  });
  assert.deepEqual(object.output, paris);
  return whole;
}

const checks = {
  async checkVercelChat() {
    await vercel(createOpenAI({ baseURL, apiKey }).chat(model));
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
