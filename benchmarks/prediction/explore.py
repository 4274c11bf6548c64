"""How long the attention explorer takes to answer a click.

Run:  python -m benchmarks.prediction.explore [--variant=S/16] [--side=224]

Serves a network with random parameters, as `python -m vit_jax.explore` does, and prints
medians: of looking at an image it has not seen, of asking for one query's attention over
HTTP, and, where Playwright and a Chromium are installed, of a click in the browser, from
the mouse's button to the painted maps of all layers and heads. A key press is a click of
the same kind; and of the first map of an image that was chosen. Then the same while the
page fetches the thumbnails of a folder of photographs of 48 megapixels. Also the size of the page of one image as a file. Images
are blurred noise of 500x375 pixels, photographs many of them side by side.
"""

import argparse
import contextlib
import http.client
import io
import json
import pathlib
import shutil
import statistics
import tempfile
import threading
import time

import jax
import numpy as np
from PIL import Image, ImageFilter

from benchmarks import smoke
from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.tools.explorer import saved
from vit_jax.tools.explorer.images import Folder
from vit_jax.tools.explorer.server import Server
from vit_jax.tools.explorer.session import ExploredModel, Session
from vit_jax.weights.pretrained import Pretrained

# In the page: clicks a patch and waits until what it changed is painted.
CLICK = """([row, column]) => new Promise((resolve) => {
  const [canvas, { grid }] = [panes[0].map, panes[0].model];
  const box = canvas.getBoundingClientRect();
  const clientX = box.left + ((column + 0.5) / grid[1]) * box.width;
  const clientY = box.top + ((row + 0.5) / grid[0]) * box.height;
  const start = performance.now();
  new MutationObserver((_, observer) => {
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
  }).observe(document.body, { attributeFilter: ["data-drawn"] });
  canvas.dispatchEvent(new MouseEvent("click", { clientX, clientY }));
})"""


# In the page: how many thumbnails are there.
LOADED = """[...document.querySelectorAll("#folder img")]
  .filter((image) => image.naturalWidth).length"""


def make_images(count):
    """Returns JPEG files as large as ImageNet's usual ones."""
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        noise = rng.integers(0, 256, (375, 500, 3), dtype=np.uint8)
        picture = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(2))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


def fill(folder, image, count):
    """Writes photographs of 8000x6000 pixels; returns the bytes of each."""
    tile = np.array(Image.open(io.BytesIO(image)))
    stream = io.BytesIO()
    Image.fromarray(np.tile(tile, (16, 16, 1))).save(stream, "JPEG", quality=90)
    for number in range(count):
        pathlib.Path(folder, f"{number:03}.jpg").write_bytes(stream.getvalue())
    return len(stream.getvalue())


def open_model(variant, side):
    """Returns a network whose attention is neither even nor of single tokens."""
    options = {"variant": variant, "num_classes": 1000, "image_size": (side, side)}
    model = models.create(**options)
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    preprocess = Preprocess((side, side), interpolation="bicubic", crop_fraction=0.9)
    found = Pretrained(params, options, "vit_jax", f"random {variant}", preprocess)
    return ExploredModel(found, preprocess=preprocess)


@contextlib.contextmanager
def serve(model, folder=None):
    """Serves a network on a free port."""
    with Server(Session([model], folder), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def timed(action, values):
    """Returns the median and the largest time of an action, in milliseconds."""
    times = []
    for value in values:
        start = time.perf_counter()
        action(value)
        times.append(1000 * (time.perf_counter() - start))
    return report(times)


def report(times):
    """Writes times in milliseconds as a median and a largest."""
    return f"median {statistics.median(times):.1f} ms, largest {max(times):.1f} ms"


def ask(server, images, clicks, tokens):
    """Times the server without a browser."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)

    def send(method, path, body=None):
        connection.request(method, f"{path}&token={server.token}", body)
        return connection.getresponse().read()

    times = timed(lambda image: send("POST", "/api/see?name=x", image), images)
    print(f"looking at an image: {times}")
    key = json.loads(send("POST", "/api/see?name=x", images[0]))["key"]
    path = f"/api/row?image={key}&model=0&query="
    size = len(send("GET", f"{path}0"))
    queries = np.random.default_rng(1).permutation(tokens)[:clicks]
    times = timed(lambda query: send("GET", f"{path}{query}"), queries)
    print(f"one query over HTTP ({size:,} bytes): {times}")


def click(server, image, clicks, grid, what):
    """Times clicks in a browser, if there is one."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        print(f"{what}: needs Playwright and a Chromium")
        return
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.goto(server.address)
        page.locator("#choose").wait_for()
        file = {"name": "x.jpg", "mimeType": "image/jpeg", "buffer": image}
        start = time.perf_counter()
        page.set_input_files("#file", file)
        page.locator("body[data-drawn]").wait_for()
        shown = 1000 * (time.perf_counter() - start)
        places = np.random.default_rng(2).permutation(grid[0] * grid[1])[:clicks]
        pairs = [[int(place) // grid[1], int(place) % grid[1]] for place in places]
        before = page.evaluate(LOADED)
        times = [page.evaluate(CLICK, pair) for pair in pairs]
        loaded = page.evaluate(LOADED)
        between = f"; thumbnails {before} to {loaded}" if loaded else ""
        print(f"{what}: {report(times)}; from file to map {shown:.0f} ms{between}")
        browser.close()


def main(args):
    """Prints the times."""
    model = open_model(args.variant, args.side)
    start = time.perf_counter()
    model.warm_up()
    print(
        f"{args.variant} at {args.side}: compiled in {time.perf_counter() - start:.1f} s"
    )
    images = make_images(args.images)
    grid = model.describe()["grid"]
    tokens = len(model.extra) + grid[0] * grid[1]
    with serve(model) as server:
        ask(server, images, args.clicks, tokens)
        click(server, images[0], args.clicks, grid, "a click in the browser")
    with tempfile.TemporaryDirectory() as folder:
        size = fill(folder, images[0], args.photographs)
        with serve(model, Folder(folder)) as server:
            what = (
                f"a click beside {args.photographs} photographs of {size / 1e6:.0f} MB"
            )
            click(server, images[0], args.clicks, grid, what)
    with tempfile.NamedTemporaryFile(suffix=".html") as file:
        output = model.run(images[0], "x")
        written = saved.write(file.name, [model], [output], "x.jpg")
    print(
        f"the page as a file: {written.size / 1e6:.2f} MB, attention in "
        f"{written.steps + 1} steps of {written.pool}x{written.pool} patches"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", default="S/16")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--clicks", type=int, default=50)
    parser.add_argument("--photographs", type=int, default=48)
    flags = smoke.parse(
        parser, "--variant=Ti/16 --side=64 --images=1 --clicks=2 --photographs=1"
    )
    if flags.smoke:
        smoke.shrink()
    main(flags)
