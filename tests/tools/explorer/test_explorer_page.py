"""The explorer's page in a browser: what is clicked, pressed, dropped and seen."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import re
import shutil
import time
from urllib.parse import urlsplit

import explored
import numpy as np
import pytest
from PIL import Image

from vit_jax.analysis import attention
from vit_jax.tools.explorer import saved
from vit_jax.weights import surgery

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
def file(tmp_path_factory, explored_models, photograph):
    """The page of one image, as a file."""
    path = tmp_path_factory.mktemp("saved") / "photograph.html"
    seen = [model.run(photograph, "x") for model in explored_models]
    written = saved.write(str(path), explored_models, seen, "photograph.png")
    assert written == (path.stat().st_size, 255, 1)
    return path


@pytest.fixture
def looked(page, photograph):
    """The page of both models with the photograph on it."""
    drawn(page, 1)  # The first image of the folder.
    act(page, lambda: choose(page, photograph))
    return page


def choose(page, data, name="photograph.png"):
    """Chooses an image file."""
    page.set_input_files(
        "#file", {"name": name, "mimeType": "image/png", "buffer": data}
    )


@contextlib.contextmanager
def held(page, pattern):
    """Holds requests for what matches until the end; yields them."""
    routes, at_end = [], False
    page.route(
        re.compile(pattern),
        lambda route: route.continue_() if at_end else routes.append(route),
    )
    yield routes
    at_end = True
    for route in routes:
        route.continue_()


def drawn(page, count):
    """Waits until the page has answered so often."""
    wait(page, f"Number(document.body.dataset.drawn) >= {count}")


def wait(page, condition):
    """Waits for what is said in JavaScript, or for a function.

    Playwright's own way of it evaluates text, which the page's policy forbids.
    """
    end = time.monotonic() + 60
    while not (condition() if callable(condition) else page.evaluate(condition)):
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


def place_of(page, selector, row, column, number=0):
    """Returns the coordinates in the window of a place in an element, by fractions."""
    element = page.locator(selector).nth(number)
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    return box["x"] + column * box["width"], box["y"] + row * box["height"]


def click_patch(page, row, column, grid=(3, 5), pane=0):
    """Clicks the middle of a patch."""
    at = (row + 0.5) / grid[0], (column + 0.5) / grid[1]
    act(page, lambda: page.mouse.click(*place_of(page, MAP, *at, pane)))


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
def maps(first, explored_models, photograph):
    """The attention of the first model by `analysis`: layers, heads, N, N."""
    model, params = surgery.fit_network(first, first.preprocess)
    images = explored.network_input(explored_models[0].run(photograph, "x"))
    return list(attention.attention_maps(model, params, images))


def check_map(page, heads, combine=lambda heads: heads[0]):
    """Checks the patches' attention, and that it is what the colours say."""
    found, heads = shown(page)[3], np.asarray(heads)
    # Half a step of the sharpest head.
    tolerance = 0.51 / 255 * heads.max()
    np.testing.assert_allclose(found, combine(heads), atol=tolerance)
    check_colours(page, found)


def check_colours(page, found):
    """Checks that the colours say what the patches' attention is."""
    ramp = np.array(page.evaluate("Array.from(RAMP)")).reshape(256, 3)
    levels = np.rint(255 * found / found.max()).astype(int)
    assert abs(colours(page) - ramp[levels]).max() <= 1


def test_the_token_is_not_seen_and_a_link_from_elsewhere_leads_here(new_page, served):
    page = new_page("about:blank", quiet=False)  # A status of 403 is complained of.
    page.set_content(f"<a href='{served.address}'>the printed line</a>")
    page.get_by_role("link").click()
    page.get_by_role("button", name="one.png").wait_for()
    # What is chosen follows as a fragment once the first result is drawn.
    root = f"http://127.0.0.1:{served.server_port}/"
    assert page.url.partition("#")[0] == root
    assert urlsplit(served.address).query.partition("=")[2] not in page.url
    # Without a cookie, as another person's browser.
    page.context.clear_cookies()
    page.goto(root)
    assert "open the whole address that the server has printed" in page.content()
    page.goto(served.address)
    page.reload()
    page.get_by_role("button", name="one.png").wait_for()


@pytest.mark.parametrize("place", ["server", "file"])
def test_the_map_is_that_of_the_analysis(place, request, new_page, maps):
    if place == "server":
        page = request.getfixturevalue("looked")
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
    check_map(page, attention.rollout(maps[:3])[:, 14, 1:])
    extra = page.evaluate("panes[0].shown.extra")
    expected = attention.rollout(maps[:3])[0, 14, 0]
    np.testing.assert_allclose(extra, [expected], rtol=1e-5)


def test_the_keyboard(looked):
    looked.locator(MAP).first.focus()
    press(looked, "ArrowRight")  # From the class token into the middle.
    assert shown(looked)[0] == 1 + 1 * 5 + 2
    press(looked, "ArrowRight", "ArrowDown", "ArrowDown")  # The last is at the border.
    assert shown(looked)[0] == 1 + 2 * 5 + 3
    press(looked, "ArrowUp", "ArrowLeft", "[", "[", "[", "[")
    assert shown(looked)[:2] == (1 + 1 * 5 + 2, 0)
    press(looked, "]", "H")  # The last head.
    assert shown(looked)[1:3] == (1, 2)
    press(looked, "h", "h", "h", "h", "c")
    assert shown(looked)[:3] == (0, 1, 0)
    said = looked.locator("#announced").inner_text()
    assert "Layer 2 of 4: head 1" in said
    assert "From [CLS]: most attention to row" in said
    looked.locator("#layer").focus()  # Whose arrow keys are its own.
    press(looked, "ArrowLeft")
    assert shown(looked)[:2] == (0, 0)


def test_the_keys_are_those_of_the_model_that_is_reached(looked):
    looked.locator(MAP).first.focus()
    press(looked, "H", "H")  # From the mean to the second of three heads.
    assert [shown(looked, i)[2] for i in (0, 1)] == [1, 1]
    looked.locator(MAP).nth(1).focus()
    press(looked, "h")  # The second has no third head.
    assert [shown(looked, i)[2] for i in (0, 1)] == ["mean", "mean"]
    underlined = looked.locator("article[aria-current=true] h2")
    assert underlined.inner_text() == "models/tiny2 (Ti/8)"
    assert shown(looked, 1)[0] == 2 * 2 + 1  # As it has no class token.
    press(looked, "ArrowLeft", "ArrowDown")
    assert shown(looked, 1)[0] == 3 * 2
    assert looked.locator("#query").inner_text() == "row 4, column 1"
    looked.locator("article").first.get_by_role("button", name="head 1").focus()
    before = shown(looked)[0]
    row, column = divmod(before - 1, 5)
    words = f"row {row + 1}, column {column + 1}"
    assert looked.locator("#query").inner_text() == words
    press(looked, "ArrowRight")
    assert shown(looked)[0] == before + 1


@SECOND
def test_everything_is_reached_by_the_tab_key_and_seen(looked):
    names, at_end = [], False
    while not at_end:
        looked.keyboard.press("Tab")
        name, outlined, at_end = looked.evaluate(
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
    assert names.count("map") == 2
    for name in ("file", "[CLS]", "layer", "opacity", "map", "head 3", "rollout"):
        assert name in names


def test_two_models_side_by_side(looked):
    # The second has no class token: its patch in the middle asks.
    assert shown(looked, 1)[0] == 2 * 2 + 1
    second = looked.locator("article").nth(1)
    assert "there is no [CLS] here" in second.locator(".where").inner_text()
    assert second.get_by_role("heading", name="Top classes").is_hidden()
    classes = looked.locator("article").first.locator(".classes li")
    assert classes.count() == 5
    # The place that was clicked, not the number of the patch.
    click_patch(looked, 3, 0, grid=(4, 2), pane=1)
    assert shown(looked, 1)[0] == 3 * 2
    boxes = "panes.map((pane) => pane.seen.models[pane.number].box)"
    boxes = np.array(looked.evaluate(boxes)).reshape(2, 2, 2)  # Of each two corners.
    place = boxes[1, 0] + (3.5 / 4, 0.25) * (boxes[1, 1] - boxes[1, 0])
    place = (place - boxes[0, 0]) / (boxes[0, 1] - boxes[0, 0])
    row, column = (place * (3, 5)).astype(int).clip(0, (2, 4))
    assert shown(looked)[0] == 1 + row * 5 + column
    # Its own arrow keys; and layers go along by their share of the depth.
    press(looked, "ArrowRight")
    assert shown(looked, 1)[0] == 3 * 2 + 1
    press(looked, "[", "[")
    assert [shown(looked, i)[1] for i in (0, 1)] == [1, 0]
    assert looked.locator("#depth").inner_text() == "2 of 4"


def test_an_image_is_dropped(page, photograph):
    drawn(page, 1)
    drop = """async (letters) => {
      const bytes = Uint8Array.from(atob(letters), (x) => x.charCodeAt(0));
      const dropped = new DataTransfer();
      dropped.items.add(new File([bytes], "dropped.png"));
      const event = { dataTransfer: dropped, bubbles: true, cancelable: true };
      document.body.dispatchEvent(new DragEvent("drop", event));
    }"""
    act(page, lambda: page.evaluate(drop, base64.b64encode(photograph).decode()))
    assert page.locator("#subtitle").inner_text() == "dropped.png"


def test_what_goes_wrong_is_told_and_the_last_image_stays(served, new_page, photograph):
    page = new_page(served.address, quiet=False)  # Chromium complains of status 415.
    drawn(page, 1)
    act(page, lambda: choose(page, photograph))
    alert = page.get_by_role("alert")
    choose(page, b"GIF", "torn.png")
    alert.filter(has_text="torn.png cannot be decoded").wait_for()
    assert page.locator("#busy").inner_text() == ""
    assert page.locator("#subtitle").inner_text() == "photograph.png"
    press(page, "ArrowDown")
    page.evaluate("limits.bytes = 10")
    choose(page, bytes(11), "large.png")  # It is not sent.
    told = "large.png has more than 10 bytes: give a smaller file."
    alert.filter(has_text=told).wait_for()
    page.context.set_offline(True)
    page.keyboard.press("ArrowDown")
    alert.filter(has_text="The server does not answer").wait_for()
    page.context.set_offline(False)
    press(page, "ArrowUp")
    assert alert.inner_text() == ""


def looked_at(page, pane=0):
    """Returns the keys of the images whose picture and whose attention are shown."""
    address, key = page.evaluate(f"[panes[{pane}].image.src, panes[{pane}].seen.key]")
    return re.search("image=([0-9a-f]+)", address)[1], key


def key_of(data):
    return hashlib.sha256(data).hexdigest()[:32]


def test_no_picture_is_shown_with_the_attention_of_another(
    looked, photograph, explored_models
):
    def check(data):
        assert looked_at(looked) == (key_of(data), key_of(data))
        row = explored_models[0].run(data, "x").rows.levels[shown(looked)[0]]
        levels = looked.evaluate("[...panes[0].shown.row.levels]")
        assert levels == row.ravel().tolist()

    new = explored.picture(6)
    with held(looked, "api/picture") as pictures:
        choose(looked, new)
        wait(looked, lambda: len(pictures) == 2)
        press(looked, "ArrowDown")  # Of the old one, whose picture is still there.
        check(photograph)
    wait(looked, f"panes[0].seen.key === '{key_of(new)}'")
    wait(looked, "document.getElementById('busy').textContent === ''")
    check(new)


def test_a_picture_that_comes_late_is_not_shown(looked):
    late, last = explored.picture(10), explored.picture(11)
    with held(looked, f"api/picture.*{key_of(late)}") as pictures:
        choose(looked, late)
        wait(looked, lambda: len(pictures) == 2)
        act(looked, lambda: choose(looked, last, "last.png"))
    looked.wait_for_timeout(200)
    assert [looked_at(looked, pane) for pane in (0, 1)] == 2 * [(key_of(last),) * 2]
    assert looked.locator("#subtitle").inner_text() == "last.png"
    assert looked.locator("#busy").inner_text() == ""


@SECOND
def test_pictures_of_the_folder_are_asked_for_one_at_a_time(page):
    widths = "[...document.querySelectorAll('#folder img')].map((x) => x.naturalWidth)"
    whole = f"{widths}.length === 4 && {widths}.every((width) => width > 0)"
    wait(page, whole)
    with held(page, "api/thumbnail") as pictures:
        page.reload()
        wait(page, lambda: pictures)
        page.wait_for_timeout(200)
        assert len(pictures) == 1
    wait(page, whole)


def test_it_is_readable_at_any_width_by_day_and_by_night(looked):
    for width, scheme in itertools.product((400, 1600), ("light", "dark")):
        looked.set_viewport_size({"width": width, "height": 900})
        looked.emulate_media(color_scheme=scheme)
        assert looked.evaluate("document.documentElement.scrollWidth") <= width
        sizes = looked.evaluate(
            """[...document.querySelectorAll("body *")]
              .filter((each) => each.checkVisibility() && each.innerText?.trim())
              .map((each) => parseFloat(getComputedStyle(each).fontSize))"""
        )
        assert min(sizes) >= 12
        for text, ground in GROUNDS.items():
            assert contrast(looked, text, ground) >= 4.5, text  # WCAG 2.2, 1.4.3.
        # Of what is no text: 1.4.11.
        assert contrast(looked, ".overview", "body") >= 3


# Where words stand, and what is behind them.
GROUNDS = {
    **dict.fromkeys(("h1", "#subtitle", "#message", "#drop", ".control"), "body"),
    **dict.fromkeys((".where", ".note", "#keys", ".peak", ".classes li"), "body"),
    **dict.fromkeys((".classes .label", ".classes li > :last-child"), ".classes .bar"),
    **{each: each for each in (".kinds button", "#extra button", "#deeper", "kbd")},
}


def contrast(page, text, ground):
    """Returns the contrast of one element's colour on another's ground (WCAG 2.2)."""
    colours = page.evaluate(
        """(at) => {
          const [text, ground] = at.map((one) => document.querySelector(one));
          return [getComputedStyle(text).color, getComputedStyle(ground).backgroundColor];
        }""",
        [text, ground],
    )
    assert colours[1].startswith("rgb("), (ground, colours)  # Not transparent.
    parts = np.array([colour[4:-1].split(",") for colour in colours], float) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return (light + 0.05) / (dark + 0.05)


@SECOND
def test_labels(looked):
    """Every control has a name for those who do not see it."""
    unnamed = looked.evaluate(
        """[...document.querySelectorAll("button, input, canvas, [role=group]")]
          .filter((each) => !each.closest("[aria-hidden]") && each.checkVisibility())
          .filter((each) => !(each.labels?.length || each.ariaLabel
            || each.ariaLabelledByElements?.length || each.textContent.trim()
            || each.querySelector("img[alt]") || each.closest("button")))
          .map((each) => each.outerHTML)"""
    )
    assert unnamed == []


def test_without_a_class_token_there_is_no_button(new_page, explored_models, tmp_path):
    seen = [explored_models[1].run(explored.picture(5), "x")]
    saved.write(str(tmp_path / "grey.html"), explored_models[1:], seen, "</script><b>x")
    page = new_page((tmp_path / "grey.html").as_uri())
    drawn(page, 1)
    assert page.locator("#extra button").count() == 0
    assert page.locator("#classkey").is_hidden()
    assert page.locator("#subtitle").inner_text() == "</script><b>x"
    page.keyboard.press("c")
    press(page, "ArrowLeft")
    assert shown(page)[0] == 2 * 2


def test_blocks_of_patches_are_drawn_and_told_as_such(new_page, tmp_path):
    grid = rows, columns = 9, 10
    made, seen = explored.made(grid, layers=3, heads=2)
    pooled = dataclasses.replace(
        seen, rows=seen.rows.pool_patches(grid, 2).requantize(31)
    )
    (tmp_path / "x.html").write_bytes(saved.page([made], [pooled], "x"))
    page = new_page((tmp_path / "x.html").as_uri())
    drawn(page, 1)
    act(page, lambda: page.locator("#opacity").fill("100"))
    click_patch(page, 8, 9, grid)
    press(page, "H")  # From the mean to the last head.
    assert shown(page)[:3] == (1 + 8 * 10 + 9, 2, 1)
    levels = pooled.rows.levels[1 + 8 * 10 + 9, 2, 1].astype(int).reshape(5, 5)
    fine = np.kron(levels, np.ones((2, 2), int))[:rows, :columns].ravel()
    found = shown(page)[3]
    assert (np.rint(31 * found / found.max()) == fine).all()
    check_colours(page, found)
    article = page.locator("article")
    assert article.locator(".kept").inner_text() == (
        "To keep this file small, attention is stored in 32 steps up to the maximum "
        "and as means of 2x2 patches."
    )
    row, column = np.divmod(fine.argmax(), columns)
    place = f"most attention to rows {row + 1} to {row + 2}, columns {column + 1} to {column + 2}"
    place = place.replace("rows 9 to 10", "row 9")
    where = article.locator(".where").inner_text()
    assert where.startswith(f"From the patch in row 9, column 10: {place}, ")
    assert re.search(r"\d % per patch; to \[CLS\] ", where)
    assert page.locator("#whose").is_hidden()


def test_the_first_image_is_shown_and_the_address_leads_back(new_page, served):
    page = new_page(served.address)
    drawn(page, 1)
    assert page.evaluate("opened") == page.evaluate("panes[0].seen.name")
    first = page.evaluate("opened")
    act(page, lambda: page.get_by_role("button", name="one.png").click())
    assert page.evaluate("opened") == "one.png" != first
    press(page, "H", "[")
    click_patch(page, 2, 3)
    act(page, lambda: page.locator("#clip").check())
    before = shown(page)[:3]
    address = page.url
    assert "image=one.png" in address and served.token not in address
    again = new_page("about:blank")
    again.context.clear_cookies()
    again.goto(served.address + "#" + address.partition("#")[2])
    drawn(again, 1)
    assert again.evaluate("opened") == "one.png"
    assert shown(again)[:3] == before == (1 + 2 * 5 + 3, 2, 2)
    assert again.locator("#clip").is_checked()
    # What an address has that does not fit is left out.
    again.goto("about:blank")
    again.goto(served.address + "#image=no&kind=77x&depth=9&at=3,1&label=-1")
    drawn(again, 1)
    assert shown(again)[:3] == (0, 3, "mean") and again.evaluate("opened") == first


def test_pointing_shows_where_a_patch_looks_until_the_pointer_leaves(looked):
    before, count = shown(looked), looked.evaluate("document.body.dataset.drawn")
    x, y = place_of(looked, MAP, 2.5 / 3, 0.5 / 5)
    looked.mouse.move(x, y - 10)
    looked.mouse.move(x, y)
    wait(looked, "panes[0].shown.asking.patch === 10")
    assert (shown(looked)[3] != before[3]).any()
    looked.mouse.move(x - 200, y)
    wait(looked, "panes[0].shown.asking.patch === null")
    np.testing.assert_array_equal(shown(looked)[3], before[3])
    # Nothing was chosen, and nothing is read aloud.
    assert looked.evaluate("document.body.dataset.drawn") == count


def test_a_class_is_clicked_to_see_its_relevance(
    looked, photograph, explored_models, new_page, file
):
    output = explored_models[0].run(photograph, "x")
    for page in (looked, new_page(file.as_uri())):
        drawn(page, 1)
        button = page.locator(".classes button").nth(1)
        act(page, button.click)
        wanted = explored_models[0].relevance(output, output.classes[1].label)
        wanted = wanted / wanted.sum()
        np.testing.assert_allclose(shown(page)[3], wanted, rtol=0.01, atol=1e-6)
        words = page.locator(".where").first.inner_text()
        assert words.startswith(
            f"Relevance to {output.classes[1].name}: largest for row"
        )
        words = page.locator(".where").nth(1).inner_text()
        assert "This model does not support relevance" in words
        pressed = page.locator(".classes button[aria-pressed=true]")
        assert output.classes[1].name in pressed.inner_text()
        assert page.locator(".kinds button[aria-pressed=true]").count() == 1
        act(page, button.click)
        assert shown(page)[0] == 0


def test_the_overview_has_labels_arrow_keys_and_is_clicked(looked):
    grid = looked.locator(".grid").first
    assert grid.locator(".layers").inner_text().split() == ["1", "2", "3", "4"]
    names = grid.locator(".names").inner_text().split()
    assert names == ["1", "2", "3", "mean", "max", "roll"]
    grid.locator("canvas").focus()
    press(looked, "ArrowLeft", "ArrowUp")
    wait(looked, "panes[0].shown.layer === 2 && panes[0].shown.kind === 2")
    assert shown(looked)[0] == 0  # The query stays.
    at = place_of(looked, ".overview", 2.5 / 6, 1.5 / 4)
    act(looked, lambda: looked.mouse.click(*at))
    wait(looked, "panes[0].shown.layer === 1 && panes[0].shown.kind === 2")


def test_what_is_shown_is_saved(looked, new_page, tmp_path):
    with looked.expect_download() as found:
        looked.locator("#savepng").click()
    assert found.value.suggested_filename == "photograph.png"
    found.value.save_as(tmp_path / "map.png")
    size = tuple(looked.evaluate("[panes[0].map.width, panes[0].map.height]"))
    with Image.open(tmp_path / "map.png") as saved_map:
        assert saved_map.size == size
    with looked.expect_download() as found:
        looked.locator("#savepage").click()
    assert found.value.suggested_filename == "photograph.html"
    found.value.save_as(tmp_path / "page.html")
    again = new_page((tmp_path / "page.html").as_uri())
    drawn(again, 1)
    np.testing.assert_array_equal(shown(again)[3], shown(looked)[3])
    assert again.locator("#savepage").is_hidden()


def test_scales_of_brightness_and_cover(looked):
    values = "Float32Array.from({ length: 40 }, (_, i) => 39 - i)"
    assert looked.evaluate(f"peakOf({values}, false)") == 39
    assert looked.evaluate(f"peakOf({values}, true)") == 37  # Two are larger.
    act(looked, lambda: looked.locator("#clip").check())
    assert looked.evaluate("state.clip")
    # The photograph stays where there is little attention.
    cover = looked.evaluate("[0, 0.5, 1].map((share) => [...coverOf(share)])")
    assert set(cover[0]) == {0} and set(cover[2]) == {255}
    assert cover[1] == list(range(256))


def test_windows_have_the_heads_of_their_stage(new_page, photograph):
    with explored.served([explored.opened(explored.swin())]) as running:
        page = new_page(running.address)
        page.locator("#choose").wait_for()
        choose(page, photograph)
        drawn(page, 1)
        assert page.locator("#savepage").is_hidden()
        assert page.locator(".windows").is_visible()
        assert "Stage 2, block 1 (layer 3 of 3): mean" in page.content()
        kinds = page.locator(".kinds button:visible")
        assert kinds.count() == 6
        press(page, "[")
        assert kinds.count() == 4 and kinds.last.inner_text() == "maximum"
        # The sixth row and column are in the second window of four.
        values = shown(page)[3].reshape(12, 10)
        np.testing.assert_allclose(values.sum(), 1, atol=0.02)


@pytest.fixture(scope="module")
def compared(folder):
    """The page of a model with a text tower."""
    model = explored.opened(explored.towers())
    with explored.served([model], folder) as served:
        yield served, model


def test_a_text_is_typed_to_see_its_relevance(compared, new_page, photograph):
    served, model = compared
    page = new_page(served.address)
    drawn(page, 1)
    act(page, lambda: choose(page, photograph))

    def type_in(words):
        page.locator("#text").fill(words)
        page.keyboard.press("Enter")

    act(page, lambda: type_in("a photo of a dog [h]"))
    output = model.run(photograph, "x")
    wanted = model.relevance(output, "a photo of a dog [h]")
    np.testing.assert_allclose(shown(page)[3], wanted / wanted.sum(), rtol=1e-3)
    words = page.locator(".where").inner_text()
    assert words.startswith("Relevance to “a photo of a dog [h]”: largest for row")
    assert "text=a+photo+of+a+dog" in page.evaluate("location.hash")
    act(page, lambda: type_in(""))
    assert page.locator(".where").inner_text().startswith("From [CLS]")


def test_patches_are_compared_also_with_another_image(compared, new_page, photograph):
    served, _ = compared
    page = new_page(served.address)
    drawn(page, 1)
    click_patch(page, 1, 2)
    act(page, lambda: page.locator("#view").select_option("similarity"))
    title = page.locator(".which").inner_text()
    assert title == "Similarity to the patch in row 2, column 3"
    assert shown(page)[3][7] == pytest.approx(1, abs=1e-5)
    first = page.evaluate("panes[0].seen.name")
    act(page, lambda: choose(page, photograph))
    title = page.locator(".which").inner_text()
    assert title == f"Similarity to the patch in row 2, column 3 of {first}"
    key = page.evaluate("panes[0].seen.key")
    origin = page.evaluate("state.query.of.key")
    wanted = served.session.similarity(key, 0, origin, 7)
    np.testing.assert_allclose(shown(page)[3], np.maximum(wanted, 0), atol=1e-6)
    click_patch(page, 0, 0)
    title = page.locator(".which").inner_text()
    assert title == "Similarity to the patch in row 1, column 1"

    act(page, lambda: page.locator("#view").select_option("components"))
    page.locator("#opacity").fill("100")
    wait(page, "state.opacity === 1")
    tile = np.array(Image.open(io.BytesIO(served.session.components(key, 0))))
    wait(page, "panes[0].shown.colours !== null")
    assert abs(colours(page) - tile.reshape(15, 3)).max() <= 2
    assert "view=components" in page.evaluate("location.hash")


def test_images_of_any_size_are_shown_whole(new_page, first, photograph, tmp_path):
    model = explored.opened(first, max_tokens=20)
    with explored.served([model]) as served:
        page = new_page(served.address)
        choose(page, explored.picture(5, size=(24, 80)), "wide.png")
        drawn(page, 1)
        act(page, lambda: page.locator("#opacity").fill("100"))
        for size, grid in (((24, 80), (2, 7)), ((72, 16), (9, 2))):
            data = explored.picture(5, size=size)
            act(page, lambda data=data: choose(page, data))
            assert page.evaluate("panes[0].model.grid") == [*grid]
            box = page.locator(MAP).bounding_box()
            assert box["width"] / box["height"] == pytest.approx(
                grid[1] / grid[0], rel=0.02
            )
            click_patch(page, grid[0] - 1, 1, grid)
            token = 1 + (grid[0] - 1) * grid[1] + 1
            assert shown(page)[0] == token
            output = served.session.output(page.evaluate("panes[0].seen.key"), 0)
            values = np.frombuffer(
                output.rows.to_bytes(token)[4 * 4 * 4 * 2 :], np.uint8
            )
            assert len(shown(page)[3]) == grid[0] * grid[1] == values.size // 16
            check_colours(page, shown(page)[3])
        act(page, lambda: page.locator("#view").select_option("similarity"))
        act(page, lambda: choose(page, photograph))
        title = page.locator(".which").inner_text()
        assert title.startswith("Similarity to the patch in row 9, column 2 of")
    path = tmp_path / "wide.html"
    saved.write(str(path), [model], [output], "wide.png")
    page = new_page(path.as_uri())
    drawn(page, 1)
    assert page.evaluate("panes[0].model.grid") == [9, 2]
    assert len(shown(page)[3]) == 18


def test_the_classes_of_pixels_are_shown(new_page, photograph):
    model = explored.opened(explored.with_masks())
    with explored.served([model]) as served:
        page = new_page(served.address)
        wait(page, "!document.querySelector('#views').hidden")
        choose(page, photograph)
        drawn(page, 1)
        page.locator("#opacity").fill("100")
        wait(page, "state.opacity === 1")
        act(page, lambda: page.locator("#view").select_option("mask"))
        assert page.locator(".which").inner_text() == "Classes of the pixels"
        output = model.run(photograph, "x")
        mask = np.asarray(Image.open(io.BytesIO(output.mask))).astype(int)
        rows, columns = (side // 8 for side in mask.shape[:2])
        middles = mask[4::8, 4::8].reshape(rows * columns, 3)
        # A middle is a corner of four pixels, the colours of which may differ.
        assert (abs(colours(page) - middles).max(1) <= 2).mean() > 0.8
        items = page.locator(".classes li").all_inner_texts()
        assert items[0].startswith(output.classes[0].name)


def test_a_model_without_masks_offers_none(page):
    assert page.locator("#view [value=mask]").get_attribute("hidden") is not None
