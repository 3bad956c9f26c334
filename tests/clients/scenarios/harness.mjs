// What every scenario in Node needs.

export const URL_ = process.env.CLIENT_URL;
export const KEY = process.env.CLIENT_KEY;
export const MODEL = process.env.CLIENT_MODEL;
// A second server, whose model calls tools: it goes by the same name and key.
export const CALLER = process.env.CLIENT_CALLER;
export const QUESTION = "What is the capital of France?";
export const ANSWER = "Paris";
export const LONG = "Count from 1 to 1000, one number a line.";
export const CITIES = ["Paris", "Rome"];
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

// Returns the error that `action` rejects with.
export async function rejected(action) {
  try {
    await action();
  } catch (error) {
    return error;
  }
  throw new Error("no error");
}

export async function aborts() {
  const answer = await fetch(`${URL_}/metrics`, { headers: { authorization: `Bearer ${KEY}` } });
  const lines = (await answer.text()).split("\n");
  const found = lines.filter((line) => line.startsWith("mlx_lm_server_aborts_total"));
  return found.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

export async function checkAborted(before) {
  const deadline = Date.now() + 30_000;
  while ((await aborts()) <= before) {
    check(Date.now() < deadline, "the server continued after the client disconnected");
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

// Runs the scenarios named in the arguments, or all. Of those that the client does not support,
// `missing` has the reason by name.
export async function run(scenarios, missing = {}) {
  const wanted = process.argv.slice(2);
  for (const [scenario, action] of Object.entries(scenarios)) {
    if (wanted.length && !wanted.includes(scenario)) continue;
    let result = "pass";
    let reason = "";
    try {
      await action();
    } catch (error) {
      console.error(error);
      [result, reason] = ["fail", `${error.name}: ${error.message}`];
    }
    console.log(JSON.stringify({ scenario, result, reason }));
  }
  for (const [scenario, reason] of Object.entries(missing)) {
    if (wanted.length && !wanted.includes(scenario)) continue;
    console.log(JSON.stringify({ scenario, result: "n/a", reason }));
  }
  process.exit(0);
}
