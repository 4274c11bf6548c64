"use strict";

const SHARP = 96; // Pictures of fewer pixels show their pixels as they are.
const CANVAS = 672; // Pixels of a map's longer side, at least.
const KEPT = 600; // Rows, of the last queries.
const FINEST = 255; // Steps of attention, see rows.py.

/** One model on the page: its map, its classes, its heads and layers. */
class Pane {
  /**
   * @param {number} number of the model.
   * @param {object} model as about() describes it.
   * @param {object} chosen what is called: pane(pane), patch(pane, patch), kind(kind)
   *   and layer(pane, layer).
   */
  constructor(number, model, chosen) {
    Object.assign(this, { number, model, chosen, kinds: kinds(model) });
    const copy = document.getElementById("pane").content.cloneNode(true);
    this.root = copy.firstElementChild;
    this.find = (selector) => this.root.querySelector(selector);
    this.find("h2").textContent = `${model.name} (${model.variant})`;
    this.map = this.find(".map");
    const scale = Math.ceil(CANVAS / Math.max(...model.size));
    [this.map.height, this.map.width] = model.size.map((side) => side * scale);
    this.map.setAttribute("aria-label", `Attention of ${model.name}`);
    this.find(".kinds").setAttribute("aria-label", `Heads of ${model.name}`);
    paintRamp(this.find(".ramp"));
    this.addKinds();
    this.overview = new Overview(this.find(".overview"), model, (layer, kind) => {
      this.chosen.kind(kind);
      this.chosen.layer(this, layer);
    });
    for (const reached of ["focusin", "pointerdown"]) {
      this.root.addEventListener(reached, () => chosen.pane(this));
    }
    this.map.addEventListener("click", (event) => {
      const [rows, columns] = model.grid;
      const [y, x] = share(event, this.map);
      const patch = cell(y, rows) * columns + cell(x, columns);
      this.chosen.patch(this, patch);
    });
  }

  addKinds() {
    this.buttons = this.kinds.map((kind) => {
      const button = document.createElement("button");
      const canvas = document.createElement("canvas");
      [canvas.height, canvas.width] = this.model.grid;
      button.type = "button";
      button.append(canvas, nameOf(kind));
      button.addEventListener("click", () => this.chosen.kind(kind));
      this.find(".kinds").append(button);
      return button;
    });
  }

  /** Fetches the picture of what the model saw of an image. */
  async fetchPicture(source, seen) {
    const image = new Image();
    image.src = source.pictureOf(seen, this.number);
    await image.decode();
    return image;
  }

  /**
   * Takes another image: what the models made of it, where to ask for more, and its
   * picture. All at once, so that none has the attention of another.
   */
  take(source, seen, image) {
    Object.assign(this, { source, seen, image, rows: new Map() });
    const { classes, steps, pool } = seen.models[this.number];
    this.find(".top").hidden = classes.length === 0;
    this.find(".classes").replaceChildren(...classes.map(classItem));
    this.find(".kept").textContent = keptInWords(steps, pool);
  }

  /** Returns the number of the token that asks, and of the patch, if it is one. */
  asking(query) {
    const extra = this.model.extra;
    const token = extra.indexOf(query.token);
    if (token >= 0) return { token, patch: null };
    const patch = this.patchAt(query.at ?? this.middle());
    return { token: extra.length + patch, patch };
  }

  /** Returns where the patch in the middle is, as a place in the whole image. */
  middle() {
    const [rows, columns] = this.model.grid;
    return this.placeOf(Math.floor(rows / 2) * columns + Math.floor(columns / 2));
  }

  /** Returns the patch nearest to a place in the whole image, in fractions of it. */
  patchAt([y, x]) {
    const [top, left, bottom, right] = this.seen.models[this.number].box;
    const [rows, columns] = this.model.grid;
    const row = cell((y - top) / (bottom - top), rows);
    return row * columns + cell((x - left) / (right - left), columns);
  }

  /** Returns the middle of a patch, as a place in the whole image. */
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

  /** Shows a state, unless another is to be shown before its attention is here. */
  async show(state) {
    this.wanted = state;
    const asking = this.asking(state.query);
    const row = await this.row(asking.token);
    if (this.wanted !== state) return;
    const layer = Math.round(state.depth * (this.model.layers - 1));
    const kind =
      typeof state.kind === "number" ? state.kind % this.model.heads : state.kind;
    this.shown = { row, layer, kind, asking, ...row.map(layer, kind) };
    this.paintMap(state);
    this.paintKinds(state);
    this.overview.paint(row, layer, kind, state.clip);
    this.tell(state);
  }

  row(token) {
    const rows = this.rows;
    if (!rows.has(token)) {
      if (rows.size === KEPT) rows.delete(rows.keys().next().value);
      const row = this.source.row(this.seen, this.number, this.model, token);
      row.catch(() => rows.delete(token)); // So that it is asked for again.
      rows.set(token, row);
    }
    return rows.get(token);
  }

  /** Names a patch, or the block of patches that it is kept with. */
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

  paintMap({ opacity, smooth, clip }) {
    const { patches, asking } = this.shown;
    const map = picture(patches, this.model.grid, peakOf(patches, clip));
    const pen = this.map.getContext("2d");
    const { width, height } = this.map;
    pen.imageSmoothingEnabled = Math.max(...this.model.size) >= SHARP;
    pen.drawImage(this.image, 0, 0, width, height);
    pen.globalAlpha = opacity;
    // Grey, so that colours are the map's alone.
    pen.globalCompositeOperation = "saturation";
    pen.fillStyle = "#808080";
    pen.fillRect(0, 0, width, height);
    pen.globalCompositeOperation = "source-over";
    pen.imageSmoothingEnabled = smooth;
    pen.drawImage(canvasOf(map), 0, 0, width, height);
    pen.globalAlpha = 1;
    if (asking.patch === null) return;
    const [row, column] = this.rowAndColumn(asking.patch);
    const [high, wide] = [height / this.model.grid[0], width / this.model.grid[1]];
    // Black round white is seen on any ground.
    for (const [colour, line] of [["#000", 8], ["#fff", 4]]) {
      [pen.strokeStyle, pen.lineWidth] = [colour, line];
      pen.strokeRect(column * wide, row * high, wide, high);
    }
  }

  paintKinds({ clip }) {
    this.kinds.forEach((kind, i) => {
      const { patches } = this.shown.row.map(this.shown.layer, kind);
      const canvas = this.buttons[i].firstElementChild;
      const map = picture(patches, this.model.grid, peakOf(patches, clip));
      canvas.getContext("2d").putImageData(map, 0, 0);
      this.buttons[i].setAttribute("aria-pressed", kind === this.shown.kind);
    });
  }

  tell({ query, clip }) {
    const { patches, extra, asking, layer, kind } = this.shown;
    const peak = Math.max(...patches);
    const { pool } = this.seen.models[this.number];
    const asks =
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
    this.find(".which").textContent =
      `Layer ${layer + 1} of ${this.model.layers}: ${nameOf(kind)}`;
    this.words =
      `From ${asks}${absent}: most to ${this.blockInWords(patches.indexOf(peak))}, ` +
      `${percent(peak)}${pool > 1 ? " a patch" : ""}${others}.`;
    this.find(".where").textContent = this.words;
  }
}

function inWords([row, column]) {
  return `row ${row + 1}, column ${column + 1}`;
}

/** Tells how attention was made smaller for a file; nothing if it was not. */
function keptInWords(steps, pool) {
  const ways = [];
  if (steps < FINEST) ways.push(`in ${steps + 1} steps up to the largest`);
  if (pool > 1) ways.push(`as means of ${pool}x${pool} patches`);
  return ways.length
    ? `So that this file is small, attention is kept ${ways.join(" and ")}.`
    : "";
}

/** Returns a line of the list of classes. */
function classItem({ name, probability }) {
  const [item, bar, label] = ["li", "span", "span"].map((tag) =>
    document.createElement(tag),
  );
  bar.className = "bar";
  bar.style.inlineSize = `${100 * probability}%`;
  label.className = "label";
  label.textContent = `${name} `;
  const value = document.createElement("span");
  value.textContent = percent(probability);
  item.append(bar, label, value);
  return item;
}
