// Vercel's AI SDK, with its provider for servers that are compatible with OpenAI's.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import * as h from "./harness.mjs";

const provider = createOpenAICompatible({
  name: "local", baseURL: `${h.URL_}/v1`, apiKey: h.KEY,
  includeUsage: true, supportsStructuredOutputs: true,
});
const settings = { model: provider(h.MODEL), maxRetries: 0, maxOutputTokens: 60, temperature: 0 };
const City = z.object({ city: z.enum(h.CITIES) });
const weather = tool({ description: "Weather of a city", inputSchema: City });

await h.run({
  async chat() {
    const answer = await generateText({ ...settings, prompt: h.QUESTION });
    h.check(answer.text.includes(h.ANSWER) && answer.usage.outputTokens > 0, answer.text);
  },
  async stream() {
    const answer = streamText({ ...settings, prompt: h.QUESTION });
    let text = "";
    for await (const part of answer.textStream) text += part;
    h.check(text.includes(h.ANSWER), text);
    h.check((await answer.usage).outputTokens > 0, "usage");
  },
  async tools() {
    const tools = { weather };
    const messages = [{ role: "user", content: h.QUESTION }];
    const first = await generateText({ ...settings, messages, tools, toolChoice: "required" });
    const [call] = first.toolCalls;
    h.check(h.CITIES.includes(call.input.city), first.toolCalls);
    const streamed = streamText({ ...settings, messages, tools, toolChoice: "required" });
    h.check((await streamed.toolCalls).length > 0, "a streamed call");
    const results = first.toolCalls.map(({ toolCallId }) => ({
      type: "tool-result", toolCallId, toolName: "weather",
      output: { type: "text", value: "sunny" },
    }));
    const last = await generateText({
      ...settings, tools,
      messages: [...messages, ...first.response.messages, { role: "tool", content: results }],
    });
    h.check(last.finishReason, "an answer to the result");
  },
  async structured() {
    const answer = await generateText({
      ...settings, prompt: h.QUESTION, output: Output.object({ schema: City }),
    });
    h.check(h.CITIES.includes(answer.output.city), answer.text);
  },
  async errors() {
    const missing = await h.rejected(() =>
      generateText({ ...settings, model: provider("nobody"), prompt: h.QUESTION }));
    h.check(APICallError.isInstance(missing) && missing.statusCode === 404, missing);
  },
  async cancel() {
    const before = await h.aborts();
    const controller = new AbortController();
    const answer = streamText({
      ...settings, maxOutputTokens: 1500, prompt: h.LONG, abortSignal: controller.signal,
      providerOptions: { local: { ignore_eos: true } },
    });
    for await (const _ of answer.textStream) {
      controller.abort();
      break;
    }
    await h.checkAborted(before);
  },
});
