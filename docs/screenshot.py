"""Makes docs/gallery/explorer.png: python docs/screenshot.py --model=deit:Ti/16

Starts the attention explorer on scikit-image's photograph of a cat (CC0, by Stefan van
der Walt), clicks a patch near an eye, and keeps what a browser shows, made small. Needs
scikit-image, Playwright and a Chromium.
"""

import argparse
import io
import pathlib
import shutil
import tempfile
import threading

from PIL import Image

from vit_jax import explore
from vit_jax.command_line import cli
from vit_jax.errors import UserError

PICTURE = pathlib.Path(__file__).parent / "gallery" / "explorer.png"
LAYER, HEAD, PATCH = 9, "head 1", (0.37, 0.3)  # Fractions of height and width.
_SIZE, _WIDTH, _COLOURS = {"width": 1280, "height": 930}, 1040, 112


def main(flags: argparse.Namespace) -> None:
    """Writes the picture."""
    import skimage.data
    from playwright.sync_api import sync_playwright

    from vit_jax.tools.explorer.images import Folder
    from vit_jax.tools.explorer.server import Server
    from vit_jax.tools.explorer.session import Session

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise UserError("there is no chromium and no google-chrome: install one")
    model = explore.open_model(flags, flags.model)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        for name in ("astronaut", "chelsea", "coffee", "rocket"):
            pixels = getattr(skimage.data, name)()
            Image.fromarray(pixels).save(f"{folder}/{name}.png")
        with Server(Session([model], Folder(folder)), "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser = started.chromium.launch(
                executable_path=program, args=["--no-sandbox"]
            )
            _save(_shoot(browser.new_page(viewport=_SIZE), server.address))
            browser.close()
            server.shutdown()


def _shoot(page, address: str) -> bytes:
    page.goto(address)
    page.get_by_role("button", name="chelsea").click()
    page.locator("#layer").fill(str(LAYER))
    canvas = page.locator("canvas.map")
    box = canvas.bounding_box()
    canvas.click(position={"x": PATCH[1] * box["width"], "y": PATCH[0] * box["height"]})
    page.get_by_role("button", name=HEAD).click()
    page.locator("h3", has_text=f"Layer {LAYER} of").get_by_text(HEAD).wait_for()
    page.wait_for_timeout(500)  # Thumbnails come when they are there.
    return page.screenshot()


def _save(content: bytes) -> None:
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture.thumbnail((_WIDTH, _WIDTH), Image.Resampling.LANCZOS)
    PICTURE.parent.mkdir(exist_ok=True)
    picture.quantize(_COLOURS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    cli.run(main, explore.parser())
