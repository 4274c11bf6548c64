"use strict";

/** Fused maps of a layer, listed after its heads. */
const FUSED = ["mean", "maximum", "rollout"];

/** Returns the maps per layer: the largest number of heads of any layer, and rollout. */
function countMaps(model) {
  return Math.max(...model.heads) + (model.rollout ? 1 : 0);
}

/**
 * Attention from one query in every layer and head; rows.py writes the bytes.
 *
 * @param {object} model description by about().
 * @param {Float32Array} scales per layer and map: attention to the extra tokens, then
 *   the largest to a patch.
 * @param {Uint8Array} levels per layer and map: attention to the patches.
 * @param {object} kept resolution: steps is the level of the largest attention, pool the
 *   side of the blocks of patches that share a level.
 */
class Row {
  constructor(model, scales, levels, kept) {
    Object.assign(this, { model, scales, levels, steps: kept.steps });
    this.blocks = blockOfPatches(model.grid, kept.pool);
    this.count = countBlocks(model.grid, kept.pool);
  }

  /** Parses the server's answer. */
  static parse(model, buffer, kept) {
    const count = model.labels.length * countMaps(model) * (model.extra.length + 1);
    const levels = new Uint8Array(buffer, 4 * count);
    return new Row(model, new Float32Array(buffer, 0, count), levels, kept);
  }

  /**
   * Returns the attention to the patches and to the extra tokens; null if the layer has
   * no such head.
   *
   * @param {number} layer number of the layer, from 0.
   * @param {number|string} kind number of a head from 0, or one of FUSED.
   */
  map(layer, kind) {
    const count = this.model.heads[layer];
    if (kind === "mean" || kind === "maximum") {
      const heads = Array.from({ length: count }, (_, head) => head);
      return fuse(heads.map((head) => this.single(layer, head)), kind);
    }
    if (kind === "rollout") return this.single(layer, countMaps(this.model) - 1);
    return kind < count ? this.single(layer, kind) : null;
  }

  single(layer, index) {
    const place = layer * countMaps(this.model) + index;
    const [width, count] = [this.model.extra.length + 1, this.count];
    const scales = this.scales.subarray(place * width, (place + 1) * width);
    const levels = this.levels.subarray(place * count, (place + 1) * count);
    const unit = scales[width - 1] / this.steps;
    const patches = new Float32Array(this.blocks.length);
    for (let i = 0; i < patches.length; i++) patches[i] = levels[this.blocks[i]] * unit;
    return { patches, extra: scales.subarray(0, width - 1) };
  }
}

/** Returns the number of blocks of a grid of patches. */
function countBlocks([rows, columns], pool) {
  return Math.ceil(rows / pool) * Math.ceil(columns / pool);
}

/** Returns the number of each patch's block. */
function blockOfPatches([rows, columns], pool) {
  const across = Math.ceil(columns / pool);
  return Uint32Array.from({ length: rows * columns }, (_, patch) => {
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    return Math.floor(row / pool) * across + Math.floor(column / pool);
  });
}

/** Returns the mean or the maximum of maps. */
function fuse(maps, kind) {
  const fused = (name) =>
    maps[0][name].map((_, i) => {
      const values = maps.map((map) => map[name][i]);
      if (kind === "maximum") return Math.max(...values);
      return values.reduce((sum, value) => sum + value) / values.length;
    });
  return { patches: fused("patches"), extra: fused("extra") };
}

/** Returns the maps of a model's layers, in the order of the keys h and H. */
function kinds(model) {
  const fused = FUSED.filter((name) => model.rollout || name !== "rollout");
  return [...Array(Math.max(...model.heads)).keys(), ...fused];
}

/** Returns the name of a map. */
function nameOf(kind) {
  return typeof kind === "number" ? `head ${kind + 1}` : kind;
}

/** Returns the short name of a map. */
function shortNameOf(kind) {
  return { maximum: "max", rollout: "roll" }[kind] ?? nameOf(kind).replace("head ", "");
}
