"use strict";

const SHARP = 96; // Smaller pictures are drawn without smoothing.
const CANVAS = 672; // Minimum pixels of a map's longer side.
const KEPT = 600; // Number of answers that are kept.
const FINEST = 255; // Steps of attention, see rows.py.

/** One model on the page: its map, classes, heads and layers. */
class Pane {
  /**
   * @param {number} number number of the model.
   * @param {object} model description by about().
   * @param {object} chosen callbacks: pane(pane), patch(pane, patch), kind(kind),
   *   layer(pane, layer), label(label), and hovered(pane, patch) with null at the end.
   */
  constructor(number, model, chosen) {
    Object.assign(this, { number, model, chosen, kinds: kinds(model) });
    const copy = document.getElementById("pane").content.cloneNode(true);
    this.root = copy.firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.find("h2").textContent = `${model.name} (${model.variant})`;
    this.map = this.find(".map");
    this.map.setAttribute("aria-label", `Attention of ${model.name}`);
    this.find(".kinds").setAttribute("aria-label", `Heads of ${model.name}`);
    paintRamp(this.find(".ramp"));
    this.addKinds();
    this.overview = new Overview(this.find(".grid"), model, (layer, kind) => {
      this.chosen.kind(kind);
      this.chosen.layer(this, layer);
    });
    this.find(".windows").hidden = model.rollout;
    for (const reached of ["focusin", "pointerdown"]) {
      this.root.addEventListener(reached, () => chosen.pane(this));
    }
    this.map.addEventListener("click", (event) => {
      this.chosen.patch(this, this.patchOf(event));
    });
    let hovered = null;
    const hover = (patch) => {
      if (patch !== hovered) this.chosen.hovered(this, patch);
      hovered = patch;
    };
    this.map.addEventListener("pointermove", (event) => {
      // Browsers also report a resting pointer when the page scrolls below it.
      const moves = event.movementX || event.movementY;
      if (event.pointerType === "mouse" && moves) hover(this.patchOf(event));
    });
    this.map.addEventListener("pointerleave", () => hover(null));
  }

  /** Returns the patch at the position of an event. */
  patchOf(event) {
    const [rows, columns] = this.model.grid;
    const [y, x] = share(event, this.map);
    return cell(y, rows) * columns + cell(x, columns);
  }

  addKinds() {
    this.buttons = this.kinds.map((kind) => {
      const button = document.createElement("button");
      const canvas = document.createElement("canvas");
      button.type = "button";
      button.append(canvas, nameOf(kind));
      button.addEventListener("click", () => this.chosen.kind(kind));
      this.find(".kinds").append(button);
      return button;
    });
  }

  /** Fetches the picture of the model's input. */
  fetchPicture(source, seen) {
    return fetchImage(source.pictureOf(seen, this.number));
  }

  /**
   * Switches to another image: its outputs, their source and its picture. All at once,
   * so that no picture is shown with the attention of another.
   */
  take(source, seen, image) {
    Object.assign(this, { source, seen, image, rows: new Map(), shares: new Map() });
    const { classes, grid, size, steps, pool } = seen.models[this.number];
    this.fit(grid, size);
    this.find(".top").hidden = classes.length === 0;
    if (this.model.colors.length) this.find(".top").textContent = "Fractions of the pixels";
    this.find(".torelevance").hidden = !this.model.relevance;
    this.items = classes.map((one) => this.classItem(one));
    this.find(".classes").replaceChildren(...this.items);
    this.find(".kept").textContent = keptInWords(steps, pool);
  }

  /** Sets the grid and size of an image, which vary for models of images of any size. */
  fit(grid, size) {
    this.model = { ...this.model, grid, size };
    const scale = Math.ceil(CANVAS / Math.max(...size));
    [this.map.height, this.map.width] = size.map((side) => side * scale);
    // A tall map fits on the screen.
    const limit = size[0] > size[1] ? `${(85 * size[1]) / size[0]}vh` : "";
    this.map.style.maxInlineSize = limit;
    for (const { firstElementChild: canvas } of this.buttons) {
      [canvas.height, canvas.width] = grid;
    }
    this.overview.fit(this.model);
  }

  /** Returns the numbers of the query's token and patch; null if there is none. */
  asking(query) {
    const extra = this.model.extra;
    const whole = "label" in query || "text" in query;
    const token = extra.indexOf(whole ? extra[0] : query.token);
    if (token >= 0) return { token, patch: null };
    const patch = this.patchAt(query.at ?? this.middle());
    return { token: extra.length + patch, patch };
  }

  /** Returns the position of the middle patch in the image. */
  middle() {
    const [rows, columns] = this.model.grid;
    return this.placeOf(Math.floor(rows / 2) * columns + Math.floor(columns / 2));
  }

  /** Returns the patch nearest to a position in the image, in fractions of its sides. */
  patchAt([y, x]) {
    const [top, left, bottom, right] = this.seen.models[this.number].box;
    const [rows, columns] = this.model.grid;
    const row = cell((y - top) / (bottom - top), rows);
    return row * columns + cell((x - left) / (right - left), columns);
  }

  /** Returns the position of a patch's middle in the image. */
  placeOf(patch) {
    const [top, left, bottom, right] = this.seen.models[this.number].box;
    const [row, column] = this.rowAndColumn(patch);
    const [rows, columns] = this.model.grid;
    return [
      top + ((row + 0.5) / rows) * (bottom - top),
      left + ((column + 0.5) / columns) * (right - left),
    ];
  }

  rowAndColumn(patch) {
    const columns = this.model.grid[1];
    return [Math.floor(patch / columns), patch % columns];
  }

  /** Shows a state, unless another is requested before its attention arrives. */
  async show(state) {
    this.wanted = state;
    const asking = this.asking(state.query);
    const label = this.model.relevance ? state.query.label : undefined;
    const words = this.model.texts ? state.query.text : undefined;
    const { features, colors } = this.model;
    const offers = { similarity: features, components: features, mask: colors.length };
    const view = offers[state.view] ? state.view : "attention";
    const origin = this.origin(state.query, asking);
    const like = view === "similarity" && origin !== null;
    const [row, shares, cosines, colours] = await Promise.all([
      this.row(asking.token),
      label === undefined && !words ? null : this.share(label, words),
      like ? this.cosines(origin) : null,
      view === "components" || view === "mask" ? this.colours(view) : null,
    ]);
    if (this.wanted !== state) return;
    const layer = Math.round(state.depth * (this.model.labels.length - 1));
    let { kind } = state;
    if (typeof kind === "number") kind %= this.model.heads[layer];
    if (!this.kinds.includes(kind)) kind = "mean";
    this.shown = { row, layer, kind, asking, label, words, ...row.map(layer, kind) };
    if (shares) Object.assign(this.shown, { patches: shares, extra: [] });
    if (cosines) Object.assign(this.shown, { patches: cosines, extra: [], origin });
    Object.assign(this.shown, { colours, view });
    this.paintMap(state);
    this.paintKinds(state);
    this.overview.paint(row, layer, kind, state.clip);
    this.describe(state);
  }

  row(token) {
    const ask = () => this.source.row(this.seen, this.number, this.model, token);
    return remembered(this.rows, token, ask);
  }

  /**
   * Returns the patch that others are compared with, and the key and name of its image;
   * null if the query is an extra token.
   */
  origin({ of }, { patch }) {
    if (of) return { key: of.key, name: of.name, ...of.patches[this.number] };
    return patch === null ? null : { key: this.seen.key, name: null, ...this.named(patch) };
  }

  /** Returns a patch with its row and column in words, unlike those of other images. */
  named(patch) {
    return { patch, place: inWords(this.rowAndColumn(patch)) };
  }

  /** Returns the cosine similarity of each patch to one patch; 0 if it is negative. */
  cosines({ key, patch }) {
    const ask = async () => {
      const of = [this.seen, this.number, key, patch];
      return (await this.source.similarity(...of)).map((value) => Math.max(0, value));
    };
    return remembered(this.shares, `${key} ${patch}`, ask);
  }

  /** Returns an image of colours, which stand for features of patches or for classes. */
  colours(view) {
    const { source } = this;
    const address = (view === "mask" ? source.maskOf : source.componentsOf).bind(source);
    const ask = () => fetchImage(address(this.seen, this.number));
    return remembered(this.shares, view, ask);
  }

  /** Returns the fraction of each patch in the relevance to a class or a text. */
  share(label, words) {
    const ask = async () => {
      const of = [this.seen, this.number];
      const values = await (words
        ? this.source.relevanceToText(...of, words)
        : this.source.relevance(...of, label));
      const sum = values.reduce((total, value) => total + value);
      return values.map((value) => value / (sum || 1));
    };
    return remembered(this.shares, words ? `text ${words}` : label, ask);
  }

  /** Returns the name of a patch, or of its block if attention is kept per block. */
  blockInWords(patch) {
    const { pool } = this.seen.models[this.number];
    if (pool === 1) return inWords(this.rowAndColumn(patch));
    return this.rowAndColumn(patch)
      .map((place, axis) => {
        const first = place - (place % pool) + 1;
        const last = Math.min(first + pool - 1, this.model.grid[axis]);
        const name = ["row", "column"][axis];
        return first === last ? `${name} ${first}` : `${name}s ${first} to ${last}`;
      })
      .join(", ");
  }

  layerInWords(layer, kind) {
    const [label, count] = [this.model.labels[layer], this.model.labels.length];
    const [stage, block] = label.split(".");
    const name = block ? `Stage ${stage}, block ${block} (layer ` : "Layer ";
    return `${name}${layer + 1} of ${count}${block ? ")" : ""}: ${nameOf(kind)}`;
  }

  /** Returns a line of the list of classes; a button if the model supports relevance. */
  classItem({ label, name, probability }) {
    const item = document.createElement("li");
    const line = document.createElement(this.model.relevance ? "button" : "div");
    const [bar, words, value] = Array.from({ length: 3 }, () =>
      document.createElement("span"),
    );
    bar.className = "bar";
    bar.style.inlineSize = `${100 * probability}%`;
    words.className = "label";
    words.textContent = `${name} `;
    if (this.model.colors.length) {
      words.style.borderInlineStart = `0.9em solid ${this.model.colors[label]}`;
      words.style.paddingInlineStart = "0.4em";
    }
    value.textContent = percent(probability);
    line.append(bar, words, value);
    if (this.model.relevance) {
      Object.assign(line, { type: "button", value: label });
      line.addEventListener("click", () => this.chosen.label(label));
    }
    item.append(line);
    return item;
  }

  paintMap({ opacity, smooth, clip }) {
    const { patches, asking } = this.shown;
    const peak = peakOf(patches, clip);
    const map = picture(patches, this.model.grid, peak, coverOf(opacity));
    const pen = this.map.getContext("2d");
    const { width, height } = this.map;
    pen.imageSmoothingEnabled = Math.max(...this.model.size) >= SHARP;
    pen.drawImage(this.image, 0, 0, width, height);
    pen.globalAlpha = opacity;
    // Grey, so that all colours belong to the map.
    pen.globalCompositeOperation = "saturation";
    pen.fillStyle = "#808080";
    pen.fillRect(0, 0, width, height);
    pen.globalCompositeOperation = "source-over";
    pen.imageSmoothingEnabled = smooth;
    pen.globalAlpha = 1;
    const { colours, label, words, origin } = this.shown;
    if (colours) {
      pen.globalAlpha = opacity;
      pen.drawImage(colours, 0, 0, width, height);
      pen.globalAlpha = 1;
    } else {
      pen.drawImage(canvasOf(map), 0, 0, width, height);
    }
    const elsewhere = colours || label !== undefined || words || origin?.name;
    if (asking.patch === null || elsewhere) return;
    const [row, column] = this.rowAndColumn(asking.patch);
    const [high, wide] = [height / this.model.grid[0], width / this.model.grid[1]];
    // A black line around a white one is visible on any background.
    for (const [colour, line] of [["#000", 8], ["#fff", 4]]) {
      [pen.strokeStyle, pen.lineWidth] = [colour, line];
      pen.strokeRect(column * wide, row * high, wide, high);
    }
  }

  paintKinds({ clip }) {
    const { label, words, origin, colours } = this.shown;
    const isAttention = label === undefined && !words && !origin && !colours;
    this.kinds.forEach((kind, i) => {
      const attention = this.shown.row.map(this.shown.layer, kind);
      this.buttons[i].hidden = attention === null;
      if (attention === null) return;
      const { patches } = attention;
      const canvas = this.buttons[i].firstElementChild;
      const map = picture(patches, this.model.grid, peakOf(patches, clip));
      canvas.getContext("2d").putImageData(map, 0, 0);
      const pressed = kind === this.shown.kind && isAttention;
      this.buttons[i].setAttribute("aria-pressed", pressed);
    });
  }

  /** Describes the shown map in words. */
  describe({ query, clip }) {
    const { patches, extra, asking, layer, kind, label, words } = this.shown;
    const { colours, origin, view } = this.shown;
    const peak = Math.max(...patches);
    const { pool } = this.seen.models[this.number];
    const from =
      asking.patch === null
        ? `[${query.token}]`
        : `the patch in ${inWords(this.rowAndColumn(asking.patch))}`;
    const absent =
      query.token && asking.patch !== null ? ` (there is no [${query.token}] here)` : "";
    const others = this.model.extra
      .map((name, i) => `; to [${name}] ${percent(extra[i])}`)
      .join("");
    const last = peakOf(patches, clip);
    this.find(".peak").textContent = `${last < peak ? "≥ " : ""}${percent(last)}`;
    const most = `${this.blockInWords(patches.indexOf(peak))}, ${percent(peak)}`;
    this.find(".which").textContent = this.layerInWords(layer, kind);
    this.words =
      `From ${from}${absent}: most attention to ${most}${pool > 1 ? " per patch" : ""}${others}.`;
    if (view === "mask") {
      this.find(".which").textContent = "Classes of the pixels";
      this.find(".peak").textContent = "";
      this.words = "Each pixel has the colour of its class in the list.";
    } else if (colours) {
      this.find(".which").textContent = "Components of the patch features";
      this.find(".peak").textContent = "";
      this.words = "Patches with similar colours have similar features.";
    } else if (origin) {
      const of = origin.name ? ` of ${origin.name}` : "";
      this.find(".which").textContent = `Similarity to the patch in ${origin.place}${of}`;
      this.words = `Cosine of features: largest in ${most}.`;
    } else if (words) {
      this.words = `Relevance to “${words}”: largest for ${most} of the total.`;
    } else if (label !== undefined) {
      const { name } = this.seen.models[this.number].classes.find(
        (one) => one.label === label,
      ) ?? { name: `class ${label}` };
      this.words = `Relevance to ${name}: largest for ${most} of the total.`;
    } else if ("label" in query || "text" in query) {
      this.words = `This model does not support relevance. ${this.words}`;
    }
    this.find(".where").textContent = this.words;
    for (const item of this.items) {
      const button = item.querySelector("button");
      button?.setAttribute("aria-pressed", button.value === String(label));
    }
  }
}

async function fetchImage(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

/** Returns the answer kept for a key, requested if missing; failures are not kept. */
function remembered(kept, key, ask) {
  if (!kept.has(key)) {
    if (kept.size === KEPT) kept.delete(kept.keys().next().value);
    const answer = ask();
    answer.catch(() => kept.delete(key)); // So that it is requested again.
    kept.set(key, answer);
  }
  return kept.get(key);
}

function inWords([row, column]) {
  return `row ${row + 1}, column ${column + 1}`;
}

/** Describes the reduced resolution of attention in a file; "" if it is complete. */
function keptInWords(steps, pool) {
  const ways = [];
  if (steps < FINEST) ways.push(`in ${steps + 1} steps up to the maximum`);
  if (pool > 1) ways.push(`as means of ${pool}x${pool} patches`);
  return ways.length
    ? `To keep this file small, attention is stored ${ways.join(" and ")}.`
    : "";
}
