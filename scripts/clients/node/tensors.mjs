// Tensors: little-endian bytes with dtype and shape. Every platform of Node is little-endian.

const ARRAYS = { DATA_TYPE_FLOAT32: Float32Array, DATA_TYPE_INT32: Int32Array, DATA_TYPE_INT64: BigInt64Array };

// Returns numbers (of int64: BigInts) as a tensor of one dimension.
export function tensor(dtype, values) {
  return { data: Buffer.from(ARRAYS[dtype].from(values).buffer), dtype, shape: [values.length] };
}

// Returns the elements of a tensor as an array of their type.
export function elements({ data, dtype }) {
  return new ARRAYS[dtype](Uint8Array.from(data).buffer);
}

// Returns the elements of a tensor as text: integers in decimal, floats as their bits in hexadecimal.
export function texts(found) {
  if (found.dtype !== "DATA_TYPE_FLOAT32") return [...elements(found)].map(String);
  return [...new Uint32Array(elements(found).buffer)].map((word) => word.toString(16).padStart(8, "0"));
}
