// Text to token ids and back, and arrays to tensors, without a library.

// A byte-level BPE vocabulary that takes the longest piece that fits instead of applying merges in order. The ids decode to
// the same text, though not always through the same pieces as with the model's own tokenizer: enough for an example.
export class Vocabulary {
  constructor(tokenizerJson) {
    const vocab = JSON.parse(tokenizerJson).model?.vocab;
    if (vocab === undefined) throw new Error("this example reads byte-level BPE vocabularies; the model has another tokenizer");
    this.ids = new Map(Object.entries(vocab));
    this.pieces = new Map([...this.ids].map(([piece, id]) => [id, piece]));
    this.longest = Math.max(...[...this.ids.keys()].map((piece) => piece.length));
  }

  encode(text) {
    const symbols = [...Buffer.from(text, "utf8")].map((byte) => SYMBOL_OF_BYTE[byte]).join("");
    const ids = [];
    for (let at = 0; at < symbols.length; ) {
      let length = Math.min(this.longest, symbols.length - at);
      while (length > 1 && !this.ids.has(symbols.slice(at, at + length))) length -= 1;
      ids.push(this.ids.get(symbols.slice(at, at + length)));
      at += length;
    }
    return ids;
  }

  decode(ids) {
    const bytes = [...ids].flatMap((id) => [...(this.pieces.get(id) ?? "")].map((symbol) => BYTE_OF_SYMBOL.get(symbol)));
    return Buffer.from(bytes.filter((byte) => byte !== undefined)).toString("utf8");
  }
}

// Byte-level vocabularies write a printable byte as itself and other bytes as characters from U+0100 on.
const SYMBOL_OF_BYTE = [];
for (let byte = 0, next = 256; byte < 256; byte += 1) {
  const isPrintable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  SYMBOL_OF_BYTE.push(String.fromCharCode(isPrintable ? byte : next++));
}
const BYTE_OF_SYMBOL = new Map(SYMBOL_OF_BYTE.map((symbol, byte) => [symbol, byte]));

// Tensors travel as little-endian bytes with dtype and shape. (Every platform of Node is little-endian.)
export const int32 = (values) => tensor("DATA_TYPE_INT32", Int32Array.from(values));
export const float32 = (values) => tensor("DATA_TYPE_FLOAT32", Float32Array.from(values));

export function numbers({ data, dtype }) {
  const bytes = Uint8Array.from(data).buffer;
  return dtype === "DATA_TYPE_FLOAT32" ? new Float32Array(bytes) : new Int32Array(bytes);
}

function tensor(dtype, array) {
  return { data: Buffer.from(array.buffer), dtype, shape: [array.length] };
}
