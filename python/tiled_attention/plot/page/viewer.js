// What is chosen, and everything that follows from it.

const $ = (id) => document.getElementById(id);
const queryTokens = page.tokens, keyTokens = page.key_tokens ?? page.tokens;
const cross = page.key_tokens !== null;
const state = { layer: 0, head: 0, query: 0, key: null, pinned: null, zoom: 1, map: null };
let colours, weights, request = 0;
const chips = { queries: [], keys: [] };
const TOP = 8;

const shown = (token) => (token === "" ? "∅" : token.replaceAll("\n", "⏎").replaceAll("\t", "⇥"));
const short = (token, most) => (shown(token).length > most ? shown(token).slice(0, most - 1) + "…" : shown(token));
const known = () => !Number.isNaN(weights[0]) || weights.some((w) => !Number.isNaN(w));
const nameOf = (layer, head) => `${layers[layer].name || `layer ${layer}`}, head ${layers[layer].heads[head]}`;
const nameOfHead = () => nameOf(state.layer, state.head);

function text(weight, smallest = 0) {
  if (weight === 0 && smallest > 0) return `< ${Number(smallest.toPrecision(1))}`;
  if (weight >= 0.0095) return weight.toFixed(weight >= 0.09995 ? 3 : 4);
  return weight === 0 || weight >= 1e-4 ? String(Number(weight.toPrecision(2))) : weight.toExponential(1);
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Where a weight stands on the ramp, 0 to 255.
function step(weight, row) {
  const scale = $("scale").value;
  const end = scale === "one" ? 1 : scale === "head" ? state.map.largestOfAll : row;
  const share = end > 0 ? Math.min(weight / end, 1) : 0;
  return Math.round(255 * ($("faint").checked ? Math.sqrt(share) : share));
}

function buildTokens() {
  const make = (token, index, role) => element("span", role ? { role, id: `q${index}`, "data-index": index } : { "data-index": index }, shown(token));
  chips.queries = queryTokens.map((token, i) => make(token, i, "option"));
  $("queries").replaceChildren(...chips.queries);
  chips.keys = cross ? keyTokens.map((token, j) => make(token, j)) : chips.queries;
  if (cross) {
    $("keys").replaceChildren(...chips.keys);
    $("keys-part").hidden = false;
    $("reading-title").textContent = "Queries";
  }
}

function paintTokens() {
  const largest = state.map?.largest[state.query] ?? 0;
  for (let j = 0; j < numKeys; j++) {
    const chip = chips.keys[j], weight = weights[j];
    if (Number.isNaN(weight)) {
      if (chip.style.backgroundColor) chip.style.backgroundColor = chip.style.color = "";
    } else {
      const at = step(weight, largest);
      chip.style.backgroundColor = colours.css[at];
      chip.style.color = colours.ink[at];
    }
    chip.classList.toggle("unseen", isHidden(state.query, j));
  }
}

function paintMarks(before) {
  const old = chips.queries[before], now = chips.queries[state.query];
  old?.classList.remove("query", "pinned");
  old?.removeAttribute("aria-selected");
  now.classList.add("query");
  now.classList.toggle("pinned", state.pinned !== null);
  now.setAttribute("aria-selected", state.pinned !== null);
  $("queries").setAttribute("aria-activedescendant", now.id);
}

function ranked() {
  return [...weights.keys()].filter((j) => !Number.isNaN(weights[j])).sort((a, b) => weights[b] - weights[a] || a - b);
}

function paintTop() {
  $("now").replaceChildren("Query ", String(state.query), " ", element("b", { class: "token" }, short(queryTokens[state.query], 40)), " looks at");
  const order = ranked().slice(0, TOP), smallest = state.map?.smallest(state.query);
  $("top").replaceChildren(
    ...order.map((j) => {
      const bar = element("i");
      bar.style.width = `${(100 * weights[j]) / weights[order[0]] || 0}%`;
      return element(
        "li", {}, element("span", { class: "number" }, text(weights[j], smallest)), element("span", { class: "rail" }, bar),
        element("span", { class: "place" }, String(j)), element("span", { class: "token" }, short(keyTokens[j], 40)),
      );
    }),
  );
  if (!order.length) $("top").replaceChildren(element("li", {}, known() ? "nothing" : "this page holds means over blocks only"));
}

function say() {
  const best = ranked().slice(0, 3).map((j) => `${text(weights[j])} on ${j} ${shown(keyTokens[j])}`);
  const pin = state.pinned === null ? "" : ", pinned";
  $("live").textContent = `${nameOfHead()}. Query ${state.query} ${shown(queryTokens[state.query])}${pin}: ${best.join(", ") || "no weights"}`;
}

// The query that is looked at. A pinned one stays until it is released.
function look(query, key = null, spoken = false) {
  const before = state.query;
  state.query = Math.min(Math.max(query, 0), numQueries - 1);
  state.key = key;
  weights = state.map ? state.map.row(state.query) : new Float32Array(numKeys).fill(NaN);
  paintTokens();
  paintMarks(before);
  paintTop();
  paintTable();
  placeMarks();
  if (spoken) say();
}

function pin(query, key = null) {
  state.pinned = state.pinned === query ? null : query;
  look(query, key, true);
  reveal();
}

function move(query) {
  if (state.pinned !== null) state.pinned = Math.min(Math.max(query, 0), numQueries - 1);
  follow(Math.min(Math.max(query, 0), numQueries - 1));
  look(query, null, true);
  reveal();
}

// The query's token into sight.
function reveal() {
  const box = $("queries"), chip = chips.queries[state.query];
  if (chip.offsetTop < box.scrollTop) box.scrollTop = chip.offsetTop - 8;
  const under = chip.offsetTop + chip.offsetHeight - box.clientHeight;
  if (under > box.scrollTop) box.scrollTop = under + 8;
}

function paintTable() {
  const table = $("table");
  if (table.hidden) return;
  const smallest = state.map?.smallest(state.query);
  const caption = `${nameOfHead()}: weights of query ${state.query}, ${shown(queryTokens[state.query])}`;
  if (table.dataset.rows !== "all") {
    const head = element("tr", {}, ...["Key", "Token", "Weight"].map((name) => element("th", { scope: "col" }, name)));
    const rows = keyTokens.map((token, j) => element("tr", {}, element("th", { scope: "row" }, String(j)), element("td", { class: "token" }, shown(token)), element("td")));
    table.replaceChildren(element("table", {}, element("caption"), element("thead", {}, head), element("tbody", {}, ...rows)));
    table.dataset.rows = "all";
  }
  table.querySelector("caption").textContent = caption;
  table.querySelectorAll("td:last-child").forEach((cell, j) => {
    const weight = weights[j];
    cell.textContent = Number.isNaN(weight) ? (isHidden(state.query, j) ? "hidden" : "small") : text(weight, smallest);
  });
}

async function show(layer, head) {
  const { heads } = layers[layer], count = heads.length;
  Object.assign(state, { layer, head: Math.min(head, count - 1) });
  $("head").replaceChildren(...heads.map((number, h) => element("option", { value: h }, String(number))));
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("picture-title").textContent = `Map of ${nameOfHead()}`;
  for (const thumb of document.querySelectorAll("#heads button")) {
    const now = Number(thumb.dataset.layer) === state.layer && Number(thumb.dataset.head) === state.head;
    thumb.setAttribute("aria-pressed", now);
    thumb.tabIndex = now ? 0 : -1;
  }
  const mine = ++request;
  const found = await Promise.all([headMap(state.layer, state.head), overviewsOf(state.layer)]);
  if (mine !== request) return;
  [state.map] = found;
  state.overview = found[1][state.head];
  look(state.pinned ?? state.query, null, document.documentElement.dataset.drawn !== undefined);
  drawMap();
}

const overviewCache = new Map();
function overviewsOf(layer) {
  if (!overviewCache.has(layer)) overviewCache.set(layer, overviews(layer));
  return overviewCache.get(layer);
}

function buildHeads() {
  const most = Math.max(...layers.map((layer) => layer.heads.length));
  $("heads").style.setProperty("--heads", most);
  layers.forEach((layer, l) => {
    const name = layer.name || `layer ${l}`;
    $("layer").append(element("option", { value: l }, name));
    $("heads").append(element("span", { class: "layer-name" }, name));
    for (let h = 0; h < most; h++) {
      if (h >= layer.heads.length) $("heads").append(element("span"));
      else {
        const label = nameOf(l, h);
        $("heads").append(element("button", { type: "button", "aria-label": label, title: label, "data-layer": l, "data-head": h, "aria-pressed": false }));
      }
    }
  });
}

// All pictures of heads stand on one canvas behind the buttons: hundreds of them would slow every frame.
async function paintHeads() {
  const all = await Promise.all(layers.map((_, l) => overviewsOf(l)));
  const sheet = $("sheet"), ratio = window.devicePixelRatio || 1, pen = sheet.getContext("2d"), one = document.createElement("canvas");
  const thumbs = [...document.querySelectorAll("#heads button")].map((thumb) => {
    const { offsetLeft: x, offsetTop: y, offsetWidth: width, offsetHeight: height } = thumb;
    return { x, y, width, height, map: all[thumb.dataset.layer][thumb.dataset.head] };
  });
  const end = (side, size) => Math.max(...thumbs.map((box) => box[side] + box[size]));
  const [width, height] = [end("x", "width"), end("y", "height")];
  Object.assign(sheet, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(sheet.style, { width: `${width}px`, height: `${height}px` });
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.imageSmoothingEnabled = false;
  const hidden = page.causal ? [style("--hidden"), hatch(pen)] : [];
  for (const { x, y, width, height, map } of thumbs) {
    for (const fill of hidden) {
      pen.fillStyle = fill;
      pen.fillRect(x, y, width, height);
    }
    Object.assign(one, { width: map.columns, height: map.rows });
    one.getContext("2d").putImageData(overviewImage(map, true), 0, 0);
    pen.drawImage(one, x, y, width, height);
  }
}

function overviewImage(map, faint = false) {
  const image = new ImageData(map.columns, map.rows), pixels = new Uint32Array(image.data.buffer);
  const table = Array.from({ length: 256 }, (_, code) => colours.packed[faint || $("faint").checked ? code : Math.round(code ** 2 / 255)]);
  const high = Math.ceil(numQueries / map.rows), wide = Math.ceil(numKeys / map.columns);
  for (let row = 0, i = 0; row < map.rows; row++) {
    const last = Math.min((row + 1) * high, numQueries) - 1;
    for (let column = 0; column < map.columns; column++, i++) if (!isHidden(last, column * wide)) pixels[i] = table[map.codes[i]];
  }
  return image;
}

// Search: in the text that the tokens make, so that a word in pieces is found.
function matches(wanted) {
  const glue = !queryTokens.some((token) => /^\s/.test(token) && token.trim());
  let whole = "";
  const owner = [];
  queryTokens.forEach((token, i) => {
    const piece = glue && token.startsWith("##");
    const part = ((glue && i > 0 && !piece ? " " : "") + (piece ? token.slice(2) : token)).toLowerCase();
    for (let n = 0; n < part.length; n++) owner.push(i);
    whole += part;
  });
  const found = [];
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + wanted.length)) found.push([owner[at], owner[at + wanted.length - 1]]);
  return found;
}

let found = [], foundAt = -1;
function search() {
  const wanted = $("search").value.trim().toLowerCase();
  found = wanted ? matches(wanted) : [];
  foundAt = -1;
  for (const chip of chips.queries) chip.classList.remove("match");
  for (const [first, last] of found) for (let i = first; i <= last; i++) chips.queries[i].classList.add("match");
  $("found").textContent = wanted ? `${found.length} found` : "";
}

function nextMatch(direction) {
  if (!found.length) return;
  foundAt = foundAt < 0 && direction < 0 ? found.length - 1 : (foundAt + direction + found.length) % found.length;
  $("found").textContent = `${foundAt + 1} of ${found.length}`;
  state.pinned = found[foundAt][0];
  move(state.pinned);
}

function toggle(button, part) {
  $(part).hidden = !$(part).hidden;
  $(button).setAttribute("aria-expanded", !$(part).hidden);
  if (part === "table") paintTable();
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark);
  colours = coloursOf(dark);
  const ramp = $("ramp").getContext("2d"), image = ramp.createImageData(256, 1);
  new Uint32Array(image.data.buffer).set(colours.packed);
  ramp.putImageData(image, 0, 0);
}

function repaint() {
  if (!state.overview) return;
  paintTokens();
  drawMap();
}

function accuracy() {
  const error = page.error, parts = [], percent = (share) => `${Number((100 * share).toPrecision(2))} %`;
  const held = page.kept === "all" ? "every weight" : page.count ? `the ${page.count} largest weights of each row` : "means over blocks";
  parts.push(`This page holds ${held} of ${numQueries} queries and ${numKeys} keys, ${layers.reduce((n, l) => n + l.heads.length, 0)} heads.`);
  if (page.share !== undefined) parts.push(`They are ${percent(page.share)} of a row's sum in the mean; what is drawn between them are means over blocks.`);
  if (error) parts.push(`Weights are rounded to ${page.levels + 1} steps${page.power === 1 ? "" : " of their square root"}: off by at most ${percent(error.largest_of_row)} of the largest in their row, ${Number(error.largest.toPrecision(2))} at most and ${Number(error.mean.toPrecision(2))} in the mean.`);
  parts.push("It loads nothing from anywhere.");
  $("accuracy").textContent = parts.join(" ");
}
