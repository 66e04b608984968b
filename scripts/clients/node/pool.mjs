// A connection to a pool: stubs made from the .proto files at run time, and calls as promises that are repeated.

import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

export const PROTOS = process.env.TINKERPOOL_PROTOS || fileURLToPath(new URL("../../../protos", import.meta.url));
export const FILES = ["sessions", "adapters", "training", "operations", "checkpoints", "sampling"];
// Codes of a call that the network or a stop of the pool ended: without a reason of the pool's.
const LOST = new Set([grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED, grpc.status.INTERNAL]);
const CALL_MS = 30_000;

// Pings keep a wait from hanging on a dead connection. Without the bound a channel waits up to two minutes between two
// attempts to reach a pool that restarts. The library's own retries would add to those made here.
const CHANNEL = {
  "grpc.max_receive_message_length": 64 << 20,
  "grpc.keepalive_time_ms": 30_000,
  "grpc.max_reconnect_backoff_ms": 2000,
  "grpc.enable_retries": 0,
};

// What a pool puts into the details of a status, of google/rpc/status.proto and error_details.proto.
const DETAILS = protobuf.parse(`
  syntax = "proto3";
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Any { string type_url = 1; bytes value = 2; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
  message RetryInfo { Duration retry_delay = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }
`, { keepCase: true }).root;

export class Pool {
  // `url`: http://host:port, or https:// for TLS. `trusted`: a PEM file; by default Node's list of authorities.
  // `channel`: more options of gRPC's channel.
  constructor(url, apiKey, trusted, channel = {}) {
    const { protocol, host } = new URL(url);
    const credentials = protocol === "https:"
      ? grpc.credentials.createSsl(trusted ? readFileSync(trusted) : null)
      : grpc.credentials.createInsecure();
    const options = { ...CHANNEL, ...channel };
    const definition = protoLoader.loadSync(
      FILES.map((name) => `tinkerpool/v1/${name}.proto`),
      { includeDirs: [PROTOS], longs: Number, enums: String, defaults: true, oneofs: true },
    );
    this.metadata = new grpc.Metadata();
    this.metadata.set("authorization", `Bearer ${apiKey}`);
    this.services = {};
    for (const [name, Service] of Object.entries(grpc.loadPackageDefinition(definition).tinkerpool.v1)) {
      if (Service.service) this.services[name] = new Service(host, credentials, options);
    }
  }

  // Makes one call, and repeats it. The same request again is safe: it has a seq or a request id, or changes nothing.
  call(service, method, request) {
    const stub = this.services[service];
    return repeated(method, () => new Promise((resolve, reject) => {
      const deadline = Date.now() + CALL_MS;
      stub[method](request, this.metadata, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
    }));
  }

  // Returns what `receive` makes of the messages of a stream; begins again after a broken one.
  stream(service, method, newRequest, receive) {
    return repeated(method, () => receive(this.services[service][method](newRequest(), this.metadata)));
  }

  // Returns the named operations, by name, when all are finished. After a broken stream it asks for what is missing.
  async finished(names) {
    const found = new Map();
    const missing = () => ({ names: names.filter((name) => !found.has(name)) });
    await this.stream("OperationService", "WaitOperations", missing, async (responses) => {
      for await (const { operation } of responses) {
        const { name, error } = operation;
        if (operation.state === "OPERATION_STATE_FAILED") throw new Error(`${name}: ${error.reason}: ${error.message}`);
        found.set(name, operation);
      }
    });
    return found;
  }

  close() {
    for (const stub of Object.values(this.services)) stub.close();
  }
}

// Returns why a call was refused: reason, domain, and the delay after which it may succeed, null if it will not.
export function errorDetails(error) {
  const found = { reason: "", domain: "", delayMs: null };
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  for (const { type_url: type, value } of bytes ? DETAILS.lookupType("Status").decode(bytes).details : []) {
    if (type.endsWith("/google.rpc.ErrorInfo")) Object.assign(found, DETAILS.lookupType("ErrorInfo").decode(value));
    if (type.endsWith("/google.rpc.RetryInfo")) {
      const { seconds, nanos } = DETAILS.lookupType("RetryInfo").decode(value).retry_delay;
      found.delayMs = Number(seconds) * 1000 + nanos / 1e6;
    }
  }
  return found;
}

// Attempts until it succeeds: after the delay that a refusal tells, or growing pauses without a connection.
async function repeated(name, attempt) {
  for (let pauseMs = 200; ; pauseMs = Math.min(2 * pauseMs, 2000)) {
    try {
      return await attempt();
    } catch (error) {
      const { reason, delayMs } = errorDetails(error);
      if (delayMs === null && (reason || !LOST.has(error.code))) throw error;
      const waitMs = (delayMs ?? pauseMs) * (1 + Math.random() / 4);
      console.error(`${name}: ${reason || grpc.status[error.code]}; again in ${(waitMs / 1000).toFixed(1)} s`);
      await sleep(waitMs);
    }
  }
}
