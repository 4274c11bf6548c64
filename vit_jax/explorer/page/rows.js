"use strict";

/** What a layer's heads may be fused to, after the heads themselves. */
const FUSED = ["mean", "maximum", "rollout"];

/**
 * Where one query looks, in every layer and head; the bytes are those of rows.py.
 *
 * @param {object} model as about() describes it.
 * @param {Float32Array} scales a layer, a map: attention to the extra tokens and the
 *   largest to a patch.
 * @param {Uint8Array} levels a layer, a map: attention to the patches.
 * @param {number} steps the level of the largest.
 */
class Row {
  constructor(model, scales, levels, steps) {
    Object.assign(this, { model, scales, levels, steps });
    this.patches = model.grid[0] * model.grid[1];
  }

  /** Reads what the server sends. */
  static parse(model, buffer, steps) {
    const count = model.layers * (model.heads + 1) * (model.extra.length + 1);
    const levels = new Uint8Array(buffer, 4 * count);
    return new Row(model, new Float32Array(buffer, 0, count), levels, steps);
  }

  /**
   * Returns the attention to the patches and to the extra tokens.
   *
   * @param {number} layer from 0 on.
   * @param {number|string} kind a head, or one of FUSED.
   */
  map(layer, kind) {
    if (kind === "mean" || kind === "maximum") {
      const heads = Array.from({ length: this.model.heads }, (_, head) => head);
      return fuse(heads.map((head) => this.single(layer, head)), kind);
    }
    return this.single(layer, kind === "rollout" ? this.model.heads : kind);
  }

  single(layer, index) {
    const place = layer * (this.model.heads + 1) + index;
    const [width, count] = [this.model.extra.length + 1, this.patches];
    const scales = this.scales.subarray(place * width, (place + 1) * width);
    const levels = this.levels.subarray(place * count, (place + 1) * count);
    const unit = scales[width - 1] / this.steps;
    return {
      patches: Float32Array.from(levels, (level) => level * unit),
      extra: scales.subarray(0, width - 1),
    };
  }
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

/** Returns what can be shown of a model's layer, in the order of the keys h and H. */
function kinds(model) {
  return [...Array(model.heads).keys(), ...FUSED];
}

/** Names a kind. */
function nameOf(kind) {
  return typeof kind === "number" ? `head ${kind + 1}` : kind;
}
