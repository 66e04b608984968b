// Trains an adapter, samples from it and exports it. Prints results; floats also as the bits that the contract carries.

import { createHash, randomUUID } from "node:crypto";

import grpc from "@grpc/grpc-js";

import { Pool, errorDetails } from "./pool.mjs";
import { tensor, texts } from "./tensors.mjs";

const TOKENS = [459, 342, 343, 386, 505, 351, 77, 260];
const WEIGHTS = [1, 0.5, 0.25, 1, 0.5, 0.25, 1];
const NUM_STEPS = 10;
const NUM_EARLY = 6;

const int32 = (values) => tensor("DATA_TYPE_INT32", values);
const bits32 = (found) => texts(found).join(" ");
const bits64 = (value) => {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  return view.getBigUint64(0).toString(16).padStart(16, "0");
};

const pool = new Pool(process.env.TINKERPOOL_BASE_URL, process.env.TINKERPOOL_API_KEY, process.env.TINKERPOOL_CERTIFICATE);
try {
  const { baseModels } = await pool.call("SessionService", "GetCapabilities", {});
  const baseModel = baseModels[0].name;
  console.log(`model ${baseModel}`);
  // A session ends ten minutes after its last heartbeat: this program sends none, and finishes before that.
  const { session: { sessionId } } = await pool.call("SessionService", "CreateSession", { requestId: randomUUID() });
  const newAdapter = { sessionId, requestId: randomUUID(), baseModel, rank: 3, seed: 7 };
  await pool.call("AdapterService", "CreateAdapter", newAdapter).catch((error) => {
    const { reason, domain } = errorDetails(error);
    console.log(`refused ${grpc.status[error.code]} ${reason} ${domain}`);
  });
  const { adapter: { adapterId } } = await pool.call("AdapterService", "CreateAdapter", { ...newAdapter, rank: 8 });

  await train(adapterId);

  const seq = 2 * NUM_STEPS + 1;
  const state = await pool.call("CheckpointService", "SaveState", { adapterId, seq, name: "state" });
  const weights = await pool.call("CheckpointService", "SaveWeightsForSampler", { adapterId, seq: seq + 1, name: "final" });
  const saved = await pool.finished([state.operation.name, weights.operation.name]);
  const { path } = saved.get(weights.operation.name).saveWeightsForSampler;
  const newSampler = { sessionId, requestId: randomUUID(), modelPath: path };
  const { sampler: { samplerId } } = await pool.call("SamplingService", "CreateSampler", newSampler);
  await sample(samplerId);

  const archive = await pool.stream("CheckpointService", "ExportCheckpoint", () => ({ path }), async (pieces) => {
    const data = [];
    for await (const piece of pieces) data.push(piece.data);
    return Buffer.concat(data);
  });
  console.log(`export ${archive.length} bytes sha256 ${createHash("sha256").update(archive).digest("hex")}`);
  const { checkpoints } = await pool.call("CheckpointService", "ListCheckpoints", { adapterId });
  for (const { path: found, seq: at, rank, sha256 } of checkpoints) {
    console.log(`checkpoint ${found.replace(`tinker://${adapterId}/`, "")} seq ${at} rank ${rank} sha256 ${sha256}`);
  }
  await pool.call("SessionService", "FinishSession", { sessionId });
  console.log("done");
} finally {
  pool.close();
}

// Takes the steps, all of them in flight at a time, and prints what they gave.
async function train(adapterId) {
  const lossInputs = { target_tokens: int32(TOKENS.slice(1)), weights: tensor("DATA_TYPE_FLOAT32", WEIGHTS) };
  const datum = { tokens: int32(TOKENS.slice(0, -1)), lossInputs };
  const send = async (step) => {
    const { forwardBackward, optimStep } = await pool.call("TrainingService", "TrainStep", {
      adapterId,
      seq: 2 * step - 1,
      data: [datum],
      lossFunction: "LOSS_FUNCTION_CROSS_ENTROPY",
      adam: { learningRate: 2e-3 },
    });
    return [forwardBackward.name, optimStep.name];
  };
  // The pool takes steps in any order and runs them by seq: sent last first, none can finish before the first is sent.
  const [early, late] = [[], []];
  for (let step = NUM_STEPS; step > NUM_STEPS - NUM_EARLY; step -= 1) early.push(...(await send(step)));
  const waiting = pool.finished(early);
  console.log(`sent ${NUM_EARLY} steps`);
  for (let step = NUM_STEPS - NUM_EARLY; step > 0; step -= 1) late.push(...(await send(step)));
  const results = new Map([...(await waiting), ...(await pool.finished(late))]);
  if ((await send(NUM_STEPS))[0] !== early[0]) throw new Error("the same seq again gave another operation");
  for (let step = 1; step <= NUM_STEPS; step += 1) {
    const { metrics, logprobs } = results.get(`${adapterId}:${2 * step - 1}`).forwardBackward;
    const loss = metrics["loss:sum"];
    const norm = results.get(`${adapterId}:${2 * step}`).optimStep.metrics["grad_norm:last"];
    console.log(`step ${step} loss ${loss.toFixed(4)} ${bits64(loss)} grad_norm ${bits64(norm)}`);
    console.log(`step ${step} logprobs ${bits32(logprobs[0])}`);
  }
}

// Samples with a stream, and prints the sequences.
async function sample(samplerId) {
  const params = { maxTokens: 8, temperature: 0.75, seed: 11, stop: {} };
  const request = { samplerId, seq: 1, prompt: int32(TOKENS.slice(0, 3)), numSamples: 2, params };
  const { streamed, operation } = await pool.stream("SamplingService", "StreamSample", () => ({ request }), async (events) => {
    const drawn = [[], []];
    let last;
    for await (const event of events) {
      if (event.token) drawn[event.token.sequenceIndex].push(event.token.token);
      last = event.operation;
    }
    return { streamed: drawn, operation: last };
  });
  operation.sample.sequences.forEach(({ tokens, logprobs }, index) => {
    const drawn = texts(tokens).join(" ");
    if (streamed[index].join(" ") !== drawn) throw new Error(`${streamed[index]} was streamed, and ${drawn} is the result`);
    console.log(`sample ${index} tokens ${drawn}`);
    console.log(`sample ${index} logprobs ${bits32(logprobs)}`);
  });
}
