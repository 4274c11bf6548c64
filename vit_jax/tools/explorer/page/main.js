"use strict";

const source = findSource();
const element = (id) => document.getElementById(id);
/**
 * What is shown by all panes: the query is {token} or {at}, a place in the whole image;
 * depth goes from 0, the first layer, to 1.
 */
let state = {
  ...{ query: {}, depth: 1, kind: "mean" },
  ...{ opacity: 0.7, smooth: false, clip: false },
};
let panes = [];
let active; // The pane whose patches the arrow keys count.
let limits;
let drawn = 0;
let asked = 0; // Images, of which the last counts.

/** Changes what is shown; a click is answered when this is. */
function change(changes) {
  element("message").textContent = "";
  return draw(changes);
}

async function draw(changes) {
  state = { ...state, ...changes };
  const wanted = state;
  try {
    await Promise.all(panes.map((pane) => pane.show(wanted)));
  } catch (error) {
    if (wanted === state) tell(error);
    return;
  }
  if (wanted !== state) return;
  const deepest = Number(element("layer").max);
  const layer = Math.round(state.depth * (deepest - 1)) + 1;
  element("layer").value = layer;
  element("depth").textContent = `${layer} of ${deepest}`;
  tellQuery();
  for (const button of element("extra").children) {
    button.setAttribute("aria-pressed", button.value === state.query.token);
  }
  element("told").textContent = panes
    .map((pane) => `${pane.find(".which").textContent}. ${pane.words}`)
    .join(" ");
  document.body.dataset.drawn = ++drawn;
}

/** Has the keys mean the patches and heads of a pane. */
function activate(pane) {
  active = pane;
  for (const each of panes) {
    each.root.setAttribute("aria-current", each === pane && panes.length > 1);
  }
  if (pane.shown) tellQuery();
}

function tellQuery() {
  const { patch } = active.shown.asking;
  element("query").textContent =
    patch === null ? "" : inWords(active.rowAndColumn(patch));
}

/** Shows an image. */
async function show(looking) {
  const number = ++asked;
  element("message").textContent = "";
  element("busy").textContent = "Looking…";
  try {
    const seen = await looking;
    if (number !== asked) return;
    const fetched = panes.map((pane) => pane.fetchPicture(source, seen));
    const pictures = await Promise.all(fetched);
    if (number !== asked) return; // Another image is to be shown by now.
    panes.forEach((pane, i) => pane.take(source, seen, pictures[i]));
    element("subtitle").textContent = seen.name;
    const { query } = state;
    for (const id of ["controls", "keys"]) element(id).hidden = false;
    element("panes").hidden = false;
    await draw(query.token || query.at ? {} : { query: firstQuery() });
  } catch (error) {
    if (number === asked) tell(error);
  }
  if (number === asked) element("busy").textContent = "";
}

/** Looks at a file, unless it is too large to be sent. */
function look(file) {
  if (file.size > limits.bytes) {
    const most = `${limits.bytes.toLocaleString("en")} bytes`;
    tell(new Error(`${file.name} has more than ${most}: give a smaller file.`));
    return;
  }
  show(source.see(file));
}

function firstQuery() {
  const extra = panes.flatMap((pane) => pane.model.extra);
  return extra.length ? { token: extra[0] } : { at: panes[0].middle() };
}

function tell(error) {
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
    change({ depth: layer / Math.max(1, pane.model.layers - 1) });
  },
};

/** Moves the query by some patches; from a token into the middle. */
function move(down, right) {
  const { patch } = active.asking(state.query);
  const [rows, columns] = active.model.grid;
  const [row, column] = active.rowAndColumn(patch ?? active.patchAt(active.middle()));
  const clip = (value, count) => Math.min(count - 1, Math.max(0, value));
  const next = patch === null ? [row, column] : [row + down, column + right];
  chosen.patch(active, clip(next[0], rows) * columns + clip(next[1], columns));
}

/** Goes some layers up or down. */
function climb(layers) {
  const top = Math.max(1, Number(element("layer").max) - 1);
  const layer = Math.round(state.depth * top) + layers;
  change({ depth: Math.min(top, Math.max(0, layer)) / top });
}

/** Goes to another head, to their mean, maximum or rollout. */
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
  // Many keyboards have their brackets behind AltGr, which some systems tell as both.
  const bracket = event.getModifierState("AltGraph");
  const other = (event.ctrlKey || event.metaKey || event.altKey) && !bracket;
  const slides = event.key.startsWith("Arrow") && event.target.type === "range";
  if (other || slides || !KEYS[event.key] || !active?.shown) return;
  event.preventDefault(); // Arrow keys would scroll the page as well.
  KEYS[event.key]();
}

function onDrop(event) {
  event.preventDefault();
  document.body.classList.remove("over");
  const file = event.dataTransfer.files[0];
  if (file) look(file);
  else tell(new Error("What was dropped is no file: save the image, then drop it."));
}

function listen() {
  document.addEventListener("keydown", onKey);
  const on = (id, event, action) => element(id).addEventListener(event, action);
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
    if (target.files[0]) look(target.files[0]);
    target.value = ""; // So that the same file can be chosen again.
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

/** Puts the images of the folder in a row. */
function addThumbnails({ images, more }) {
  element("folder").hidden = images.length === 0;
  const thumbnails = new Thumbnails(element("folder"));
  for (const name of images) {
    const button = document.createElement("button");
    const image = document.createElement("img");
    Object.assign(button, { type: "button", title: name });
    image.alt = name;
    button.append(image);
    button.addEventListener("click", () => show(source.open(name)));
    element("folder").append(button);
    thumbnails.add(image, source.thumbnailOf(name));
  }
  if (more) element("folder").append(`The first ${images.length} images are shown.`);
}

function addPanes(models) {
  panes = models.map((model, number) => new Pane(number, model, chosen));
  activate(panes[0]);
  element("whose").hidden = panes.length === 1;
  element("panes").replaceChildren(...panes.map((pane) => pane.root));
  element("layer").max = Math.max(...models.map((model) => model.layers));
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
  if (!source.canChoose) return show(source.open());
  listenForImages();
  addThumbnails(about);
}

start().catch(tell);
