// The npm SDK of OpenAI against a server: every call's outcome as one JSON object on stdout. Knows no expectations.
// Arguments: the base URL, an API key, the model. NODE_PATH names the directory that holds the package.

const OpenAI = require("openai");

const [baseURL, apiKey, model] = process.argv.slice(2);
let attempts = [];
const counting = async (url, options) => {
  const response = await fetch(url, options);
  attempts.push([response.status, response.headers.get("retry-after")]);
  return response;
};
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, fetch: counting });
const prompt = "The scheduler decides which sequences";
const messages = [{ role: "user", content: "What does os.path.join do?" }];
const fixed = { model, max_tokens: 16, temperature: 0 };

async function outcome(call) {
  try {
    return await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param, type: error.type };
  }
}

async function streamed(call, pick) {
  let text = "";
  let finish = null;
  let usage = null;
  for await (const chunk of await call) {
    if (chunk.usage) usage = chunk.usage;
    for (const choice of chunk.choices) {
      text += pick(choice) ?? "";
      finish = choice.finish_reason ?? finish;
    }
  }
  return { text, finish, usage };
}

async function cancelled() {
  const long = { model, prompt, max_tokens: 900, ignore_eos: true, stream: true };
  const stream = await client.completions.create(long);
  let chunks = 0;
  for await (const _ of stream) {
    if (++chunks === 3) break; // leaving the loop aborts the request
  }
  return { chunks };
}

async function retried() {
  const long = { model, prompt, max_tokens: 900, ignore_eos: true, stream: true };
  const patient = { maxRetries: 5 }; // who was left before is gone in a moment, and the place is free then
  const stream = await client.completions.create(long, patient);
  for await (const _ of stream) break;
  const holding = await client.completions.create(long, patient);
  const iterator = holding[Symbol.asyncIterator]();
  await iterator.next();
  attempts = [];
  const waiting = client.completions.create({ ...fixed, prompt }, { maxRetries: 5 });
  while (attempts.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
  holding.controller.abort();
  const answer = await waiting;
  return { text: answer.choices[0].text, attempts };
}

async function main() {
  const results = {};
  const stream = { stream: true, stream_options: { include_usage: true } };
  results.models = await outcome(async () => (await client.models.list()).data.map((entry) => entry.id));
  results.model = await outcome(async () => (await client.models.retrieve(model)).id);
  results.completion = await outcome(async () => {
    const answer = await client.completions.create({ ...fixed, prompt });
    return { text: answer.choices[0].text, finish: answer.choices[0].finish_reason, usage: answer.usage };
  });
  results.completionStream = await outcome(() =>
    streamed(client.completions.create({ ...fixed, prompt, ...stream }), (choice) => choice.text));
  results.chat = await outcome(async () => {
    const answer = await client.chat.completions.create({ ...fixed, messages });
    return { text: answer.choices[0].message.content, finish: answer.choices[0].finish_reason, usage: answer.usage };
  });
  results.chatStream = await outcome(() =>
    streamed(client.chat.completions.create({ ...fixed, messages, ...stream }), (choice) => choice.delta.content));
  results.badValue = await outcome(() => client.completions.create({ ...fixed, prompt, temperature: 9 }));
  results.tooLong = await outcome(() => client.completions.create({ ...fixed, prompt, max_tokens: 5000 }));
  results.badModel = await outcome(() => client.completions.create({ ...fixed, prompt, model: "gpt-5" }));
  results.badKey = await outcome(() => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list());
  results.cancelled = await outcome(cancelled);
  results.retried = await outcome(retried);
  console.log(JSON.stringify(results));
}

main();
