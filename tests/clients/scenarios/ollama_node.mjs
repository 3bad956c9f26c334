// Ollama's own client for Node.

import { Ollama } from "ollama";
import * as h from "./harness.mjs";

const headers = { authorization: `Bearer ${h.KEY}` };
const client = new Ollama({ host: h.URL_, headers });
const caller = new Ollama({ host: h.CALLER, headers });
const model = h.MODEL;
const messages = [{ role: "user", content: h.QUESTION }];
const options = { num_predict: 60, temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "Tell the weather.",
    parameters: {
      type: "object", properties: { city: { type: "string" } }, required: ["city"],
    },
  },
};

await h.run({
  async chat() {
    const answer = await client.chat({ model, messages, options });
    h.check(answer.message.content.includes(h.ANSWER) && answer.eval_duration > 0, answer);
    const { models } = await client.list();
    h.check(models.some((each) => each.model === `${model}:latest`), models);
    const shown = await client.show({ model });
    h.check(shown.capabilities.includes("completion"), shown);
    const running = await client.ps();
    h.check(running.models.length === 1, running);
    h.check((await client.version()).version, "a version");
  },
  async stream() {
    let text = "";
    let last;
    for await (const part of await client.generate({
      model, prompt: h.QUESTION, options, stream: true,
    })) {
      text += part.response;
      last = part;
    }
    h.check(text.includes(h.ANSWER) && last.done && last.context.length, last);
  },
  async tools() {
    const asked = [{ role: "user", content: "Tell me the weather in Rome." }];
    const first = await caller.chat({ model, messages: asked, tools: [weather] });
    const [call] = first.message.tool_calls;
    h.check(call.function.arguments.city === "Rome", first);
    const result = { role: "tool", content: "sunny", tool_name: call.function.name };
    const last = await caller.chat({
      model, messages: [...asked, first.message, result], tools: [weather],
    });
    h.check(last.message.content === "It is sunny.", last);
  },
  async structured() {
    const answer = await client.chat({ model, messages, options, format: h.CITY_SCHEMA });
    h.check(h.CITIES.includes(JSON.parse(answer.message.content).city), answer);
  },
  async errors() {
    const missing = await h.rejected(() => client.chat({ model: "nobody", messages }));
    h.check(missing.status_code === 404 && missing.message.includes("nobody"), missing);
    const wrong = await h.rejected(() =>
      client.chat({ model, messages, options: { temperature: -1 } }));
    h.check(wrong.status_code === 400, wrong);
    const stranger = new Ollama({ host: h.URL_, headers: { authorization: "Bearer wrong" } });
    h.check((await h.rejected(() => stranger.list())).status_code === 401, "the wrong key");
  },
  async cancel() {
    const before = await h.aborts();
    const parts = await client.generate({
      model, prompt: h.LONG, stream: true, options: { num_predict: 1500, ignore_eos: true },
    });
    const read = async () => {
      for await (const _ of parts) client.abort();
    };
    h.check((await h.rejected(read)).name === "AbortError", "the client's own error");
    await h.checkAborted(before);
  },
});
