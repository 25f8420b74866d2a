// OpenAI's package and Vercel's AI SDK for Node, as their users call them. `node checks.mjs JSON`
// runs all exported functions with what JSON has, and prints how each ended.

import assert from "node:assert/strict";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import * as z from "zod";

const given = JSON.parse(process.argv[2]);
const openai = new OpenAI({ baseURL: `${given.url}/v1`, apiKey: "none", maxRetries: 0 });
const demo = createOpenAICompatible({
  name: "demo",
  baseURL: `${given.url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
})("demo");

const SUM = "What is 17 + 25?";
const Answer = z.object({ answer: z.number().int() });
const Numbers = z.object({ a: z.number().int(), b: z.number().int() });
const ADD = { name: "add", description: "Add two numbers.", parameters: z.toJSONSchema(Numbers) };
const asked = (content, rest) => ({
  model: "demo",
  messages: [{ role: "user", content }],
  temperature: 0,
  ...rest,
});
const response = (input, rest) => ({ model: "demo", input, temperature: 0, ...rest });

async function all(stream) {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
}

// A response without what differs each time.
function same(response) {
  const id = response.id.replace("resp_", "");
  const text = JSON.stringify({ ...response, created_at: 0 }).replaceAll(id, "ID");
  return { ...JSON.parse(text), output_text: null };
}

export async function openai_chat() {
  const whole = await openai.chat.completions.create(asked(given.question));
  assert.equal(whole.choices[0].message.content, given.answer);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const stream = openai.chat.completions.stream(
    asked(given.question, { stream_options: { include_usage: true } }),
  );
  const chunks = await all(stream);
  assert.ok(chunks.length > 3);
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, given.answer);
  assert.deepEqual(final.usage, whole.usage);
}

export async function openai_tools() {
  const called = [];
  const add = (numbers) => {
    called.push(numbers);
    return String(numbers.a + numbers.b);
  };
  const options = { function: add, parse: JSON.parse, ...ADD };
  const tools = [{ type: "function", function: options }];
  for (const stream of [false, true]) {
    const runner = openai.chat.completions.runTools(asked(SUM, { stream, tools }));
    assert.equal(await runner.finalContent(), "17 + 25 = 42.");
    assert.deepEqual(called.splice(0), [{ a: 17, b: 25 }]);
  }
}

export async function openai_structured_output() {
  const response_format = zodResponseFormat(Answer, "answer");
  const whole = await openai.chat.completions.parse(asked(SUM, { response_format }));
  assert.deepEqual(whole.choices[0].message.parsed, { answer: 42 });
  const stream = openai.chat.completions.stream(asked(SUM, { response_format }));
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, { answer: 42 });
  const text = { format: zodTextFormat(Answer, "answer") };
  const parsed = await openai.responses.parse(response(SUM, { text }));
  assert.deepEqual(parsed.output_parsed, { answer: 42 });
}

export async function openai_responses() {
  const whole = await openai.responses.create(response(given.question));
  assert.equal(whole.output_text, given.answer);
  assert.equal(whole.status, "completed");
  const stream = openai.responses.stream(response(given.question));
  const events = await all(stream);
  assert.deepEqual(
    events.map((event) => event.sequence_number),
    events.map((_, index) => index),
  );
  const final = await stream.finalResponse();
  assert.equal(final.output_text, given.answer);
  assert.deepEqual(same(events.at(-1).response), same(whole));
  const tools = [{ type: "function", strict: true, ...ADD }];
  const [call] = (await openai.responses.create(response(SUM, { tools }))).output;
  assert.deepEqual([call.name, call.arguments], ["add", '{"a": 17, "b": 25}']);
  const result = { type: "function_call_output", call_id: call.call_id, output: "42" };
  const input = [{ role: "user", content: SUM }, call, result];
  const last = await openai.responses.create(response(input, { tools }));
  assert.equal(last.output_text, "17 + 25 = 42.");
}

export async function openai_background() {
  const options = { background: true, stream: true };
  const begun = [];
  for await (const event of await openai.responses.create(response(given.question, options))) {
    begun.push(event);
    if (begun.length === 6) break; // which closes the connection
  }
  const id = begun[0].response.id;
  const rest = await all(
    await openai.responses.retrieve(id, { stream: true, starting_after: 5 }),
  );
  const events = await all(await openai.responses.retrieve(id, { stream: true }));
  assert.deepEqual([...begun, ...rest], events);
  const done = await openai.responses.retrieve(id);
  assert.equal(done.output_text, given.answer);
  assert.deepEqual(same(done), same(events.at(-1).response));
  await openai.responses.delete(id);
  await assert.rejects(openai.responses.retrieve(id), OpenAI.NotFoundError);
}

export async function openai_errors() {
  const create = (rest) => openai.chat.completions.create(asked("Hello!", rest));
  await assert.rejects(create({ max_tokens: 100_000 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "max_tokens");
    assert.equal(error.type, "invalid_request_error");
    assert.match(error.requestID, /^[0-9a-f]{32}$/);
    return true;
  });
  await assert.rejects(create({ model: "other", stream: true }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.deepEqual([error.param, error.code], ["model", "model_not_found"]);
    return true;
  });
}

export async function ai_text() {
  const options = { model: demo, prompt: given.question, temperature: 0, maxRetries: 0 };
  const whole = await generateText(options);
  assert.equal(whole.text, given.answer);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText(options);
  const parts = await all(stream.textStream);
  assert.ok(parts.length > 3);
  assert.equal(parts.join(""), given.answer);
  assert.equal(await stream.finishReason, "stop");
  const usage = await stream.usage;
  assert.ok(usage.outputTokens > 3);
  for (const kind of ["inputTokens", "outputTokens", "totalTokens"])
    assert.equal(usage[kind], whole.usage[kind]);
}

export async function ai_tools() {
  const called = [];
  const execute = async (numbers) => {
    called.push(numbers);
    return numbers.a + numbers.b;
  };
  const tools = { add: tool({ description: "Add two numbers.", inputSchema: Numbers, execute }) };
  const options = { model: demo, prompt: SUM, temperature: 0, maxRetries: 0, tools };
  const whole = await generateText({ ...options, stopWhen: stepCountIs(2) });
  assert.equal(whole.text, "17 + 25 = 42.");
  const stream = streamText({ ...options, stopWhen: stepCountIs(2) });
  assert.equal(await stream.text, "17 + 25 = 42.");
  assert.equal((await stream.steps)[0].finishReason, "tool-calls");
  assert.deepEqual(called, [
    { a: 17, b: 25 },
    { a: 17, b: 25 },
  ]);
}

export async function ai_structured_output() {
  const output = Output.object({ schema: Answer });
  const options = { model: demo, prompt: SUM, temperature: 0, maxRetries: 0, output };
  assert.deepEqual((await generateText(options)).output, { answer: 42 });
  const stream = streamText(options);
  const parts = await all(stream.partialOutputStream);
  assert.deepEqual(parts.at(-1), { answer: 42 });
  assert.deepEqual(await stream.output, { answer: 42 });
}

export async function ai_errors() {
  const options = { model: demo, prompt: "Hello!", maxRetries: 0 };
  await assert.rejects(generateText({ ...options, maxOutputTokens: 100_000 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.match(error.message, /^max_tokens: /);
    return true;
  });
}

async function main() {
  const ends = {};
  for (const [name, check] of Object.entries(await import(import.meta.url))) {
    try {
      await check();
      ends[name] = "";
    } catch (error) {
      ends[name] = error.stack;
    }
  }
  console.log(JSON.stringify(ends));
}

main(); // not awaited: the module imports itself
