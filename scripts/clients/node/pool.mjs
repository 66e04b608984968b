// A connection to a pool: address and key, stubs made from the .proto files at run time, and calls as promises.

import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTOS = fileURLToPath(new URL("../../../protos", import.meta.url));
const FILES = ["sessions", "adapters", "training", "operations", "checkpoints", "sampling"];
const MESSAGE_BYTES_MAX = 64 << 20;
const CALL_TIMEOUT_MS = 30_000;
const RETRY_CODES = new Set([grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED]);

// Returns address and key: from the environment, or else from the file that a pool on this machine writes, which also names
// the certificate to trust. A certificate of the client, for a pool that requires one, is named by the environment only.
export function findPool() {
  const { TINKERPOOL_BASE_URL: url, TINKERPOOL_API_KEY: apiKey, TINKERPOOL_HOME } = process.env;
  const { TINKERPOOL_CLIENT_CERTIFICATE: chain, TINKERPOOL_CLIENT_KEY: key } = process.env;
  const client = chain ? { chain: readFileSync(chain), key: readFileSync(key || chain) } : null;
  if (url && apiKey) return { url, apiKey, client };
  const file = join(TINKERPOOL_HOME || join(homedir(), ".tinkerpool"), "credentials.json");
  try {
    const written = JSON.parse(readFileSync(file, "utf8"));
    const isWritten = !url || url === written.url;
    const certificate = isWritten ? written.certificate : null;
    return { url: url || written.url, apiKey: apiKey || written.api_key, certificate, client };
  } catch {
    throw new Error(`no pool found in ${file}: start one with \`make up\`, or set TINKERPOOL_BASE_URL and TINKERPOOL_API_KEY`);
  }
}

export class Pool {
  constructor({ url, apiKey, certificate = null, client = null }) {
    const { protocol, hostname, port, host } = new URL(url);
    const isTls = protocol === "https:";
    const address = port ? host : `${hostname}:${isTls ? 443 : 80}`;
    const roots = certificate ? readFileSync(certificate.path) : null;
    const credentials = isTls ? grpc.credentials.createSsl(roots, client?.key, client?.chain) : grpc.credentials.createInsecure();
    const options = { "grpc.max_receive_message_length": MESSAGE_BYTES_MAX };
    if (certificate?.server_name) options["grpc.ssl_target_name_override"] = certificate.server_name;
    const definition = protoLoader.loadSync(
      FILES.map((name) => `tinkerpool/v1/${name}.proto`),
      { includeDirs: [PROTOS], longs: Number, enums: String, defaults: true, oneofs: true },
    );
    this.metadata = new grpc.Metadata();
    this.metadata.set("authorization", `Bearer ${apiKey}`);
    this.services = {};
    for (const [name, Service] of Object.entries(grpc.loadPackageDefinition(definition).tinkerpool.v1)) {
      if (Service.service) this.services[name] = new Service(address, credentials, options);
    }
  }

  // Makes one call, and retries it after a network error or a restart. A request carries a seq or a request id, so the
  // service returns the same response and runs it once.
  async call(service, method, request, attempts = 5) {
    const stub = this.services[service];
    for (let attempt = 1; ; attempt += 1) {
      try {
        return await new Promise((resolve, reject) => {
          const deadline = Date.now() + CALL_TIMEOUT_MS;
          stub[method](request, this.metadata, { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
        });
      } catch (error) {
        if (attempt === attempts || !RETRY_CODES.has(error.code)) throw error;
        await new Promise((resolve) => setTimeout(resolve, 200 * 2 ** attempt));
      }
    }
  }

  // Yields the named operations, each as soon as it is finished, from one stream.
  async *wait(names) {
    const stream = this.services.OperationService.waitOperations({ names }, this.metadata);
    for await (const { operation } of stream) {
      if (operation.state === "OPERATION_STATE_FAILED") throw new Error(`${operation.name}: ${operation.error.message}`);
      yield operation;
    }
  }

  close() {
    for (const stub of Object.values(this.services)) stub.close();
  }
}
