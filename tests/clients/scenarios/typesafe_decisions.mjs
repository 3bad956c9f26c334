// TypeSafe's client for Node.

import { TypeSafeClient, choice, noul, score } from "@typesafe-ai/sdk";
import * as h from "./harness.mjs";

const retry = { maxRetries: 0 };
const client = new TypeSafeClient({ baseURL: h.URL_, apiKey: h.KEY, defaultModel: h.MODEL, retry });
const state = { subject: "My card was charged twice" };

await h.run({
  async decide() {
    const found = await client.systemOne({
      model: h.MODEL,
      state,
      questions: {
        team: choice("Who handles this?", { billing: "payments", post: null }),
        angry: noul("Is the writer angry?"),
        urgent: score("How urgent?", ["later", "now"]),
      },
    });
    const { team, angry, urgent } = found.answers;
    h.check(["billing", "post"].includes(team.choice), found);
    h.check(Math.abs(team.probabilities.billing + team.probabilities.post - 1) < 1e-6, found);
    h.check(angry.noul > 0 && angry.noul < 1, found);
    h.check(urgent.legend["1"] === "now" && urgent.score >= 0 && urgent.score <= 1, found);
  },
  async models() {
    const listed = await client.models.list();
    const models = Array.isArray(listed) ? listed : listed.models;
    h.check(models.some((each) => each.name === h.MODEL), listed);
  },
  async errors() {
    const questions = { angry: noul("Is the writer angry?") };
    const missing = await h.rejected(() => client.systemOne({ model: "nobody", state, questions }));
    h.check(missing.status === 404 && missing.message.includes("nobody"), missing.message);
    const levels = { urgent: score("How?", Array(11).fill("a")) };
    const invalid = await h.rejected(() => client.systemOne({ model: h.MODEL, state, questions: levels }));
    h.check(invalid.status === 422 && invalid.message.includes("11 levels"), invalid.message);
  },
});
