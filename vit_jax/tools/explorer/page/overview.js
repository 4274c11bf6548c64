"use strict";

const GAP = 4; // Pixels between the maps, in which the one that is shown has a frame.
const CELL = 28; // Pixels of a map's longer side, at least.

/** Small maps of all layers, from left to right, and kinds, from top to bottom. */
class Overview {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {object} model as about() describes it.
   * @param {function} choose is called with a layer and a kind.
   */
  constructor(canvas, model, choose) {
    Object.assign(this, { canvas, model, kinds: kinds(model) });
    const scale = Math.ceil(CELL / Math.max(...model.grid));
    [this.high, this.wide] = model.grid.map((patches) => patches * scale);
    canvas.width = model.layers * (this.wide + GAP);
    canvas.height = this.kinds.length * (this.high + GAP);
    canvas.style.maxInlineSize = `${5 * model.layers}rem`;
    const name = `${model.layers} layers of ${model.heads} heads of ${model.name}`;
    canvas.setAttribute("aria-label", name);
    canvas.addEventListener("click", (event) => {
      const [y, x] = share(event, canvas);
      choose(cell(x, model.layers), this.kinds[cell(y, this.kinds.length)]);
    });
  }

  paint(row, shownLayer, shownKind, clip) {
    const pen = this.canvas.getContext("2d");
    const [rows, columns] = this.model.grid;
    const maps = canvasOf(this.maps(row, clip));
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.imageSmoothingEnabled = false;
    pen.fillStyle = getComputedStyle(this.canvas).color;
    for (let layer = 0; layer < this.model.layers; layer++) {
      this.kinds.forEach((kind, i) => {
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

  /** Returns all maps side by side, a pixel a patch. */
  maps(row, clip) {
    const [rows, columns] = this.model.grid;
    const size = [this.model.layers * columns, this.kinds.length * rows];
    const image = new ImageData(...size);
    for (let layer = 0; layer < this.model.layers; layer++) {
      this.kinds.forEach((kind, i) => {
        const { patches } = row.map(layer, kind);
        const peak = peakOf(patches, clip);
        paint(image, patches, [rows, columns], peak, layer * columns, i * rows);
      });
    }
    return image;
  }
}

/** Returns where in an element a click was: fractions of its height and width. */
function share(event, element) {
  const box = element.getBoundingClientRect();
  return [
    (event.clientY - box.top) / box.height,
    (event.clientX - box.left) / box.width,
  ];
}

/** Returns which of `count` equal parts a fraction lies in, the nearest if in none. */
function cell(fraction, count) {
  return Math.min(count - 1, Math.max(0, Math.floor(fraction * count)));
}
