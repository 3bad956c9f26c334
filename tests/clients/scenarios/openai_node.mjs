// OpenAI's client for Node.

import OpenAI from "openai";
import * as h from "./harness.mjs";

const client = new OpenAI({ baseURL: `${h.URL_}/v1`, apiKey: h.KEY, maxRetries: 0 });
const messages = [{ role: "user", content: h.QUESTION }];
const model = h.MODEL;
const tool = { type: "function", function: { name: "weather", parameters: h.CITY_SCHEMA } };

await h.run({
  async chat() {
    const answer = await client.chat.completions.create({
      model, messages, temperature: 0, max_tokens: 20,
    });
    h.check(answer.choices[0].message.content.includes(h.ANSWER), answer);
  },
  async stream() {
    const chunks = await client.chat.completions.create({
      model, messages, temperature: 0, max_tokens: 20, stream: true,
    });
    let text = "";
    for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
    h.check(text.includes(h.ANSWER), text);
  },
  async tools() {
    const fields = { model, tools: [tool], temperature: 0, max_tokens: 60 };
    const first = await client.chat.completions.create({
      ...fields, messages, tool_choice: "required",
    });
    const message = first.choices[0].message;
    const call = message.tool_calls[0];
    h.check(h.CITIES.includes(JSON.parse(call.function.arguments).city), first);
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const last = await client.chat.completions.create({
      ...fields, messages: [...messages, message, result],
    });
    h.check(last.choices.length === 1, last);
  },
  async structured() {
    const answer = await client.chat.completions.create({
      model, messages, max_tokens: 60,
      response_format: {
        type: "json_schema",
        json_schema: { name: "city", schema: h.CITY_SCHEMA, strict: true },
      },
    });
    h.check(h.CITIES.includes(JSON.parse(answer.choices[0].message.content).city), answer);
  },
  async errors() {
    const missing = await h.rejected(() =>
      client.chat.completions.create({ model: "nobody", messages }));
    h.check(missing instanceof OpenAI.NotFoundError && missing.code === "model_not_found", missing);
    const wrong = await h.rejected(() =>
      client.chat.completions.create({ model, messages, temperature: 5 }));
    h.check(wrong instanceof OpenAI.BadRequestError && wrong.param === "temperature", wrong);
  },
  async cancel() {
    const before = await h.aborts();
    const chunks = await client.chat.completions.create({
      model, max_tokens: 1500, stream: true, ignore_eos: true,
      messages: [{ role: "user", content: h.LONG }],
    });
    for await (const _ of chunks) break;
    await h.checkAborted(before);
  },
  async responses_chat() {
    const answer = await client.responses.create({
      model, input: h.QUESTION, temperature: 0, max_output_tokens: 20,
    });
    h.check(answer.output_text.includes(h.ANSWER), answer);
  },
  async responses_stream() {
    const events = client.responses.stream({
      model, input: h.QUESTION, temperature: 0, max_output_tokens: 20,
    });
    const last = await events.finalResponse();
    h.check(last.output_text.includes(h.ANSWER), last);
  },
  async responses_tools() {
    const fields = {
      model, max_output_tokens: 60,
      tools: [{ type: "function", name: "weather", parameters: h.CITY_SCHEMA, strict: true }],
    };
    const first = await client.responses.create({
      ...fields, input: h.QUESTION, tool_choice: "required",
    });
    const call = first.output.find((item) => item.type === "function_call");
    h.check(h.CITIES.includes(JSON.parse(call.arguments).city), first);
    const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const last = await client.responses.create({
      ...fields, input: [result], previous_response_id: first.id,
    });
    h.check(last.previous_response_id === first.id, last);
  },
  async responses_structured() {
    const answer = await client.responses.create({
      model, input: h.QUESTION, max_output_tokens: 60,
      text: {
        format: { type: "json_schema", name: "city", schema: h.CITY_SCHEMA, strict: true },
      },
    });
    h.check(h.CITIES.includes(JSON.parse(answer.output_text).city), answer);
  },
  async responses_errors() {
    const missing = await h.rejected(() => client.responses.retrieve("resp_nobody"));
    h.check(missing instanceof OpenAI.NotFoundError, missing);
    h.check(missing.code === "response_not_found", missing);
  },
  async responses_cancel() {
    const before = await h.aborts();
    const events = await client.responses.create({
      model, input: h.LONG, max_output_tokens: 1500, stream: true, ignore_eos: true,
    });
    for await (const event of events) if (event.type === "response.output_text.delta") break;
    await h.checkAborted(before);
  },
});
