"use strict";

/** Asks the server that the page came from. */
class Server {
  constructor() {
    this.canChoose = true;
    // The token is a cookie by now: it need not be seen by whoever sees the screen.
    history.replaceState(null, "", location.pathname + location.hash);
  }

  about() {
    return this.json("api/about");
  }

  /** Looks at an image of the folder. */
  open(name) {
    return this.json(`api/open?name=${encodeURIComponent(name)}`, { method: "POST" });
  }

  /** Looks at a file that was chosen or dropped. */
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
  async relevance(seen, number, label) {
    const address = `api/relevance?image=${seen.key}&model=${number}&class=${label}`;
    const answer = await this.fetch(address);
    return new Float32Array(await answer.arrayBuffer());
  }

  /** Returns the relevance of each patch to a text. */
  async relevanceToText(seen, number, words) {
    const text = encodeURIComponent(words);
    const address = `api/relevance?image=${seen.key}&model=${number}&text=${text}`;
    const answer = await this.fetch(address);
    return new Float32Array(await answer.arrayBuffer());
  }

  /** Returns the cosine of each patch with a patch of an image. */
  async similarity(seen, number, origin, patch) {
    const of = `image=${seen.key}&model=${number}`;
    const address = `api/similarity?${of}&from=${origin}&patch=${patch}`;
    const answer = await this.fetch(address);
    return new Float32Array(await answer.arrayBuffer());
  }

  componentsOf(seen, number) {
    return `api/components?image=${seen.key}&model=${number}`;
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

/** Finds everything in the page itself, see saved.py. */
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

/** Returns the bytes that an element holds, compressed and as letters. */
async function unpack(id) {
  const bytes = Uint8Array.from(
    atob(document.getElementById(id).textContent),
    (letter) => letter.charCodeAt(0),
  );
  const stream = new Blob([bytes]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** Returns where this page has its data from. */
function findSource() {
  const saved = document.getElementById("saved");
  return saved ? new Saved(saved.textContent) : new Server();
}
