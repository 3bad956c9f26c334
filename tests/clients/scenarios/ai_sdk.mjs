// Vercel's AI SDK, with its providers for servers that are compatible with OpenAI's, for OpenAI's
// Responses API and for Anthropic's Messages. The names of a provider's scenarios have its prefix.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import * as h from "./harness.mjs";

const access = { baseURL: `${h.URL_}/v1`, apiKey: h.KEY };
const compatible = createOpenAICompatible({
  ...access, name: "local", includeUsage: true, supportsStructuredOutputs: true,
});
const providers = {
  "": compatible,
  responses_: createOpenAI(access).responses,
  messages_: createAnthropic(access),
};
const City = z.object({ city: z.enum(h.CITIES) });
const weather = tool({ description: "Weather of a city", inputSchema: City });

const scenariosOf = (prefix, provider) => {
  const settings = { model: provider(h.MODEL), maxRetries: 0, maxOutputTokens: 60, temperature: 0 };
  const scenarios = {
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
      const output = Output.object({ schema: City });
      const answer = await generateText({
        ...settings, prompt: h.QUESTION, output, experimental_output: output, // the name in 5
      });
      const found = answer.experimental_output ?? answer.output;
      h.check(h.CITIES.includes(found.city), answer.text);
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
  };
  return Object.entries(scenarios).map(([name, action]) => [prefix + name, action]);
};

await h.run(Object.fromEntries(
  Object.entries(providers).flatMap(([prefix, provider]) => scenariosOf(prefix, provider))));
