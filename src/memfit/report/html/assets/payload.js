// Unpack the payload: see page_payload.py for the layout.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

async function read(base64) {
  if (!window.DecompressionStream) {
    throw new Error('This browser cannot unpack the report (no DecompressionStream). Use a browser from 2023 or later.');
  }
  const text = atob(base64.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const raw = await new Response(stream).arrayBuffer();
  const length = new DataView(raw).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, length)));
  const tables = {};
  for (const [name, [type, offset, count]] of Object.entries(head.columns)) {
    const [table, column] = name.split('.');
    (tables[table] ||= {})[column] = new ARRAYS[type](raw, 4 + length + offset, count);
  }
  return { ...head.facts, words: head.words, ...tables };
}
