// Continue's own adapters, by which its completion asks for fill-in-the-middle.

import { constructLlmApi } from "@continuedev/openai-adapters";
import * as h from "./harness.mjs";

const PREFIX = "def add(a, b):\n    return ";
const SUFFIX = "\n\nprint(add(1, 2))\n";
const made = (apiKey) =>
  constructLlmApi({ provider: "mistral", apiBase: `${h.URL_}/v1/`, apiKey });
const api = made(h.KEY);
// As for Qwen-Coder and Python.
const stop = [
  "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
  "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>",
  "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```",
];
const body = { model: h.MODEL, prompt: PREFIX, suffix: SUFFIX, temperature: 0.01, stop };

async function filled(fields, one = api) {
  let text = "";
  const signal = new AbortController().signal;
  for await (const chunk of one.fimStream({ ...body, ...fields }, signal)) {
    const { content } = chunk.choices[0].delta;
    h.check(typeof content === "string", chunk);
    text += content;
  }
  return text;
}

await h.run({
  async stream() {
    h.check((await filled({ max_tokens: 12, stop: [] })).length > 0, "no text");
    h.check(typeof (await filled({ max_tokens: 12 })) === "string", "with its stop strings");
    h.check(typeof (await filled({ max_tokens: 1, prompt: "", suffix: "" })) === "string", "empty");
  },
  async errors() {
    const wrong = await h.rejected(() => filled({ max_tokens: 1, model: "nobody" }));
    h.check(String(wrong).includes("404") || wrong.message.includes("nobody"), String(wrong));
    h.check(await h.rejected(() => filled({}, made("wrong"))), "the wrong key");
  },
  async cancel() {
    const before = await h.aborts();
    const controller = new AbortController();
    const long = { ...body, max_tokens: 1500, stop: [] };
    try {
      for await (const _ of api.fimStream({ ...long, min_tokens: 1500 }, controller.signal)) {
        controller.abort();
      }
    } catch (error) {
      h.check(error.name === "AbortError" || controller.signal.aborted, String(error));
    }
    await h.checkAborted(before);
  },
}, { insert: "it streams every answer" });
