// OpenAI's client for node: chats, streams, forced calls, parsed answers, responses, completions and errors.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello world" }];
const prompt = "<|bos|><|user|>hello world<|end|><|assistant|>";
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), degrees: z.union([z.literal(18), z.literal(21)]) });
const tools = [zodFunction({ name: "weather", parameters: Weather })];

test("a chat of an adapter and the list of models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert(names.includes("upper") && names.includes("rot13"));
  const chat = await client.chat.completions.create({ model: "upper", messages, temperature: 0, logprobs: true });
  assert.equal(chat.choices[0].message.content, "HELLO WORLD");
  assert(chat.choices[0].logprobs.content.length > 0);
});

test("a stream with its usage", async () => {
  const options = { stream: true, stream_options: { include_usage: true }, temperature: 0 };
  let text = "", last;
  for await (last of await client.chat.completions.create({ model: "upper", messages, ...options }))
    text += last.choices[0]?.delta.content ?? "";
  assert.equal(text, "HELLO WORLD");
  assert.equal(last.usage.total_tokens, last.usage.prompt_tokens + last.usage.completion_tokens);
});

test("the stream helper", async () => {
  const stream = client.chat.completions.stream({ model: "upper", messages, temperature: 0 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), "HELLO WORLD");
  assert.equal(text, "HELLO WORLD");
  assert.equal((await stream.finalChatCompletion()).choices[0].finish_reason, "stop");
});

test("a parsed answer whole and streamed", async () => {
  const asked = { model: "upper", messages, response_format: zodResponseFormat(Weather, "weather") };
  Weather.parse((await client.chat.completions.parse(asked)).choices[0].message.parsed);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  Weather.parse(streamed.choices[0].message.parsed);
});

test("a required call whole and streamed", async () => {
  const asked = { model: "demo", messages, tools, tool_choice: "required", parallel_tool_calls: false };
  const whole = await client.chat.completions.parse(asked);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  for (const answer of [whole, streamed]) {
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "weather");
    Weather.parse(call.function.parsed_arguments);
  }
});

test("a runner of tools ends with an answer to the result", async () => {
  // A model that is forced to call would call again: the answer to a result is of its own free choice.
  const choice = { type: "function", function: { name: "weather" } };
  const asked = { model: "upper", messages, tools, temperature: 0 };
  const called = await client.chat.completions.create({ ...asked, tool_choice: choice });
  const message = called.choices[0].message;
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "tiny llama" };
  const runner = client.chat.completions.runTools({
    ...asked, messages: [...messages, message, result],
    tools: [{ type: "function", function: { function: () => "18", parse: JSON.parse, name: "weather", description: "",
                                            parameters: { type: "object", properties: {} } } }],
  });
  assert.equal(await runner.finalContent(), "TINY LLAMA");
});

test("responses whole streamed and parsed", async () => {
  const asked = { model: "upper", input: "hello world", temperature: 0 };
  assert.equal((await client.responses.create(asked)).output_text, "HELLO WORLD");
  const kinds = [];
  const stream = client.responses.stream(asked).on("event", (event) => kinds.push(event.type));
  assert.equal((await stream.finalResponse()).output_text, "HELLO WORLD");
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  const parsed = await client.responses.parse({ ...asked, text: { format: zodTextFormat(Weather, "weather") } });
  Weather.parse(parsed.output_parsed);
});

test("completions whole and streamed", async () => {
  const asked = { model: "upper", prompt, temperature: 0 };
  assert.equal((await client.completions.create(asked)).choices[0].text, "HELLO WORLD");
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0].text;
  assert.equal(text, "HELLO WORLD");
});

test("an abandoned stream", async () => {
  const stream = await client.chat.completions.create({ model: "upper", messages, stream: true });
  for await (const _ of stream) break; // aborts the request
  assert.equal(stream.controller.signal.aborted, true);
  const chat = await client.chat.completions.create({ model: "upper", messages, temperature: 0 });
  assert.equal(chat.choices[0].message.content, "HELLO WORLD");
});

test("errors of their classes", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such", messages }), OpenAI.NotFoundError);
  const bad = client.chat.completions.create({ model: "demo", messages, temperature: -1 });
  await assert.rejects(bad, (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.match(error.message, /temperature/);
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: "no-such", messages, stream: true }), OpenAI.NotFoundError);
});
