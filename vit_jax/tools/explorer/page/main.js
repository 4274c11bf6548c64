"use strict";

const source = findSource();
const element = (id) => document.getElementById(id);
/**
 * State of all panes. The query is {token}, {at} (a position in the image), {label} or
 * {text}; depth is 0 for the first layer and 1 for the last.
 */
let state = {
  ...{ query: {}, depth: 1, kind: "mean" },
  ...{ opacity: 0.55, smooth: false, clip: false, view: "attention" },
};
let opened = null; // Name of the shown image of the folder.
let hovering; // Timer of the patch under the pointer.
let panes = [];
let active; // Pane whose patches the arrow keys select.
let limits;
const HOVER_DELAY = 60; // Milliseconds that the pointer rests on a patch to select it.
let drawn = 0;
let requested = 0; // Number of the last requested image; answers to others are dropped.

/** Changes the state and draws it. */
function change(changes) {
  element("message").textContent = "";
  return draw(changes);
}

async function draw(changes) {
  clearTimeout(hovering);
  state = { ...state, ...changes };
  const wanted = state;
  try {
    await Promise.all(panes.map((pane) => pane.show(wanted)));
  } catch (error) {
    if (wanted === state) showError(error);
    return;
  }
  if (wanted !== state) return;
  const deepest = Number(element("layer").max);
  const layer = Math.round(state.depth * (deepest - 1)) + 1;
  element("layer").value = layer;
  element("depth").textContent = `${layer} of ${deepest}`;
  showQuery();
  writeAddress();
  for (const button of element("extra").children) {
    button.setAttribute("aria-pressed", button.value === state.query.token);
  }
  element("announced").textContent = panes
    .map((pane) => `${pane.find(".which").textContent}. ${pane.words}`)
    .join(" ");
  document.body.dataset.drawn = ++drawn;
}

/** Makes a pane the one that the keys control. */
function activate(pane) {
  active = pane;
  for (const each of panes) {
    each.root.setAttribute("aria-current", each === pane && panes.length > 1);
  }
  if (pane.shown) showQuery();
}

function showQuery() {
  const { patch } = active.asking(state.query);
  element("query").textContent =
    patch === null || "label" in state.query || "text" in state.query
      ? ""
      : inWords(active.rowAndColumn(patch));
}

/** Writes the state into the address, for links and bookmarks. */
function writeAddress() {
  const { query, depth, kind, opacity, smooth, clip, view } = state;
  const words = new URLSearchParams();
  if (opened !== null) words.set("image", opened);
  for (const [key, value] of Object.entries(query)) {
    if (key !== "of") words.set(key, value); // That image may be gone.
  }
  if (view !== "attention") words.set("view", view);
  for (const [key, value] of Object.entries({ depth, kind, opacity })) {
    words.set(key, typeof value === "number" ? Number(value.toFixed(3)) : value);
  }
  if (smooth) words.set("smooth", 1);
  if (clip) words.set("clip", 1);
  history.replaceState(null, "", `#${words}`);
}

/** Reads the valid parts of the state from the address; returns the image's name. */
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const number = (text) => (text === null ? NaN : Number(text));
  const share = (name, other) => {
    const value = number(words.get(name));
    return value >= 0 && value <= 1 ? value : other;
  };
  const at = (words.get("at") ?? "").split(",").map(Number);
  const [label, head] = [number(words.get("label")), number(words.get("kind"))];
  let { query, kind } = state;
  if (words.has("token")) query = { token: words.get("token") };
  else if (at.length === 2 && at.every((value) => value >= 0 && value <= 1)) query = { at };
  else if (Number.isInteger(label) && label >= 0) query = { label };
  else if (words.get("text")) query = { text: words.get("text") };
  const views = [...element("view").options].map((option) => option.value);
  const view = views.includes(words.get("view")) ? words.get("view") : state.view;
  if (FUSED.includes(words.get("kind"))) kind = words.get("kind");
  else if (Number.isInteger(head) && head >= 0) kind = head;
  state = {
    ...{ query, kind, depth: share("depth", state.depth) },
    opacity: share("opacity", state.opacity),
    ...{ smooth: words.has("smooth"), clip: words.has("clip"), view },
  };
  element("view").value = view;
  element("text").value = query.text ?? "";
  element("opacity").value = 100 * state.opacity;
  element("smooth").checked = state.smooth;
  element("clip").checked = state.clip;
  return words.get("image");
}

/**
 * Shows an image.
 *
 * @param {Promise<object>} outputs the models' outputs.
 * @param {string|null} name name of the image in the folder, null for a file.
 */
async function show(outputs, name = null) {
  const number = ++requested;
  element("message").textContent = "";
  element("busy").textContent = "Running…";
  try {
    const seen = await outputs;
    if (number !== requested) return;
    const fetched = panes.map((pane) => pane.fetchPicture(source, seen));
    const pictures = await Promise.all(fetched);
    if (number !== requested) return; // Another image was requested meanwhile.
    const compared = comparedWith();
    panes.forEach((pane, i) => pane.take(source, seen, pictures[i]));
    element("subtitle").textContent = seen.name;
    opened = name;
    for (const button of element("folder").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", button.title === name);
    }
    const { query } = state;
    for (const id of ["controls", "keys"]) element(id).hidden = false;
    element("panes").hidden = false;
    // Another image has other classes.
    const kept = query.token || query.at || query.text;
    await draw(kept ? { query: { ...query, ...compared } } : { query: queryOf(query) });
  } catch (error) {
    if (number === requested) showError(error);
  }
  if (number === requested) element("busy").textContent = "";
}

/** Returns the patch of the shown image that the next image is compared with. */
function comparedWith() {
  const { query, view } = state;
  if (view !== "similarity" || !query.at || !active.seen) return {};
  if (query.of) return {};
  const { key, name } = active.seen;
  const patches = panes.map((pane) => pane.named(pane.asking(query).patch));
  return { of: { key, name, patches } };
}

/** Shows a file, unless it is too large for the server. */
function showFile(file) {
  if (file.size > limits.bytes) {
    const most = `${limits.bytes.toLocaleString("en")} bytes`;
    showError(new Error(`${file.name} has more than ${most}: give a smaller file.`));
    return;
  }
  show(source.see(file));
}

/** Returns a query for this image: the class if it is listed, else the default. */
function queryOf({ label }) {
  element("text").value = "";
  const known = panes.flatMap((pane) => pane.seen.models[pane.number].classes);
  if (known.some((one) => one.label === label)) return { label };
  const extra = panes.flatMap((pane) => pane.model.extra);
  return extra.length ? { token: extra[0] } : { at: panes[0].middle() };
}

function showError(error) {
  element("message").textContent = error.message;
}

const chosen = {
  pane: activate,
  patch(pane, patch) {
    activate(pane);
    change({ query: { at: pane.placeOf(patch) } });
  },
  kind(kind) {
    change({ kind });
  },
  layer(pane, layer) {
    change({ depth: layer / Math.max(1, pane.model.labels.length - 1) });
  },
  label(label) {
    change({ query: state.query.label === label ? queryOf({}) : { label } });
  },
  hovered(pane, patch) {
    clearTimeout(hovering);
    hovering = setTimeout(() => {
      const query = patch === null ? state.query : { at: pane.placeOf(patch) };
      // A click on the patch reports the error.
      for (const each of panes) each.show({ ...state, query }).catch(() => {});
    }, HOVER_DELAY);
  },
};

/** Saves the map of the active pane as a picture. */
function savePicture() {
  active.map.toBlob((blob) => download(blob, `${stem()}.png`));
}

/** Saves the page with this image as a file without a server. */
async function savePage() {
  element("message").textContent = "";
  element("busy").textContent = "Writing the file…";
  try {
    download(await source.page(active.seen), `${stem()}.html`);
  } catch (error) {
    showError(error);
  }
  element("busy").textContent = "";
}

/** Returns the stem of saved files, from the name of the image. */
function stem() {
  return active.seen.name.replace(/.*\//, "").replace(/\.\w+$/, "") || "attention";
}

function download(blob, name) {
  const link = document.createElement("a");
  Object.assign(link, { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Moves the query by some patches, from an extra token to the middle of the image. */
function move(down, right) {
  const { patch } = active.asking(state.query);
  const [rows, columns] = active.model.grid;
  const [row, column] = active.rowAndColumn(patch ?? active.patchAt(active.middle()));
  const clip = (value, count) => Math.min(count - 1, Math.max(0, value));
  const next = patch === null ? [row, column] : [row + down, column + right];
  chosen.patch(active, clip(next[0], rows) * columns + clip(next[1], columns));
}

/** Moves some layers up or down. */
function climb(layers) {
  const top = Math.max(1, Number(element("layer").max) - 1);
  const layer = Math.round(state.depth * top) + layers;
  change({ depth: Math.min(top, Math.max(0, layer)) / top });
}

/** Moves to another head, or to their mean, maximum or rollout. */
function turn(by) {
  const all = active.kinds;
  const place = all.indexOf(active.shown.kind) + by + all.length;
  change({ kind: all[place % all.length] });
}

function askToken(token) {
  if (panes.some((pane) => pane.model.extra.includes(token))) {
    change({ query: { token } });
  }
}

const KEYS = {
  ArrowUp: () => move(-1, 0),
  ArrowDown: () => move(1, 0),
  ArrowLeft: () => move(0, -1),
  ArrowRight: () => move(0, 1),
  "[": () => climb(-1),
  "]": () => climb(1),
  h: () => turn(1),
  H: () => turn(-1),
  c: () => askToken("CLS"),
};

function onKey(event) {
  // Many keyboards need AltGr for brackets, which some systems report as Ctrl and Alt.
  const bracket = event.getModifierState("AltGraph");
  const shortcut = (event.ctrlKey || event.metaKey || event.altKey) && !bracket;
  const input =
    event.target.matches("#text, #view") ||
    (event.key.startsWith("Arrow") && event.target.type === "range");
  if (shortcut || input || !KEYS[event.key] || !active?.shown) return;
  event.preventDefault(); // Arrow keys would scroll the page as well.
  KEYS[event.key]();
}

function onDrop(event) {
  event.preventDefault();
  document.body.classList.remove("over");
  const file = event.dataTransfer.files[0];
  if (file) showFile(file);
  else showError(new Error("This is not a file: save the image, then drop the file."));
}

function listen() {
  document.addEventListener("keydown", onKey);
  const on = (id, event, action) => element(id).addEventListener(event, action);
  on("view", "change", ({ target }) => change({ view: target.value }));
  on("text", "change", async ({ target }) => {
    const text = target.value.trim();
    element("busy").textContent = "Comparing…"; // The first text compiles.
    await change({ query: text ? { text } : queryOf({}) });
    element("busy").textContent = "";
  });
  on("savepng", "click", savePicture);
  on("savepage", "click", savePage);
  on("shallower", "click", () => climb(-1));
  on("deeper", "click", () => climb(1));
  on("opacity", "input", (event) => change({ opacity: event.target.value / 100 }));
  on("smooth", "change", (event) => change({ smooth: event.target.checked }));
  on("clip", "change", (event) => change({ clip: event.target.checked }));
  on("layer", "input", ({ target }) =>
    change({ depth: (target.value - 1) / Math.max(1, target.max - 1) }),
  );
}

function listenForImages() {
  element("choose").hidden = false;
  element("file").addEventListener("change", ({ target }) => {
    if (target.files[0]) showFile(target.files[0]);
    target.value = ""; // Otherwise the same file could not be chosen again.
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("over");
  });
  document.addEventListener("drop", onDrop);
}

/** Shows the images of the folder in a row. */
function addThumbnails({ images, more }) {
  element("folder").hidden = images.length === 0;
  const thumbnails = new Thumbnails(element("folder"));
  for (const name of images) {
    const button = document.createElement("button");
    const image = document.createElement("img");
    Object.assign(button, { type: "button", title: name });
    image.alt = name;
    button.append(image);
    button.addEventListener("click", () => show(source.open(name), name));
    element("folder").append(button);
    thumbnails.add(image, source.thumbnailOf(name));
  }
  if (more) element("folder").append(`Only the first ${images.length} images are shown.`);
}

function addPanes(models) {
  panes = models.map((model, number) => new Pane(number, model, chosen));
  activate(panes[0]);
  element("whose").hidden = panes.length === 1;
  element("panes").replaceChildren(...panes.map((pane) => pane.root));
  element("layer").max = Math.max(...models.map((model) => model.labels.length));
  const names = new Set(models.flatMap((model) => model.extra));
  element("classkey").hidden = !names.has("CLS");
  for (const token of names) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", value: token, textContent: `[${token}]` });
    button.addEventListener("click", () => askToken(token));
    element("extra").append(button);
  }
}

async function start() {
  const about = await source.about();
  ({ limits } = about);
  element("panes").hidden = true;
  addPanes(about.models);
  listen();
  const name = readAddress();
  if (!source.canChoose) return show(source.open());
  listenForImages();
  addThumbnails(about);
  const masks = about.models.some((model) => model.colors.length);
  element("view").querySelector("[value=mask]").hidden = !masks;
  element("views").hidden = !masks && !about.models.some((model) => model.features);
  element("texts").hidden = !about.models.some((model) => model.texts);
  element("savepage").hidden = about.models.some((model) => !model.rollout);
  const first = about.images.includes(name) ? name : about.images[0];
  if (first !== undefined) show(source.open(first), first);
}

start().catch(showError);
