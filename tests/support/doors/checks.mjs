// What a client in the field needs of gRPC itself, tried by Node's gRPC library, or by HTTP/2 where that hides something.
//
// node checks.mjs CHECK [ARGUMENT]: prints what it found as one line of JSON. A line that ends with "..." comes before it
// where the test has to do something.

import http2 from "node:http2";
import { gzipSync } from "node:zlib";

import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

import { Pool } from "./pool.mjs";

const { TINKERPOOL_BASE_URL: url, TINKERPOOL_API_KEY: key } = process.env;
const [check, argument] = process.argv.slice(2);

const PUBLIC = protobuf.parse(`
  syntax = "proto3";
  message HealthCheckRequest { string service = 1; }
  message HealthCheckResponse { int32 status = 1; }
  message ServerReflectionRequest { string host = 1; string file_containing_symbol = 4; string list_services = 7; }
  message ServerReflectionResponse { Files file_descriptor_response = 4; Services list_services_response = 6; Error error_response = 7; }
  message Files { repeated bytes file_descriptor_proto = 1; }
  message Services { repeated Service service = 1; }
  message Service { string name = 1; }
  message Error { int32 error_code = 1; string error_message = 2; }
  message FileDescriptorProto { string name = 1; repeated string dependency = 3; repeated Described service = 6; }
  message Described { string name = 1; repeated Named method = 2; }
  message Named { string name = 1; }
`, { keepCase: true }).root;

// Returns the definition of a method of the services that need no key.
function method(path, request, response, { requestStream = false, responseStream = false } = {}) {
  const [sent, received] = [PUBLIC.lookupType(request), PUBLIC.lookupType(response)];
  return {
    path,
    requestStream,
    responseStream,
    requestSerialize: (message) => Buffer.from(sent.encode(message).finish()),
    requestDeserialize: (bytes) => sent.decode(bytes),
    responseSerialize: (message) => Buffer.from(received.encode(message).finish()),
    responseDeserialize: (bytes) => received.toObject(received.decode(bytes), { arrays: true, defaults: true }),
  };
}

function client(definition) {
  const Client = grpc.makeGenericClientConstructor(definition, "public");
  return new Client(new URL(url).host, grpc.credentials.createInsecure());
}

// Makes a unary call; returns its response, or its error.
function unary(stub, name, request, ...rest) {
  return new Promise((resolve) => {
    stub[name](request, ...rest, (error, response) => resolve(error ?? response));
  });
}

// Returns the name of an error's code, and its message.
const status = ({ code, details }) => ({ code: grpc.status[code], details });

// Reads a stream to its end; returns its messages and how it ended.
async function read(stream) {
  const messages = [];
  try {
    for await (const message of stream) messages.push(message);
    return { messages, code: "OK" };
  } catch (error) {
    return { messages, ...status(error) };
  }
}

const HEALTH = {
  check: method("/grpc.health.v1.Health/Check", "HealthCheckRequest", "HealthCheckResponse"),
  watch: method("/grpc.health.v1.Health/Watch", "HealthCheckRequest", "HealthCheckResponse", { responseStream: true }),
};
const reflection = (version) => method(
  `/grpc.reflection.${version}.ServerReflection/ServerReflectionInfo`,
  "ServerReflectionRequest", "ServerReflectionResponse", { requestStream: true, responseStream: true },
);

// Returns an open connection.
function connected() {
  return new Promise((resolve, reject) => { const session = http2.connect(url, () => resolve(session)).on("error", reject); });
}

// Sends one request of a call over HTTP/2, with headers of its own; returns the headers and messages of the response.
function send(session, path, message, headers, isCompressed) {
  const stream = session.request({
    ":method": "POST", ":path": path, "content-type": "application/grpc", te: "trailers", authorization: `Bearer ${key}`,
    ...headers,
  });
  const head = Buffer.alloc(5);
  head.writeUInt8(isCompressed ? 1 : 0);
  head.writeUInt32BE(message.length, 1);
  stream.end(Buffer.concat([head, message]));
  return new Promise((resolve, reject) => {
    const found = { data: [] };
    stream.on("response", (received) => Object.assign(found, { headers: received }));
    stream.on("trailers", (received) => Object.assign(found, { trailers: received }));
    stream.on("data", (data) => found.data.push(data));
    stream.on("error", reject);
    stream.on("close", () => resolve({ ...found, data: Buffer.concat(found.data), reset: stream.rstCode }));
  });
}

const CHECKS = {
  // Waits for an operation that the test finishes once it has seen pings, which Node's library prints.
  async keepalive() {
    const pool = new Pool(url, key, undefined, { "grpc.keepalive_time_ms": 20, "grpc.keepalive_timeout_ms": 20_000 });
    const { code, details } = await read(pool.services.OperationService.waitOperations({ names: [argument] }, pool.metadata));
    return { code, details };
  },

  // Sends a deadline, and leaves it to the pool to keep it.
  async deadline() {
    const session = await connected();
    const name = Buffer.from(argument);
    const request = Buffer.concat([Buffer.from([10, name.length]), name]); // WaitOperationsRequest { names: [argument] }
    const path = "/tinkerpool.v1.OperationService/WaitOperations";
    const { headers, trailers, reset } = await send(session, path, request, { "grpc-timeout": "200m" }, false);
    session.close();
    return { status: (trailers ?? headers)?.["grpc-status"] ?? null, reset };
  },

  // The same with Node's library, which keeps it, too.
  async client_deadline() {
    const pool = new Pool(url, key);
    const deadline = Date.now() + 200;
    return read(pool.services.OperationService.waitOperations({ names: [argument] }, pool.metadata, { deadline }));
  },

  // Sends compressed requests: with Node's library, and over HTTP/2 with headers that allow a compressed response.
  async gzip() {
    const pool = new Pool(url, key, undefined, { "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip });
    const session = await connected();
    const text = "x".repeat(2000);
    const field = Buffer.concat([Buffer.from([18, 0xd0, 0x0f]), Buffer.from(text)]); // CreateSessionRequest.request_id
    const path = "/tinkerpool.v1.SessionService/CreateSession";
    const names = { "grpc-encoding": "gzip", "grpc-accept-encoding": "gzip" };
    const { headers, trailers, data } = await send(session, path, gzipSync(field), names, true);
    session.close();
    return {
      library: (await unary(pool.services.SessionService, "createSession", { requestId: text }, pool.metadata)).session,
      sent: { status: (trailers ?? headers)["grpc-status"], isCompressed: data[0] === 1 },
      accepts: headers["grpc-accept-encoding"],
    };
  },

  // Sends a message that is small on the wire, and as large as the argument says once it is unpacked.
  async bomb() {
    const session = await connected();
    const path = "/tinkerpool.v1.TrainingService/TrainStep";
    const { headers, trailers } = await send(session, path, gzipSync(Buffer.alloc(Number(argument))), { "grpc-encoding": "gzip" }, true);
    session.close();
    const { "grpc-status": code, "grpc-message": details } = trailers ?? headers;
    return { code: grpc.status[code], details: decodeURIComponent(details ?? "") };
  },

  // Sends too large a request to a call with tensors, and to one without; and takes a response above a limit of its own.
  async sizes() {
    const pool = new Pool(url, key, undefined, { "grpc.max_send_message_length": -1 });
    const narrow = new Pool(url, key, undefined, { "grpc.max_receive_message_length": 10 });
    const tokens = { data: Buffer.alloc(Number(argument)), dtype: "DATA_TYPE_INT32" };
    const { TrainingService, OperationService } = pool.services;
    const names = [Buffer.alloc(3 << 20, "x").toString()];
    return {
      large: status(await unary(TrainingService, "trainStep", { adapterId: "a", seq: 1, data: [{ tokens }] }, pool.metadata)),
      small: await read(OperationService.waitOperations({ names }, pool.metadata)),
      response: status(await unary(narrow.services.SessionService, "getCapabilities", {}, pool.metadata)),
    };
  },

  // Lists services, and the methods of one, from what the server says alone.
  async reflection() {
    const ask = async (version, request) => {
      const stream = client({ info: reflection(version) }).info();
      stream.end(request);
      return read(stream);
    };
    const { messages: [listed] } = await ask("v1alpha", { list_services: "*" });
    const { messages: [described] } = await ask("v1alpha", { file_containing_symbol: argument });
    const File = PUBLIC.lookupType("FileDescriptorProto");
    const files = described.file_descriptor_response.file_descriptor_proto.map((bytes) => File.decode(bytes));
    const unknown = await ask("v1alpha", { file_containing_symbol: "tinkerpool.v1.Nothing" });
    return {
      services: listed.list_services_response.service.map(({ name }) => name),
      methods: files.flatMap(({ service }) => service.flatMap(({ method: found }) => found.map(({ name }) => name))),
      unknown: unknown.messages[0]?.error_response?.error_code ?? unknown.code,
      newer: (await ask("v1", { list_services: "*" })).code,
    };
  },

  // Asks for the health of services by name, and watches one until the pool stops.
  async health() {
    const stub = client(HEALTH);
    const services = argument.split(",");
    const answers = await Promise.all(services.map((service) => unary(stub, "check", { service })));
    const unknown = await unary(stub, "check", { service: "tinkerpool.v1.Nothing" });
    const stream = stub.watch({ service: services[0] });
    await new Promise((resolve) => { stream.once("readable", resolve); });
    console.log("watching ...");
    const { messages, code } = await read(stream);
    return {
      statuses: answers.map(({ status: found }) => found),
      unknown: grpc.status[unknown.code],
      watched: messages.map(({ status: found }) => found),
      code,
    };
  },

  // Keeps one channel and one connection while the pool stops and starts again.
  async goaway() {
    const pool = new Pool(url, key);
    const session = await connected();
    const goaway = new Promise((resolve) => { session.once("goaway", resolve); });
    const { code } = await read(pool.services.OperationService.waitOperations({ names: [argument] }, pool.metadata));
    const found = await pool.finished([argument]);
    return { goaway: await goaway, code, finished: [...found.keys()] };
  },
};

console.log(JSON.stringify(await CHECKS[check]()));
process.exit(0);
