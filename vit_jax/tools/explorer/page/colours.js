"use strict";

/** Opacity of each colour in a map without a photograph. */
const OPAQUE = new Uint8ClampedArray(256).fill(255);

/** Red, green and blue from the smallest attention (dark) to the largest (light). */
const STOPS = [
  [10, 8, 38],
  [66, 18, 112],
  [150, 35, 118],
  [217, 74, 79],
  [248, 142, 44],
  [252, 208, 92],
  [255, 253, 208],
];

/** STOPS interpolated to 256 colours of 3 numbers. */
const RAMP = (() => {
  const ramp = new Uint8ClampedArray(3 * 256);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (STOPS.length - 1);
    const below = Math.min(Math.floor(place), STOPS.length - 2);
    for (let c = 0; c < 3; c++) {
      const [low, high] = [STOPS[below][c], STOPS[below + 1][c]];
      ramp[3 * i + c] = low + (place - below) * (high - low);
    }
  }
  return ramp;
})();

/**
 * Paints a map into an image, one pixel per patch.
 *
 * @param {ImageData} image image to paint into.
 * @param {Float32Array} values attention to each patch, row by row.
 * @param {number[]} grid patches down and across.
 * @param {number} peak smallest value with the last colour.
 * @param {number} left first column of the map in the image.
 * @param {number} top first row of the map in the image.
 * @param {Uint8ClampedArray} cover opacity of each of the 256 colours.
 */
function paint(image, values, [rows, columns], peak, left = 0, top = 0, cover = OPAQUE) {
  const unit = peak > 0 ? 255 / peak : 0;
  for (let y = 0; y < rows; y++) {
    let pixel = 4 * ((top + y) * image.width + left);
    for (let x = 0; x < columns; x++, pixel += 4) {
      const level = Math.min(255, Math.round(unit * values[y * columns + x]));
      for (let c = 0; c < 3; c++) image.data[pixel + c] = RAMP[3 * level + c];
      image.data[pixel + 3] = cover[level];
    }
  }
}

/** Returns an image of one map. */
function picture(values, [rows, columns], peak, cover = OPAQUE) {
  const image = new ImageData(columns, rows);
  paint(image, values, [rows, columns], peak, 0, 0, cover);
  return image;
}

/**
 * Returns the opacity of each colour: it grows with attention, so that the photograph
 * stays visible where attention is small.
 *
 * @param {number} opacity 0 for a transparent map, 0.5 for opacity in proportion to
 *   attention, 1 for an opaque map.
 */
function coverOf(opacity) {
  if (opacity === 0) return new Uint8ClampedArray(256);
  const power = (1 - opacity) / opacity;
  return Uint8ClampedArray.from({ length: 256 }, (_, i) => 255 * (i / 255) ** power);
}

/** Returns the value of the last colour: the maximum, or the 95th percentile. */
function peakOf(values, clip) {
  if (!clip) return Math.max(...values);
  return values.toSorted()[Math.ceil(0.95 * values.length) - 1];
}

/** Returns a canvas that shows an image. */
function canvasOf(image) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

/** Fills a canvas of height 1 with all colours. */
function paintRamp(canvas) {
  const values = Float32Array.from({ length: canvas.width }, (_, i) => i);
  const image = picture(values, [1, canvas.width], canvas.width - 1);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Returns a fraction as a percentage with three significant digits. */
function percent(share) {
  return `${Number((100 * share).toPrecision(3))} %`;
}
