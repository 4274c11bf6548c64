"""The explorer's page in a browser: what is clicked, pressed, dropped and seen."""

import base64
import functools
import io
import itertools
import shutil
import time

import explored
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax.analysis import attention, rollout
from vit_jax.evaluation import network
from vit_jax.explorer import saved

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs Playwright: pip install playwright"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAP = "canvas.map"
# Each takes a second; together with the others they would be long.
SECOND = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium; Playwright's own would have to be fetched."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        yield running
        running.close()


@pytest.fixture
def new_page(browser):
    """Opens an address; afterwards nothing may have been complained of."""
    complaints, opened = [], []

    def open_one(address, *, quiet=True):
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        page.set_default_timeout(60_000)
        opened.append(page)
        if quiet:
            page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        return page

    yield open_one
    for page in opened:
        page.close()
    assert complaints == []


@pytest.fixture
def page(served, new_page):
    """The page of both models."""
    return new_page(served.address)


@pytest.fixture(scope="module")
def file(tmp_path_factory, subjects, photograph):
    """The page of one image, as a file."""
    path = tmp_path_factory.mktemp("saved") / "photograph.html"
    seen = [subject.see(photograph, "x") for subject in subjects]
    assert saved.write(str(path), subjects, seen, "photograph.png") == (
        path.stat().st_size,
        255,
    )
    return path


def upload(page, data, name="photograph.png"):
    """Chooses an image file and waits until it is shown."""
    kind = "image/png"
    page.locator("#choose").wait_for()  # Before, nobody listens.
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})
    drawn(page, 1)


def drawn(page, count):
    """Waits until the page has answered so often."""
    wait(page, f"Number(document.body.dataset.drawn) >= {count}")


def wait(page, condition):
    """Waits for what is said in JavaScript.

    Playwright's own way of it evaluates text, which the page's policy forbids.
    """
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(10)


def act(page, action):
    """Does something and waits for the answer."""
    before = int(page.evaluate("document.body.dataset.drawn"))
    action()
    drawn(page, before + 1)


def press(page, *keys):
    for key in keys:
        act(page, lambda key=key: page.keyboard.press(key))


def click_patch(page, row, column, grid=(3, 5), pane=0):
    """Clicks the middle of a patch."""
    canvas = page.locator(MAP).nth(pane)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x = (column + 0.5) / grid[1] * box["width"]
    y = (row + 0.5) / grid[0] * box["height"]
    act(page, lambda: canvas.click(position={"x": x, "y": y}))


def shown(page, pane=0):
    """Returns what a pane shows: query, layer, kind and the map."""
    found = page.evaluate(
        """(number) => {
          const { asking, layer, kind, patches, extra } = panes[number].shown;
          return { ...asking, layer, kind, patches: [...patches], extra: [...extra] };
        }""",
        pane,
    )
    return found["token"], found["layer"], found["kind"], np.array(found["patches"])


def colours(page, pane=0):
    """Returns the colour in each patch's middle, red, green and blue."""
    rows, columns = page.evaluate(f"panes[{pane}].model.grid")
    png = page.evaluate(f"panes[{pane}].map.toDataURL()").partition(",")[2]
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(png))))
    height, width = pixels.shape[0] // rows, pixels.shape[1] // columns
    middles = pixels[height // 2 :: height, width // 2 :: width, :3]
    return middles.reshape(rows * columns, 3).astype(int)


@pytest.fixture(scope="module")
def maps(first, subjects, photograph):
    """The attention of the first model by `analysis`: layers, heads, N, N."""
    model, params = network.fit(first, first.preprocess)
    pixels = np.array(Image.open(io.BytesIO(subjects[0].see(photograph, "x").picture)))
    images = jnp.asarray((pixels[None] / 255 - 0.4) / 0.3, jnp.float32)
    return list(attention.maps(model, params, images))


def check_map(page, heads, combine=lambda heads: heads[0]):
    """Checks the patches' attention, and that it is what the colours say."""
    found, heads = shown(page)[3], np.asarray(heads)
    # Half a step of the sharpest head.
    tolerance = 0.51 / 255 * heads.max()
    np.testing.assert_allclose(found, combine(heads), atol=tolerance)
    ramp = np.array(page.evaluate("Array.from(RAMP)")).reshape(256, 3)
    levels = np.rint(255 * found / found.max()).astype(int)
    assert abs(colours(page) - ramp[levels]).max() <= 1


@pytest.mark.parametrize("place", ["server", "file"])
def test_the_map_is_that_of_the_analysis(place, request, new_page, photograph, maps):
    if place == "server":
        page = new_page(request.getfixturevalue("served").address)
        upload(page, photograph)
    else:
        page = new_page(request.getfixturevalue("file").as_uri())
        drawn(page, 1)
        assert page.locator("#choose").is_hidden()
    act(page, lambda: page.locator("#opacity").fill("100"))
    mean, most = (functools.partial(how, axis=0) for how in (np.mean, np.max))
    # First the class token, the last layer and the mean of all heads.
    assert shown(page)[:3] == (0, 3, "mean")
    check_map(page, maps[3][0, :, 0, 1:], mean)
    before = colours(page)
    click_patch(page, 2, 3)
    assert shown(page)[0] == 1 + 2 * 5 + 3
    check_map(page, maps[3][0, :, 14, 1:], mean)
    assert (colours(page) != before).any()

    press(page, "h", "[")  # From the mean to the maximum, and a layer down.
    assert shown(page)[1:3] == (2, "maximum")
    check_map(page, maps[2][0, :, 14, 1:], most)
    act(page, lambda: page.get_by_role("button", name="head 2").first.click())
    check_map(page, maps[2][0, 1:2, 14, 1:])
    act(page, lambda: page.get_by_role("button", name="rollout").first.click())
    check_map(page, rollout.rollout(maps[:3])[:, 14, 1:])
    extra = page.evaluate("panes[0].shown.extra")
    expected = rollout.rollout(maps[:3])[0, 14, 0]
    np.testing.assert_allclose(extra, [expected], rtol=1e-5)


def test_the_keyboard(page, photograph):
    upload(page, photograph)
    page.locator(MAP).first.focus()
    press(page, "ArrowRight")  # From the class token into the middle.
    assert shown(page)[0] == 1 + 1 * 5 + 2
    press(page, "ArrowRight", "ArrowDown", "ArrowDown")  # The last is at the border.
    assert shown(page)[0] == 1 + 2 * 5 + 3
    press(page, "ArrowUp", "ArrowLeft")
    assert shown(page)[0] == 1 + 1 * 5 + 2
    press(page, "[", "[", "[", "[")
    assert shown(page)[1] == 0
    press(page, "]")
    assert shown(page)[1] == 1
    press(page, "H")
    assert shown(page)[2] == 2  # The last head.
    press(page, "h", "h", "h", "h")
    assert shown(page)[2] == 0
    press(page, "c")
    assert shown(page)[0] == 0
    said = page.locator("#told").inner_text()
    assert "Layer 2 of 4: head 1" in said
    assert "From [CLS]: most to row" in said


@SECOND
def test_the_slider_takes_its_arrow_keys_itself(page, photograph):
    upload(page, photograph)
    page.locator("#layer").focus()
    press(page, "ArrowLeft")
    assert shown(page)[:2] == (0, 2)


@SECOND
def test_everything_is_reached_by_the_tab_key_and_seen(page, photograph):
    upload(page, photograph)
    names, at_end = [], False
    while not at_end:
        page.keyboard.press("Tab")
        name, outlined, at_end = page.evaluate(
            """() => {
              const at = document.activeElement;
              const outlined = at.id === "file" ? at.parentElement : at;
              const name = at.id || at.className || at.textContent;
              const style = getComputedStyle(outlined).outlineStyle;
              return [name, style !== "none", at === document.body];
            }"""
        )
        assert outlined or at_end, name
        names.append(name)
    for name in ("file", "[CLS]", "layer", "opacity", "map", "head 3", "rollout"):
        assert name in names


def test_two_models_side_by_side(page, photograph):
    upload(page, photograph)
    # The second has no class token: its patch in the middle asks.
    assert shown(page, 1)[0] == 2 * 2 + 1
    second = page.locator("article").nth(1)
    assert "there is no [CLS] here" in second.locator(".where").inner_text()
    assert second.get_by_role("heading", name="Top classes").is_hidden()
    classes = page.locator("article").first.locator(".classes li")
    assert classes.count() == 5
    # The place that was clicked, not the number of the patch.
    click_patch(page, 3, 0, grid=(4, 2), pane=1)
    assert shown(page, 1)[0] == 3 * 2
    boxes = page.evaluate("panes.map((pane) => pane.seen.models[pane.number].box)")
    place = [
        box + (share * (boxes[1][i + 2] - box))
        for i, (box, share) in enumerate(zip(boxes[1], (3.5 / 4, 0.25), strict=False))
    ]
    rows = [
        (place[i] - boxes[0][i]) / (boxes[0][i + 2] - boxes[0][i]) * count
        for i, count in ((0, 3), (1, 5))
    ]
    row, column = (
        int(np.clip(at, 0, n - 1)) for at, n in zip(rows, (3, 5), strict=True)
    )
    assert shown(page)[0] == 1 + row * 5 + column
    # Its own arrow keys; and layers go along by their share of the depth.
    press(page, "ArrowRight")
    assert shown(page, 1)[0] == 3 * 2 + 1
    press(page, "[", "[")
    assert [shown(page, i)[1] for i in (0, 1)] == [1, 0]
    assert page.locator("#depth").inner_text() == "2 of 4"


@SECOND
def test_the_overview_chooses_layer_and_head(page, photograph):
    upload(page, photograph)
    canvas = page.locator(".overview").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    position = {"x": 1.5 / 4 * box["width"], "y": 2.5 / 6 * box["height"]}
    act(page, lambda: canvas.click(position=position))
    wait(page, "panes[0].shown.layer === 1 && panes[0].shown.kind === 2")


@SECOND
def test_the_brightest_may_look_alike(page, photograph):
    upload(page, photograph)
    values = "Float32Array.from({ length: 40 }, (_, i) => 39 - i)"
    assert page.evaluate(f"peakOf({values}, false)") == 39
    assert page.evaluate(f"peakOf({values}, true)") == 37  # Two are larger.
    act(page, lambda: page.locator("#clip").check())
    assert page.evaluate("state.clip")


@SECOND
def test_an_image_of_the_folder(page):
    page.get_by_role("button", name="one.png").click()
    drawn(page, 1)
    assert page.locator("#subtitle").inner_text() == "one.png"


def test_an_image_is_dropped(page, photograph):
    page.locator("#choose").wait_for()
    page.evaluate(
        """async (letters) => {
          const bytes = Uint8Array.from(atob(letters), (x) => x.charCodeAt(0));
          const dropped = new DataTransfer();
          dropped.items.add(new File([bytes], "dropped.png"));
          const event = { dataTransfer: dropped, bubbles: true, cancelable: true };
          document.body.dispatchEvent(new DragEvent("drop", event));
        }""",
        base64.b64encode(photograph).decode(),
    )
    drawn(page, 1)
    assert page.locator("#subtitle").inner_text() == "dropped.png"


def test_a_broken_image_is_told_and_the_last_one_stays(served, new_page, photograph):
    page = new_page(served.address, quiet=False)  # Chromium complains of status 415.
    upload(page, photograph)
    upload_broken = {"name": "torn.png", "mimeType": "image/png", "buffer": b"GIF"}
    page.set_input_files("#file", upload_broken)
    message = page.get_by_role("alert")
    message.filter(has_text="torn.png cannot be decoded").wait_for()
    assert page.locator("#busy").inner_text() == ""
    assert page.locator("#subtitle").inner_text() == "photograph.png"
    press(page, "ArrowDown")
    act(page, lambda: upload(page, photograph))
    assert message.inner_text() == ""


@SECOND
def test_a_large_file_is_not_sent(page):
    page.locator("#choose").wait_for()
    page.evaluate("limits.bytes = 10")
    large = {"name": "large.png", "mimeType": "image/png", "buffer": bytes(11)}
    page.set_input_files("#file", large)
    told = page.get_by_role("alert").inner_text()
    assert told == "large.png has more than 10 bytes: give a smaller file."


def test_it_is_readable_at_any_width_by_day_and_by_night(page, photograph):
    upload(page, photograph)
    for width, scheme in itertools.product((400, 1600), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.evaluate(
            """[...document.querySelectorAll("body *")]
              .filter((each) => each.checkVisibility() && each.innerText?.trim())
              .map((each) => parseFloat(getComputedStyle(each).fontSize))"""
        )
        assert min(sizes) >= 12
        assert contrast(page) >= 4.5  # WCAG 2.2, 1.4.3.


def contrast(page):
    """Returns the least contrast of ink, soft ink and warnings on the page's ground."""
    found = page.evaluate(
        """["#subtitle", "h1", "#message"].map((at) => [
          getComputedStyle(document.querySelector(at)).color,
          getComputedStyle(document.body).backgroundColor,
        ])"""
    )
    return min((max(pair) + 0.05) / (min(pair) + 0.05) for pair in map(lights, found))


def lights(colours):
    """Returns relative luminances of CSS colours (WCAG 2.2)."""
    found = []
    for text in colours:
        parts = np.array([float(x) for x in text[4:-1].split(",")]) / 255
        linear = np.where(
            parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4
        )
        found.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return found


@SECOND
def test_labels(page, photograph):
    """Every control has a name for those who do not see it."""
    upload(page, photograph)
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, canvas, [role=group]")]
          .filter((each) => !each.closest("[aria-hidden]") && each.checkVisibility())
          .filter((each) => !(each.labels?.length || each.ariaLabel
            || each.ariaLabelledByElements?.length || each.textContent.trim()
            || each.querySelector("img[alt]") || each.closest("button")))
          .map((each) => each.outerHTML)"""
    )
    assert unnamed == []


def test_without_a_class_token_there_is_no_button(new_page, subjects, tmp_path):
    seen = [subjects[1].see(explored.picture(5), "x")]
    saved.write(str(tmp_path / "grey.html"), subjects[1:], seen, "</script><b>x")
    page = new_page((tmp_path / "grey.html").as_uri())
    drawn(page, 1)
    assert page.locator("#extra button").count() == 0
    assert page.locator("#classkey").is_hidden()
    assert page.locator("#subtitle").inner_text() == "</script><b>x"
    page.keyboard.press("c")
    press(page, "ArrowLeft")
    assert shown(page)[0] == 2 * 2


@SECOND
def test_a_server_that_has_ended_is_told(served, new_page, photograph):
    page = new_page(served.address, quiet=False)
    upload(page, photograph)
    page.context.set_offline(True)
    page.keyboard.press("ArrowDown")
    alert = page.get_by_role("alert").filter(has_text="The server does not answer")
    alert.wait_for()
