// LlamaIndex.TS, through its package for OpenAI.

import { OpenAI } from "@llamaindex/openai";
import { tool } from "llamaindex";
import { z } from "zod";
import * as h from "./harness.mjs";

const llm = (fields = {}) => new OpenAI({
  model: h.MODEL, apiKey: h.KEY, baseURL: `${h.URL_}/v1`, maxRetries: 0, maxTokens: 60,
  temperature: 0, supportToolCall: true, ...fields,
});
const City = z.object({ city: z.enum(h.CITIES) });
const weather = tool({
  name: "weather", description: "Weather of a city", parameters: City,
  execute: ({ city }) => `sunny in ${city}`,
});
const messages = [{ role: "user", content: h.QUESTION }];

await h.run({
  async chat() {
    const answer = await llm().chat({ messages });
    h.check(answer.message.content.includes(h.ANSWER), answer.message);
  },
  async stream() {
    let text = "";
    for await (const part of await llm().chat({ messages, stream: true })) text += part.delta;
    h.check(text.includes(h.ANSWER), text);
  },
  async tools() {
    const tools = [weather];
    const additionalChatOptions = { tool_choice: "required" };
    const first = await llm().chat({ messages, tools, additionalChatOptions });
    const [call] = first.message.options.toolCall;
    h.check(h.CITIES.includes(JSON.parse(call.input).city ?? call.input.city), call);
    let streamed = [];
    const parts = await llm().chat({ messages, tools, additionalChatOptions, stream: true });
    for await (const part of parts) streamed = part.options?.toolCall ?? streamed;
    h.check(streamed.length > 0 && streamed[0].name === "weather", streamed);
    const result = {
      role: "user", content: "sunny",
      options: { toolResult: { id: call.id, result: "sunny", isError: false } },
    };
    const last = await llm().chat({ messages: [...messages, first.message, result], tools });
    h.check(typeof last.message.content === "string", last.message);
  },
  async structured() {
    const answer = await llm().chat({ messages, responseFormat: City });
    h.check(h.CITIES.includes(JSON.parse(answer.message.content).city), answer.message);
  },
  async errors() {
    const missing = await h.rejected(() => llm({ model: "nobody" }).chat({ messages }));
    h.check(missing.status === 404, missing);
  },
  // It reads a stream to its end, although its caller has left it, and takes no signal: the fetch
  // that it is given has one.
  async cancel() {
    const before = await h.aborts();
    const stopping = new AbortController();
    const stoppable = (url, init) => fetch(url, {
      ...init, signal: AbortSignal.any([stopping.signal, init.signal].filter(Boolean)),
    });
    const asked = [{ role: "user", content: h.LONG }];
    const leaving = llm({ maxTokens: 1500, additionalSessionOptions: { fetch: stoppable } });
    const additionalChatOptions = { ignore_eos: true };
    const parts = await leaving.chat({ messages: asked, stream: true, additionalChatOptions });
    for await (const part of parts) if (part.delta) stopping.abort();
    await h.checkAborted(before);
  },
});
