// Vercel's AI SDK: decisions, which its provider for OpenAI asks for.

import { createOpenAI } from "@ai-sdk/openai";
import { experimental_decide as decide } from "ai";
import * as h from "./harness.mjs";

const provider = createOpenAI({ baseURL: `${h.URL_}/v1`, apiKey: h.KEY });
const state = "My card was charged twice, and nobody replies.";
const questions = {
  team: { type: "choice", criteria: { billing: "payments", post: null } },
  angry: { type: "boolean", instructions: "Is the writer angry?", criteria: { true: "yes" } },
  urgent: { type: "score", instructions: "How urgent?", criteria: ["later", "now"] },
};

await h.run({
  async decide() {
    const { answers } = await decide({ model: provider.decisionModel(h.MODEL), state, questions });
    h.check(["billing", "post"].includes(answers.team.choice), answers);
    h.check(answers.angry.probability > 0 && answers.angry.probability < 1, answers);
    h.check(answers.urgent.score >= 0 && answers.urgent.score <= 1, answers);
  },
  async errors() {
    const model = provider.decisionModel("nobody");
    const missing = await h.rejected(() => decide({ model, state, questions, maxRetries: 0 }));
    h.check(missing.statusCode === 404, missing.message);
  },
}, { models: "the client lists no models" });
