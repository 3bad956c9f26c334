// Anthropic's client for Node.

import Anthropic from "@anthropic-ai/sdk";
import * as h from "./harness.mjs";

const client = new Anthropic({ baseURL: h.URL_, apiKey: h.KEY, maxRetries: 0 });
const messages = [{ role: "user", content: h.QUESTION }];
const model = h.MODEL;
const tool = { name: "weather", description: "Weather of a city", input_schema: h.CITY_SCHEMA };

await h.run({
  async chat() {
    const answer = await client.messages.create({ model, messages, max_tokens: 60 });
    h.check(answer.content[0].text.includes(h.ANSWER), answer);
  },
  async stream() {
    const answer = await client.messages.stream({ model, messages, max_tokens: 60 }).finalMessage();
    h.check(answer.content[0].text.includes(h.ANSWER), answer);
  },
  async tools() {
    const fields = { model, tools: [tool], max_tokens: 60 };
    const first = await client.messages.create({
      ...fields, messages, tool_choice: { type: "any" },
    });
    const call = first.content.find((block) => block.type === "tool_use");
    h.check(h.CITIES.includes(call.input.city), first);
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const last = await client.messages.create({
      ...fields,
      messages: [
        ...messages,
        { role: "assistant", content: first.content },
        { role: "user", content: [result] },
      ],
    });
    h.check(last.type === "message", last);
  },
  async structured() {
    const answer = await client.messages.create({
      model, messages, max_tokens: 60,
      output_config: { format: { type: "json_schema", schema: h.CITY_SCHEMA } },
    });
    h.check(h.CITIES.includes(JSON.parse(answer.content[0].text).city), answer);
  },
  async errors() {
    const missing = await h.rejected(() =>
      client.messages.create({ model: "nobody", messages, max_tokens: 5 }));
    h.check(missing instanceof Anthropic.NotFoundError, missing);
    const wrong = await h.rejected(() =>
      client.messages.create({ model, messages: [], max_tokens: 5 }));
    h.check(wrong instanceof Anthropic.BadRequestError, wrong);
  },
  async cancel() {
    const before = await h.aborts();
    const events = await client.messages.create({
      model, max_tokens: 1500, stream: true, ignore_eos: true,
      messages: [{ role: "user", content: h.LONG }],
    });
    for await (const event of events) if (event.type === "content_block_delta") break;
    await h.checkAborted(before);
  },
});
