"use strict";
// The weights of the page, read from its own text when they are needed, and colours for them.

const page = JSON.parse(document.getElementById("data").textContent);
const { seqlen_q: numQueries, seqlen_kv: numKeys, layers } = page;
const aligned = numKeys - numQueries; // query i stands at key i + aligned
const isHidden = (i, j) => page.causal && j > i + aligned;

function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

async function inflated(id) {
  const packed = new Blob([bytesOf(document.getElementById(id).textContent)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// code -> weight / largest weight of the row
function shares(power, levels) {
  return Float32Array.from({ length: levels + 1 }, (_, code) => (code / levels) ** (1 / power));
}

// The codes of one head. Row i has the keys keyOf(i, 0 ... count(i) - 1), ascending; the others are hidden, or unknown where page.kept is "largest".
class HeadMap {
  constructor(bytes) {
    this.largest = new Float32Array(bytes.slice(0, 4 * numQueries).buffer);
    this.codes = bytes.subarray(4 * numQueries);
    this.share = shares(page.power, page.levels);
    this.largestOfAll = this.largest.reduce((a, b) => Math.max(a, b), 0);
    if (page.kept === "largest") {
      const size = numQueries * page.count, planes = this.codes.subarray(size);
      this.places = new Uint32Array(size);
      for (let plane = 0; plane < page.planes; plane++)
        for (let i = 0; i < size; i++) this.places[i] += planes[plane * size + i] * 2 ** (8 * plane);
    } else if (page.causal) {
      this.starts = new Uint32Array(numQueries + 1);
      for (let i = 0; i < numQueries; i++) this.starts[i + 1] = this.starts[i] + this.count(i);
    }
  }

  count(i) {
    if (page.kept === "largest") return page.count;
    return page.causal ? Math.min(Math.max(i + aligned + 1, 0), numKeys) : numKeys;
  }

  start(i) {
    return this.starts ? this.starts[i] : i * this.count(i);
  }

  keyOf(i, n) {
    return this.places ? this.places[i * page.count + n] : n;
  }

  // Float32Array (numKeys,): NaN where a key is hidden or its weight unknown.
  row(i) {
    const weights = new Float32Array(numKeys).fill(NaN), start = this.start(i), count = this.count(i);
    for (let n = 0; n < count; n++) {
      const j = this.keyOf(i, n);
      if (!isHidden(i, j)) weights[j] = this.share[this.codes[start + n]] * this.largest[i];
    }
    return weights;
  }

  // Below this a weight has the code 0.
  smallest(i) {
    return this.largest[i] * (0.5 / page.levels) ** (1 / page.power);
  }
}

const cache = new Map(); // "layer-head" -> Promise of a HeadMap, the last used last
const CACHED = 48;

function headMap(layer, head) {
  const name = `${layer}-${head}`;
  const found = cache.get(name) ?? (page.count === 0 ? Promise.resolve(null) : inflated(`map-${name}`).then((bytes) => new HeadMap(bytes)));
  cache.delete(name);
  cache.set(name, found);
  if (cache.size > CACHED) cache.delete(cache.keys().next().value);
  return found;
}

// [head] -> {codes (rows * columns), rows, columns, largest}: means over blocks, square roots of shares of the largest mean in 255 levels
async function overviews(layer) {
  const { heads, blocks: [rows, columns], largest_mean: largest } = layers[layer];
  const codes = await inflated(`overview-${layer}`), size = rows * columns;
  return heads.map((_, head) => ({ codes: codes.subarray(head * size, (head + 1) * size), rows, columns, largest: largest[head] }));
}

// Colours: 256 steps of even lightness in OKLab (Ottosson, 2020), from the page's ground to its ink, so that they read in grey and for every
// colour vision.
function linearRgb(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue), b = chroma * Math.sin(hue);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => Math.min(Math.max(value, 0), 1));
}

function coloursOf(dark) {
  const packed = new Uint32Array(256), css = [], ink = [];
  for (let i = 0; i < 256; i++) {
    const t = i / 255;
    const lightness = dark ? 0.26 + 0.67 * t : 0.975 - 0.7 * t;
    const chroma = dark ? 0.035 + 0.125 * Math.sin(Math.PI * t) : 0.004 + 0.05 * t + 0.1 * Math.sin(Math.PI * t);
    const hue = ((dark ? 285 - 175 * t : 242 + 34 * t) * Math.PI) / 180;
    const linear = linearRgb(lightness, chroma, hue);
    const [r, g, b] = linear.map((v) => Math.round(255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055)));
    const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    packed[i] = (255 << 24) | (b << 16) | (g << 8) | r; // bytes r, g, b, a
    css.push(`rgb(${r} ${g} ${b})`);
    ink.push(luminance > 0.18 ? "#0b0d10" : "#ffffff");
  }
  return { packed, css, ink };
}
