// Trains an adapter on one sentence, and samples the sentence from it.

import { randomUUID } from "node:crypto";
import { parseArgs } from "node:util";

import { Pool, findPool } from "./pool.mjs";
import { Vocabulary, float32, int32, numbers } from "./tokens.mjs";

const { values: options } = parseArgs({
  options: {
    model: { type: "string", default: "" },
    prompt: { type: "string", default: "And the engineer said," },
    answer: { type: "string", default: " Let all the tenants ride in one cycle." },
    steps: { type: "string", default: "16" },
    rate: { type: "string", default: "3e-3" },
  },
});

let pool;
try {
  pool = new Pool(findPool());
  const { baseModels, version } = await pool.call("SessionService", "getCapabilities", {});
  const model = options.model || baseModels[0].name;
  console.log(`tinkerpool ${version} with ${baseModels.map(({ name }) => name).join(", ")}; training on ${model}`);
  const { files } = await pool.call("SessionService", "getTokenizer", { baseModel: model });
  const vocabulary = new Vocabulary(files["tokenizer.json"].toString());

  // A session ends ten minutes after its last heartbeat: this program sends none, and finishes before that.
  const { session } = await pool.call("SessionService", "createSession", { requestId: randomUUID() });
  const { adapter } = await pool.call("AdapterService", "createAdapter", {
    sessionId: session.sessionId, baseModel: model, rank: 8, index: 0,
  });
  console.log(`adapter ${adapter.adapterId}, rank ${adapter.rank}`);

  // Position t of the targets is the token that should follow position t of the tokens; the prompt has weight 0.
  const prompt = vocabulary.encode(options.prompt);
  const text = [...prompt, ...vocabulary.encode(options.answer)];
  const targets = text.slice(1);
  const datum = {
    tokens: int32(text.slice(0, -1)),
    lossInputs: {
      target_tokens: int32(targets),
      weights: float32(targets.map((_, at) => (at < prompt.length - 1 ? 0 : 1))),
    },
  };
  const numTargets = text.length - prompt.length;

  // Every step is one message with its own sequence numbers. All are sent before the first result returns, so the adapter
  // takes one step in every clock cycle.
  const steps = [];
  for (let step = 0; step < Number(options.steps); step += 1) {
    const { forwardBackward } = await pool.call("TrainingService", "trainStep", {
      adapterId: adapter.adapterId,
      seq: 1 + 2 * step,
      data: [datum],
      lossFunction: "LOSS_FUNCTION_CROSS_ENTROPY",
      adam: { learningRate: Number(options.rate) },
    });
    steps.push(forwardBackward.name);
  }
  const losses = [];
  for await (const { forwardBackward, cycleId } of pool.wait(steps)) {
    losses.push(forwardBackward.metrics["loss:sum"] / numTargets);
    console.log(`step ${String(losses.length).padStart(3)}  cycle ${cycleId}  loss ${losses.at(-1).toFixed(4)}`);
  }

  const saved = await pool.call("CheckpointService", "saveWeightsForSampler", {
    adapterId: adapter.adapterId, seq: 1 + 2 * steps.length,
  });
  const [{ saveWeightsForSampler }] = await finished([saved.operation.name]);
  const { operation } = await pool.call("SamplingService", "sample", {
    samplerId: saveWeightsForSampler.samplerId,
    seq: 1,
    prompt: int32(prompt),
    params: { maxTokens: numTargets, temperature: 0 },
  });
  const [{ sample }] = await finished([operation.name]);
  console.log(`sample: ${options.prompt}${vocabulary.decode(numbers(sample.sequences[0].tokens))}`);
  console.log(`loss ${losses[0].toFixed(3)} -> ${losses.at(-1).toFixed(3)} per token in ${losses.length} steps`);
  await pool.call("SessionService", "finishSession", { sessionId: session.sessionId });
} catch (error) {
  console.error(`Error: ${error.details || error.message}`);
  process.exitCode = 1;
} finally {
  pool?.close();
}

async function finished(names) {
  const operations = [];
  for await (const operation of pool.wait(names)) operations.push(operation);
  return operations;
}
