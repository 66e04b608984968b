// A colour for each tenant: the same at every visit, distinct for the first ones that are seen.

const PALETTE = [
  "#2f81f7",
  "#e0823d",
  "#2da66f",
  "#c65fd0",
  "#d5487b",
  "#8a7be8",
  "#1aa3b8",
  "#b5932a",
  "#6b8f2a",
  "#e06b5f",
];
const OTHERS = "#8b96a3";
const given = new Map();

/** Return a tenant's colour; that of others for the empty name. */
export function colourOf(tenant) {
  if (!tenant) return OTHERS;
  if (!given.has(tenant)) {
    const wanted = hash(tenant) % PALETTE.length;
    const used = new Set(given.values());
    const free = PALETTE.map((_, index) => PALETTE[(wanted + index) % PALETTE.length]).find((each) => !used.has(each));
    given.set(tenant, free ?? PALETTE[wanted]);
  }
  return given.get(tenant);
}

function hash(text) {
  let value = 7;
  for (const character of text) value = (value * 31 + character.codePointAt(0)) >>> 0;
  return value;
}
