"use strict";

const GAP = 4; // Pixels between the maps, with a frame around the shown one.
const CELL = 28; // Minimum pixels of a map's longer side.

/** Steps of the arrow keys between layers and between kinds. */
const STEPS = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

/** Small maps of all layers, from left to right, and kinds, from top to bottom. */
class Overview {
  /**
   * @param {HTMLElement} root element with a canvas and labels of layers and kinds.
   * @param {object} model description by about().
   * @param {function} choose callback with a layer and a kind.
   */
  constructor(root, model, choose) {
    const canvas = root.querySelector("canvas");
    Object.assign(this, { root, canvas, model, kinds: kinds(model), choose });
    const layers = model.labels.length;
    this.layer = this.kind = 0;
    const name = `Layers and heads of ${model.name}; the arrow keys choose one`;
    canvas.setAttribute("aria-label", name);
    addLabels(root.querySelector(".layers"), model.labels);
    addLabels(root.querySelector(".names"), this.kinds.map(shortNameOf));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("click", (event) => {
      const [y, x] = share(event, canvas);
      const kind = this.kinds[cell(y, this.kinds.length)];
      const layer = cell(x, layers);
      if (this.has(layer, kind)) choose(layer, kind);
    });
  }

  /** Sets the description of a model with another grid. */
  fit(model) {
    this.model = model;
    const scale = Math.ceil(CELL / Math.max(...model.grid));
    [this.high, this.wide] = model.grid.map((patches) => patches * scale);
    const layers = model.labels.length;
    this.root.style.maxInlineSize = `${4 + 5 * layers * Math.min(1, this.wide / this.high)}rem`;
    this.canvas.width = layers * (this.wide + GAP);
    this.canvas.height = this.kinds.length * (this.high + GAP);
  }

  /** Returns whether a layer has a kind: layers may have different numbers of heads. */
  has(layer, kind) {
    return typeof kind === "string" || kind < this.model.heads[layer];
  }

  onKey(event) {
    if (!STEPS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // The page's arrow keys move the query.
    const clip = (value, count) => Math.min(count - 1, Math.max(0, value));
    const [right, down] = STEPS[event.key];
    const layer = clip(this.layer + right, this.model.labels.length);
    let place = this.kinds.indexOf(this.kind);
    do place = clip(place + down, this.kinds.length);
    while (!this.has(layer, this.kinds[place]) && down);
    this.choose(layer, this.kinds[place]);
  }

  paint(row, shownLayer, shownKind, clip) {
    [this.layer, this.kind] = [shownLayer, shownKind];
    const pen = this.canvas.getContext("2d");
    const [rows, columns] = this.model.grid;
    const maps = canvasOf(this.maps(row, clip));
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.imageSmoothingEnabled = false;
    pen.fillStyle = getComputedStyle(this.canvas).color;
    for (let layer = 0; layer < this.model.labels.length; layer++) {
      this.kinds.forEach((kind, i) => {
        if (!this.has(layer, kind)) return;
        const [left, top] = [layer * (this.wide + GAP), i * (this.high + GAP)];
        if (layer === shownLayer && kind === shownKind) {
          pen.fillRect(left, top, this.wide + GAP, this.high + GAP);
        }
        pen.drawImage(
          maps, layer * columns, i * rows, columns, rows,
          left + GAP / 2, top + GAP / 2, this.wide, this.high,
        );
      });
    }
  }

  /** Returns all maps side by side, one pixel per patch. */
  maps(row, clip) {
    const [rows, columns] = this.model.grid;
    const layers = this.model.labels.length;
    const size = [layers * columns, this.kinds.length * rows];
    const image = new ImageData(...size);
    for (let layer = 0; layer < layers; layer++) {
      this.kinds.forEach((kind, i) => {
        if (!this.has(layer, kind)) return;
        const { patches } = row.map(layer, kind);
        const peak = peakOf(patches, clip);
        paint(image, patches, [rows, columns], peak, layer * columns, i * rows);
      });
    }
    return image;
  }
}

/** Adds labels to a row or column; of many numbers, only every second or third. */
function addLabels(root, names) {
  const step = Math.ceil(names.length / 16);
  for (const [i, name] of names.entries()) {
    const label = document.createElement("span");
    const number = Number.isInteger(Number(name));
    label.textContent = number && i % step ? "" : name;
    root.append(label);
  }
}

/** Returns the position of a click, in fractions of an element's height and width. */
function share(event, element) {
  const box = element.getBoundingClientRect();
  return [
    (event.clientY - box.top) / box.height,
    (event.clientX - box.left) / box.width,
  ];
}

/** Returns which of `count` equal parts a fraction is in, or the nearest one. */
function cell(fraction, count) {
  return Math.min(count - 1, Math.max(0, Math.floor(fraction * count)));
}
