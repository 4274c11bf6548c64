"use strict";

/**
 * Pictures of the folder, asked for when they come into view and one after another: the
 * server decodes each, and a browser has few connections for what is clicked meanwhile.
 */
class Thumbnails {
  /** @param {HTMLElement} root in which they are scrolled. */
  constructor(root) {
    this.addresses = new Map();
    this.waiting = new Set();
    this.loading = false;
    const options = { root, rootMargin: "0px 400px" };
    this.observer = new IntersectionObserver((entries) => this.look(entries), options);
  }

  add(image, address) {
    this.addresses.set(image, address);
    this.observer.observe(image);
  }

  look(entries) {
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
    await image.decode().catch(() => {}); // One that fails shows its name.
    this.loading = false;
    this.next();
  }
}
