"use strict";

/**
 * Thumbnails of the folder, requested when they come into view, one at a time: the server
 * decodes each, and clicks need the browser's few connections too.
 */
class Thumbnails {
  /** @param {HTMLElement} root element that scrolls them. */
  constructor(root) {
    this.addresses = new Map();
    this.waiting = new Set();
    this.loading = false;
    const options = { root, rootMargin: "0px 400px" };
    const update = (entries) => this.update(entries);
    this.observer = new IntersectionObserver(update, options);
  }

  add(image, address) {
    this.addresses.set(image, address);
    this.observer.observe(image);
  }

  update(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.waiting.add(target);
      else this.waiting.delete(target);
    }
    this.next();
  }

  async next() {
    const [image] = this.waiting;
    if (this.loading || !image) return;
    this.waiting.delete(image);
    this.observer.unobserve(image);
    this.loading = true;
    image.src = this.addresses.get(image);
    await image.decode().catch(() => {}); // A failed thumbnail shows its name.
    this.loading = false;
    this.next();
  }
}
