// The map: weights as pixels, a window of them when enlarged, and what lies above them.

const FONT = "11px system-ui, sans-serif", LABEL = 14, MOST_CELLS = 512;
const layout = { left: 0, top: 4, width: 0, height: 0, row: 0, column: 0, rows: numQueries, columns: numKeys };
const cells = document.createElement("canvas");

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Rows and columns in sight, around the query.
function follow(query) {
  const { rows, columns } = layout;
  if (query < layout.row || query >= layout.row + rows || state.zoom === 1) centre(query, query + aligned, rows, columns);
}

function centre(query, key, rows, columns) {
  const row = Math.min(Math.max(Math.round(query - rows / 2), 0), numQueries - rows);
  const column = Math.min(Math.max(Math.round(key - columns / 2), 0), numKeys - columns);
  const changed = row !== layout.row || column !== layout.column || rows !== layout.rows || columns !== layout.columns;
  Object.assign(layout, { row, column, rows, columns });
  if (changed) drawMap();
}

function zoom(factor) {
  state.zoom = factor === 0 ? 1 : Math.min(Math.max(state.zoom * factor, 1), Math.max(1, 2 ** Math.floor(Math.log2(Math.max(numQueries, numKeys) / 8))));
  const rows = Math.max(1, Math.ceil(numQueries / state.zoom)), columns = Math.max(1, Math.ceil(numKeys / state.zoom));
  centre(state.query, state.key ?? state.query + aligned, rows, columns);
  for (const [id, off] of [["smaller", state.zoom === 1], ["whole", state.zoom === 1]]) $(id).disabled = off;
}

function paintCells() {
  const { map } = state, context = cells.getContext("2d");
  if (page.kept !== "all") {
    const image = overviewImage(state.overview);
    cells.width = image.width;
    cells.height = image.height;
    context.putImageData(image, 0, 0);
    return;
  }
  cells.width = numKeys;
  cells.height = numQueries;
  const image = context.createImageData(numKeys, numQueries), pixels = new Uint32Array(image.data.buffer);
  const colour = new Uint32Array(page.levels + 1);
  for (let i = 0; i < numQueries; i++) {
    const start = map.start(i), count = map.count(i), largest = map.largest[i];
    for (let code = 0; code <= page.levels; code++) colour[code] = colours.packed[step(map.share[code] * largest, largest)];
    for (let n = 0; n < count; n++) pixels[i * numKeys + n] = colour[map.codes[start + n]];
  }
  context.putImageData(image, 0, 0);
}

function labelWidth(context, tokens, from, count, cell) {
  const every = Math.ceil(LABEL / cell);
  let width = 0;
  for (let i = from; i < from + count; i += every) width = Math.max(width, context.measureText(short(tokens[i], 14)).width);
  return { every, width: Math.ceil(width) + 6 };
}

function hatch(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = style("--hatch");
  pen.lineWidth = 1;
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

function drawMap() {
  const canvas = $("map"), ratio = window.devicePixelRatio || 1, wide = Math.max($("frame").clientWidth, 240);
  if (!state.overview) return;
  paintCells();
  const pen = canvas.getContext("2d");
  pen.font = FONT;
  const { rows, columns } = layout;
  // Two passes: the labels need the size of a cell, and cells the size of the labels.
  const left = labelWidth(pen, queryTokens, layout.row, rows, Math.max(wide * 0.85 / columns, 1)).width;
  const cell = Math.min((wide - left - 2) / columns, Math.max(560 / rows, 1), 36);
  const height = Math.max(cell * rows, 24), width = cell * columns;
  const across = labelWidth(pen, keyTokens, layout.column, columns, cell);
  const down = labelWidth(pen, queryTokens, layout.row, rows, height / rows);
  Object.assign(layout, { left, width, height });
  const full = [left + width + 2, layout.top + height + across.width + 4];
  canvas.width = Math.round(full[0] * ratio);
  canvas.height = Math.round(full[1] * ratio);
  canvas.style.width = `${full[0]}px`;
  canvas.style.height = `${full[1]}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  if (page.causal) {
    pen.fillStyle = style("--hidden");
    pen.fillRect(left, layout.top, width, height);
    pen.fillStyle = hatch(pen);
    pen.fillRect(left, layout.top, width, height);
  }
  const scale = [cells.width / numKeys, cells.height / numQueries];
  pen.imageSmoothingEnabled = (cell * ratio) / scale[0] < 1;
  const close = page.kept === "largest" && state.map && rows <= MOST_CELLS;
  if (close) drawLargest(pen, width / columns, height / rows);
  else pen.drawImage(cells, layout.column * scale[0], layout.row * scale[1], columns * scale[0], rows * scale[1], left, layout.top, width, height);
  pen.strokeStyle = style("--line");
  pen.strokeRect(left - 0.5, layout.top - 0.5, width + 1, height + 1);
  pen.font = FONT;
  pen.fillStyle = style("--soft");
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let i = layout.row; i < layout.row + rows; i += down.every) pen.fillText(short(queryTokens[i], 14), left - 5, middle(i, "row"));
  for (let j = layout.column; j < layout.column + columns; j += across.every) below(pen, j);
  const end = { row: "largest of the row", one: "1", head: state.map ? text(state.map.largestOfAll) : "" }[$("scale").value];
  $("ramp-end").textContent = page.kept === "all" || close ? end : `a mean of ${text(state.overview.largest)} in a block`;
  placeMarks();
}

// The kept weights of the rows in sight, above the means of their blocks in the same colours.
function drawLargest(pen, wide, high) {
  const last = layout.column + layout.columns, size = Math.ceil(numKeys / state.overview.columns);
  for (let i = layout.row; i < layout.row + layout.rows; i++) {
    const y = layout.top + (i - layout.row) * high;
    for (let first = Math.floor(layout.column / size) * size; first < last; first += size) {
      const from = Math.max(first, layout.column), to = Math.min(first + size, last, page.causal ? i + aligned + 1 : numKeys);
      if (to <= from) break;
      pen.fillStyle = colours.css[step(meanAt(i, first), state.map.largest[i])];
      pen.fillRect(layout.left + (from - layout.column) * wide, y, (to - from) * wide, high);
    }
    for (let n = 0; n < page.count; n++) {
      const j = state.map.keyOf(i, n) - layout.column, at = i * page.count + n;
      if (j < 0 || j >= layout.columns || state.map.codes[at] === 0) continue;
      pen.fillStyle = colours.css[step(state.map.share[state.map.codes[at]] * state.map.largest[i], state.map.largest[i])];
      pen.fillRect(layout.left + j * wide, y, wide, high);
    }
  }
}

function middle(index, which) {
  if (which === "row") return layout.top + ((index - layout.row + 0.5) * layout.height) / layout.rows;
  return layout.left + ((index - layout.column + 0.5) * layout.width) / layout.columns;
}

function below(pen, j) {
  pen.save();
  pen.translate(middle(j, "column"), layout.top + layout.height + 4);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillText(short(keyTokens[j], 14), 0, 0);
  pen.restore();
}

// The row and the column in sight, and the query's label above the thinned ones: elements, so that a hover need not draw the map again.
function placeMarks() {
  const { left, top, width, height } = layout, high = height / layout.rows, wide = width / layout.columns;
  const row = state.query - layout.row, column = state.key === null ? -1 : state.key - layout.column;
  const place = (name, seen, box) => {
    const mark = $(name);
    mark.hidden = !seen || !width;
    if (!mark.hidden) for (const [side, value] of Object.entries(box)) mark.style[side] = `${value}px`;
    return mark;
  };
  const inside = row >= 0 && row < layout.rows;
  place("row-mark", inside, { left, top: top + row * high, width, height: Math.max(high, 1) }).classList.toggle("pinned", state.pinned !== null);
  place("column-mark", column >= 0 && column < layout.columns, { left: left + column * wide, top, width: Math.max(wide, 1), height });
  const label = place("query-mark", inside, { top: top + (row + 0.5) * high - LABEL / 2, width: left - 4, height: LABEL });
  label.textContent = short(queryTokens[state.query], 14);
  $("map").setAttribute("aria-label", `Map of ${nameOfHead()}: ${numQueries} queries down, ${numKeys} keys across. Query ${state.query}, ${shown(queryTokens[state.query])}.`);
}

// {query, key} under a pointer, or null
function under(event) {
  const box = $("map").getBoundingClientRect();
  const x = event.clientX - box.left - layout.left, y = event.clientY - box.top - layout.top;
  if (x < 0 || y < 0 || x >= layout.width || y >= layout.height) return null;
  return { query: layout.row + Math.floor((y * layout.rows) / layout.height), key: layout.column + Math.floor((x * layout.columns) / layout.width) };
}

function tip(event, place) {
  const box = $("tip");
  box.hidden = place === null;
  if (place === null) return;
  const row = state.map?.row(place.query), weight = row ? row[place.key] : NaN;
  const value = Number.isNaN(weight) ? (isHidden(place.query, place.key) ? "hidden" : `mean of the block ${text(meanAt(place.query, place.key))}`) : text(weight, state.map.smallest(place.query));
  box.replaceChildren(element("b", {}, short(queryTokens[place.query], 24)), " → ", element("b", {}, short(keyTokens[place.key], 24)), ` ${value}`);
  const frame = $("frame").getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
  box.style.left = `${Math.min(Math.max(x + 14, 0), Math.max(frame.width - box.offsetWidth, 0))}px`;
  box.style.top = `${y > frame.height / 2 ? y - box.offsetHeight - 12 : y + 18}px`;
}

function meanAt(query, key) {
  const { rows, columns, codes, largest } = state.overview;
  const row = Math.floor(query / Math.ceil(numQueries / rows)), column = Math.floor(key / Math.ceil(numKeys / columns));
  return (codes[row * columns + column] / 255) ** 2 * largest;
}
