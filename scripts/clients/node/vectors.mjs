// Checks the vectors of the wire format (tests/data/wire): node vectors.mjs vectors.tsv

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

import protobuf from "protobufjs";

import { FILES, PROTOS } from "./pool.mjs";
import { tensor, texts } from "./tensors.mjs";

const root = new protobuf.Root();
root.resolvePath = (_, target) => (target.startsWith("google/") ? target : `${PROTOS}/${target}`);
root.loadSync([...FILES, "imports"].map((name) => `tinkerpool/v1/${name}.proto`));

const value = (text, dtype) => {
  if (dtype === "DATA_TYPE_FLOAT32") return new Float32Array(Uint32Array.of(parseInt(text, 16)).buffer)[0];
  return dtype === "DATA_TYPE_INT64" ? BigInt(text) : Number(text);
};

// Returns what of a vector is wrong. protobufjs keeps the order of a map's entries, so the bytes are always equal.
function faults({ message, bytes, values, elements, kind, hash }) {
  const type = root.lookupType(message);
  const wanted = Buffer.from(bytes, "hex");
  const decoded = type.decode(wanted);
  const found = [];
  if (!wanted.equals(type.encode(decoded).finish())) found.push("the encoded message has other bytes");
  if (!wanted.equals(type.encode(type.fromObject(JSON.parse(values))).finish())) found.push("the values differ");
  if (elements !== "-") {
    const { data, dtype } = type.toObject(decoded, { enums: String, defaults: true });
    const parts = elements ? elements.split(",") : [];
    if (texts({ data, dtype }).join() !== elements) found.push("the elements differ");
    if (!tensor(dtype, parts.map((text) => value(text, dtype))).data.equals(data)) found.push("a tensor of the elements differs");
  }
  const digest = createHash("sha256").update(`${kind}\0`).update(wanted).digest("hex");
  if (hash !== "-" && digest !== hash) found.push("the hash differs");
  return found;
}

const [header, ...lines] = readFileSync(process.argv[2], "utf8").trimEnd().split("\n").map((line) => line.split("\t"));
let numWrong = 0;
for (const line of lines) {
  const vector = Object.fromEntries(header.map((column, index) => [column, line[index]]));
  for (const fault of faults(vector)) {
    console.error(`${vector.name}: ${fault}`);
    numWrong += 1;
  }
}
console.log(`${lines.length} vectors`);
process.exitCode = numWrong ? 1 : 0;
