"use strict";

/** Requests data from the server of the page. */
class Server {
  constructor() {
    this.canChoose = true;
    // The token is a cookie now: hides it from others who see the screen.
    history.replaceState(null, "", location.pathname + location.hash);
  }

  about() {
    return this.json("api/about");
  }

  /** Runs the models on an image of the folder. */
  open(name) {
    return this.json(`api/open?name=${encodeURIComponent(name)}`, { method: "POST" });
  }

  /** Runs the models on a file that was chosen or dropped. */
  see(file) {
    const name = encodeURIComponent(file.name || "The image");
    return this.json(`api/see?name=${name}`, { method: "POST", body: file });
  }

  pictureOf(seen, model) {
    return `api/picture?image=${seen.key}&model=${model}`;
  }

  thumbnailOf(name) {
    return `api/thumbnail?name=${encodeURIComponent(name)}`;
  }

  /** Returns the Row of a query. */
  async row(seen, number, model, query) {
    const address = `api/row?image=${seen.key}&model=${number}&query=${query}`;
    const answer = await this.fetch(address);
    return Row.parse(model, await answer.arrayBuffer(), seen.models[number]);
  }

  /** Returns the relevance of each patch to a class. */
  relevance(seen, number, label) {
    const image = `image=${seen.key}&model=${number}`;
    return this.floats(`api/relevance?${image}&class=${label}`);
  }

  /** Returns the relevance of each patch to a text. */
  relevanceToText(seen, number, words) {
    const image = `image=${seen.key}&model=${number}`;
    return this.floats(`api/relevance?${image}&text=${encodeURIComponent(words)}`);
  }

  /** Returns the cosine similarity of each patch to a patch of an image. */
  similarity(seen, number, origin, patch) {
    const image = `image=${seen.key}&model=${number}`;
    return this.floats(`api/similarity?${image}&from=${origin}&patch=${patch}`);
  }

  componentsOf(seen, number) {
    return `api/components?image=${seen.key}&model=${number}`;
  }

  maskOf(seen, number) {
    return `api/mask?image=${seen.key}&model=${number}`;
  }

  /** Returns the page with an image as one file. */
  async page(seen) {
    const name = encodeURIComponent(seen.name);
    const answer = await this.fetch(`api/page?image=${seen.key}&name=${name}`);
    return new Blob([await answer.arrayBuffer()], { type: "text/html" });
  }

  async json(address, options) {
    return (await this.fetch(address, options)).json();
  }

  async floats(address) {
    return new Float32Array(await (await this.fetch(address)).arrayBuffer());
  }

  async fetch(address, options) {
    let answer;
    try {
      answer = await fetch(address, options);
    } catch {
      throw new Error("The server does not answer: is it still running?");
    }
    if (!answer.ok) throw new Error((await answer.json()).error);
    return answer;
  }
}

/** Reads data from the page, see saved.py. */
class Saved {
  constructor(text) {
    this.canChoose = false;
    this.state = JSON.parse(text);
    this.unpacked = this.state.models.map((_, number) => unpack(`rows${number}`));
  }

  async about() {
    return { models: this.state.models, images: [] };
  }

  async open() {
    return this.state.seen;
  }

  pictureOf(_, model) {
    return this.state.pictures[model];
  }

  async relevance(_, number, label) {
    return Float32Array.from(this.state.relevances[number][label]);
  }

  async row(seen, number, model, query) {
    const buffer = await this.unpacked[number];
    const kept = seen.models[number];
    const tokens = countBlocks(model.grid, 1) + model.extra.length;
    const maps = model.labels.length * countMaps(model);
    const width = model.extra.length + 1;
    // Layers and maps come before queries here.
    const scales = new Float32Array(buffer, 0, maps * tokens * width);
    const levels = new Uint8Array(buffer, scales.byteLength);
    const of = (array, width) => {
      const row = new array.constructor(maps * width);
      for (let map = 0; map < maps; map++) {
        const start = (map * tokens + query) * width;
        row.set(array.subarray(start, start + width), map * width);
      }
      return row;
    };
    const blocks = of(levels, countBlocks(model.grid, kept.pool));
    return new Row(model, of(scales, width), blocks, kept);
  }
}

/** Returns the bytes of an element's text, which is compressed and in base64. */
async function unpack(id) {
  const bytes = Uint8Array.from(
    atob(document.getElementById(id).textContent),
    (letter) => letter.charCodeAt(0),
  );
  const stream = new Blob([bytes]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** Returns the source of the page's data. */
function findSource() {
  const saved = document.getElementById("saved");
  return saved ? new Saved(saved.textContent) : new Server();
}
