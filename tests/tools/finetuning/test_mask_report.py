"""The page on the mistakes of a network that classifies pixels."""

import base64
import io
import re

import numpy as np
from PIL import Image

from vit_jax.data import masks
from vit_jax.tools.finetuning import mask_report
from vit_jax.tools.finetuning.mask_report import Triple
from vit_jax.tools.finetuning.page import Common
from vit_jax.tools.report import templates
from vit_jax.tools.report.blocks import Table

NAMES = ("ground", "<tree>", "sky", "none")
# True classes are rows. Class 3 neither occurs nor is predicted.
COUNTS = np.array([[80, 10, 0, 0], [30, 50, 20, 0], [0, 0, 10, 0], [0, 0, 0, 0]])


def test_the_page_has_scores_and_confusions_worst_first():
    images = [
        {
            "caption": "mean IoU 12.0%",
            "file": "/a/b.png",
            "name": "b.png",
            "pictures": [("photograph", "data:image/jpeg;base64,aa")],
        }
    ]
    values = mask_report.contents(COUNTS, NAMES, masks.palette(4), images)
    settings = Table("Settings", ("key", "value"), ())
    common = Common("<A>", "Score.", [], [], [], settings, "again", [])
    page = templates.render("finetuning/mask_page.html", common=common, **values)
    assert "<title>&lt;A&gt;</title>" in page and "<tree>" not in page
    rows = re.findall("<tbody>(.*?)</tbody>", page, re.DOTALL)
    lines = re.sub("<[^>]*>", " ", "".join(rows)).splitlines()
    text = [line for line in lines if line.strip()]
    # IoU, part of the pixels, recall, precision.
    assert text[0].split() == ["sky", "33.3%", "5.0%", "100.0%", "33.3%"]
    assert text[1].split() == ["&lt;tree&gt;", "45.5%", "50.0%", "50.0%", "83.3%"]
    assert text[2].split() == ["ground", "66.7%", "45.0%", "88.9%", "72.7%"]
    assert text[3].split() == ["none", "-", "0.0%", "-", "-"]
    assert text[4].split() == ["&lt;tree&gt;", "ground", "30.0%", "30"]
    assert text[5].split() == ["&lt;tree&gt;", "sky", "20.0%", "20"]
    assert text[6].split() == ["ground", "&lt;tree&gt;", "11.1%", "10"]
    assert len(text) == 7
    assert 'fill="#800000"/></svg>&lt;tree&gt;' in page  # The legend.
    assert page.count("<img ") == 1 and 'alt="photograph of b.png"' in page


def read(url):
    data = base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)), int)


def test_pictures_show_the_photograph_and_both_masks():
    image = np.full((20, 30, 3), (200, 100, 60), np.uint8)
    labels = np.full((20, 30), -1, np.int16)
    labels[:10] = 1
    predicted = np.full((20, 30), 2, np.int16)
    named = mask_report.pictures(Triple(0, image, labels, predicted), masks.palette(3))
    assert [name for name, _ in named] == ["photograph", "true mask", "predicted mask"]
    photograph, true, found = (read(url) for _, url in named)
    assert photograph.shape == true.shape == (240, 360, 3)
    assert abs(photograph[100, 100] - [200, 100, 60]).max() < 4
    grey = 0.299 * 200 + 0.587 * 100 + 0.114 * 60
    # Red over grey; grey alone where no class counts.
    assert abs(true[50, 100] - [0.45 * grey + 0.55 * 128, *[0.45 * grey] * 2]).max() < 6
    assert abs(true[200, 100] - grey).max() < 4
    assert (
        abs(
            found[200, 100] - [0.45 * grey, 0.45 * grey + 0.55 * 128, 0.45 * grey]
        ).max()
        < 6
    )
