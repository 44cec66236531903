// The AI SDK (`ai`) with its provider for compatible servers: text, streams, calls, objects and errors.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, stepCountIs, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "manylora", baseURL: process.env.URL + "/v1", apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), degrees: z.union([z.literal(18), z.literal(21)]) });
const asked = { model: provider("upper"), prompt: "hello world", temperature: 0, maxRetries: 0 };
const weather = tool({ description: "The weather", inputSchema: Weather });

test("text of an adapter", async () => {
  const answer = await generateText(asked);
  assert.equal(answer.text, "HELLO WORLD");
  assert.equal(answer.finishReason, "stop");
  assert(answer.usage.inputTokens > 0);
  assert.equal(answer.usage.outputTokens, "HELLO WORLD".length + 1);
});

test("a stream of text with its usage", async () => {
  const stream = streamText(asked);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, "HELLO WORLD");
  assert.equal((await stream.usage).outputTokens, "HELLO WORLD".length + 1);
});

test("a required call whole and streamed", async () => {
  const request = { ...asked, tools: { weather } };
  const named = { ...request, toolChoice: { type: "tool", toolName: "weather" } };
  const required = { ...request, toolChoice: "required" };
  const whole = [(await generateText(named)).toolCalls, (await generateText(required)).toolCalls];
  for (const calls of [...whole, await streamText(named).toolCalls, await streamText(required).toolCalls]) {
    assert.equal(calls[0].toolName, "weather");
    Weather.parse(calls[0].input);
  }
});

test("steps of a call and an answer to its result", async () => {
  const executed = tool({ inputSchema: Weather, execute: async () => "tiny llama" });
  const answer = await generateText({
    ...asked, tools: { weather: executed }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : { type: "tool", toolName: "weather" } }),
  });
  assert.equal(answer.steps.length, 2);
  assert.match(answer.text, /TINY LLAMA/);
});

test("an object whole and streamed", async () => {
  const request = { ...asked, output: Output.object({ schema: Weather }) };
  Weather.parse((await generateText(request)).output);
  const stream = streamText(request);
  let last;
  for await (last of stream.partialOutputStream);
  Weather.parse(last);
});

test("completions", async () => {
  const answer = await generateText({ ...asked, model: provider.completionModel("upper") });
  assert(answer.usage.outputTokens > 0); // it writes "user:" before the prompt, which the demo does not know
  assert.equal(answer.finishReason, "stop");
});

test("errors carry the status and the reason", async () => {
  await assert.rejects(generateText({ ...asked, model: provider("no-such") }), (error) => {
    assert(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /no-such/);
    return true;
  });
  await assert.rejects(generateText({ ...asked, topP: 7 }), (error) => error.statusCode === 400 && /top_p/.test(error.message));
});
