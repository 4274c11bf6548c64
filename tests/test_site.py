"""The built site: what its search finds, and that code can be copied and read."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("sphinx", reason="needs the extra docs")
pytest.importorskip("sphinx_copybutton", reason="needs the extra docs")

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, of .ci/run or built here, warnings as errors."""
    if built := os.environ.get("VIT_JAX_SITE"):
        return pathlib.Path(built)
    out = tmp_path_factory.mktemp("site")
    words = ("-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "trees"))
    subprocess.run(
        [sys.executable, *words, "docs", str(out / "html")], cwd=ROOT, check=True
    )
    shutil.rmtree(out / "trees")
    return out / "html"


def titles_with(index, query):
    """Returns the pages with a title that has all words of a query, as the search's."""
    from sphinx.search.en import SearchEnglish

    stem, found = SearchEnglish({}).stem, []
    for word in re.findall(r"\w+", query.lower()):
        pages = index["titleterms"].get(stem(word), [])
        pages = pages if isinstance(pages, list) else [pages]
        found.append({index["docnames"][page] for page in pages})
    return set.intersection(*found)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("resume", "resume"),
        ("preemption", "resume"),
        ("mixup", "data"),
        ("cutmix", "data"),
        ("patch_size", "faq"),
        ("multi-host", "launch"),
        ("learning rate", "faq"),
        ("timm", "coming_from"),
        ("transformers", "coming_from"),
        ("install", "install"),
        ("model zoo", "model_zoo"),
        ("export", "export"),
        ("mlflow", "trackers"),
        ("citing", "citing"),
    ],
)
def test_the_search_finds_a_title(site, query, page):
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    assert page in titles_with(index, query)


def test_code_is_copied_by_a_click_and_links_to_its_source(site):
    page = (site / "python.html").read_text()
    assert "copybutton.js" in page
    api = (site / "api.html").read_text()
    for module, names in (
        ("models", ("list_models", "create_model")),
        ("pretrained_model", ("load_model", "PretrainedModel")),
        ("training", ("train", "finetune", "evaluate")),
    ):
        for name in names:
            place = f"_modules/vit_jax/api/{module}.html#{name}"
            assert f'href="{place}"' in api, name
