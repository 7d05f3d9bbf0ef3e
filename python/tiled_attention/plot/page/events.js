// Pointers, keys, the start.

function buildEvents() {
  const indexOf = (event) => event.target.closest?.("[data-index]")?.dataset.index;
  $("queries").addEventListener("pointerover", (event) => {
    const index = indexOf(event);
    if (index !== undefined && state.pinned === null && event.pointerType !== "touch") look(Number(index));
  });
  $("queries").addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index !== undefined) pin(Number(index));
  });
  $("map").addEventListener("pointermove", (event) => {
    const place = under(event);
    tip(event, place);
    if (place && state.pinned === null) look(place.query, place.key);
  });
  $("map").addEventListener("pointerleave", () => {
    tip(null, null);
    state.key = null;
    placeMarks();
  });
  $("map").addEventListener("click", (event) => {
    const place = under(event);
    if (place) pin(place.query, place.key);
  });
  $("map").addEventListener("dblclick", () => zoom(2));
  $("heads").addEventListener("click", (event) => {
    const thumb = event.target.closest("button");
    if (thumb) show(Number(thumb.dataset.layer), Number(thumb.dataset.head));
  });
  $("layer").addEventListener("change", () => show(Number($("layer").value), state.head));
  $("head").addEventListener("change", () => show(state.layer, Number($("head").value)));
  $("search").addEventListener("input", search);
  for (const id of ["scale", "faint"]) $(id).addEventListener("change", repaint);
  $("smaller").addEventListener("click", () => zoom(0.5));
  $("larger").addEventListener("click", () => zoom(2));
  $("whole").addEventListener("click", () => zoom(0));
  $("table-switch").addEventListener("click", () => toggle("table-switch", "table"));
  $("keys-switch").addEventListener("click", () => toggle("keys-switch", "keys-help"));
  $("theme").addEventListener("click", () => changeTheme(document.documentElement.dataset.theme !== "dark"));
  document.addEventListener("keydown", onKey);
  new ResizeObserver(drawMap).observe($("frame"));
  new ResizeObserver(paintHeads).observe($("heads"));
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  preferred.addEventListener("change", () => changeTheme(preferred.matches));
}

function changeTheme(dark) {
  theme(dark);
  repaint();
  paintHeads();
}

function onKey(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target === $("search")) {
    if (key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
    else if (key === "Escape") $("queries").focus();
    else return;
    event.preventDefault();
    return;
  }
  if (target.matches?.("select, input")) return;
  const onThumb = target.closest?.("#heads button");
  const handled = onThumb && key.startsWith("Arrow") ? besideThumb(onThumb, key) : onRow(key, target) || ($("letters").checked && onLetter(key));
  if (handled) event.preventDefault();
}

// Arrows move through the queries where tokens or map have the focus, or nothing has.
function onRow(key, target) {
  if (key === "Escape") {
    state.pinned = null;
    look(state.query, null, true);
    return true;
  }
  if (![$("queries"), $("map"), document.body].includes(target)) return false;
  const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -numQueries, End: numQueries };
  if (key in steps) move(state.query + steps[key]);
  else if ((key === "Enter" || key === " ") && target !== document.body) pin(state.query);
  else return false;
  return true;
}

function onLetter(key) {
  const around = (index, count) => (index + count) % count, { layer, head } = state;
  const actions = {
    h: () => show(layer, around(head + 1, layers[layer].heads.length)),
    H: () => show(layer, around(head - 1, layers[layer].heads.length)),
    l: () => show(around(layer + 1, layers.length), head),
    L: () => show(around(layer - 1, layers.length), head),
    t: () => toggle("table-switch", "table"),
    d: () => $("theme").click(),
    "?": () => toggle("keys-switch", "keys-help"),
    "/": () => $("search").focus(),
    "+": () => zoom(2),
    "=": () => zoom(2),
    "-": () => zoom(0.5),
    0: () => zoom(0),
  };
  const action = actions[key];
  action?.();
  return action !== undefined;
}

function besideThumb(thumb, key) {
  const [down, across] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
  const next = document.querySelector(`#heads [data-layer="${Number(thumb.dataset.layer) + down}"][data-head="${Number(thumb.dataset.head) + across}"]`);
  if (next) {
    thumb.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  return true;
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream: Chrome 103, Firefox 113, Safari 16.4 or later is needed");
  theme(matchMedia("(prefers-color-scheme: dark)").matches);
  if (matchMedia("(pointer: coarse)").matches) $("hint").textContent = "Tap a token to see where it looks; tap it again to release.";
  $("hidden-key").hidden = !page.causal;
  buildTokens();
  buildHeads();
  accuracy();
  buildEvents();
  zoom(0);
  await show(0, 0);
  await paintHeads();
  // The frame after next begins when this one is painted.
  requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.drawn = performance.now().toFixed(0))));
}

start().catch((error) => {
  $("failure").textContent = `The page cannot be drawn: ${error.message}`;
  $("failure").hidden = false;
});
