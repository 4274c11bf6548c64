"""The documentation: its commands run, its messages and keys are those of the code."""

import ast
import importlib
import importlib.util
import pathlib
import re
import shlex
import sys
import tomllib

import numpy as np
import pytest
import warm
from helpers import RECIPES, write_weights
from hosts import xla_flags
from PIL import Image

from vit_jax.config import fields
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.folder import EXTENSIONS
from vit_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "extensions"))
import config_reference
import generated

SITE = sorted(DOCS.rglob("*.md"))  # Pages.
COMMANDS = tomllib.loads((DOCS / "commands.toml").read_text())["command"]
# In the order in which their commands are run: here, and in tests/test_docs_pretraining.py.
PAGES = [
    "getting_started",
    "dense",  # Makes the masks that "finetuning" reads.
    "finetuning",
    "pretrain_on_your_images",
    "predict",
    "weights",
    "evaluation",
    "features",
    "channels",
    "any_size",
    "data",
    "regression",
    "labels",
    "studies",
    "gallery",
    "export",
]
PRETRAINING = [
    "pretraining",
    "resume",
    "pretraining_without_labels",
    "distillation",
    "launch",
    "compile",
    "scaling",
    "scale",
    "extending",
    "own_network",
    "install",
    "trackers",
    "images_and_text",
]


def page_of(path):
    """Returns the name of a page, with its folder below docs/."""
    return path.relative_to(DOCS).with_suffix("").as_posix()


def blocks(page):
    """Returns language and text of each block of code of a page."""
    found, language, fence = [], None, []
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("```"):
            if language is None:
                language, fence = line[3:], []
            else:
                found.append((language, "\n".join(fence)))
                language = None
        elif language is not None:
            fence.append(line)
        # Four spaces make a block too, unless they continue a list or paragraph.
        elif line.startswith("    ") and (not before or before.startswith("    ")):
            found.append(("", line[4:]))
    assert language is None, f"{page}: a block has no end"
    return found


def prose(path):
    """Returns a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    return [
        line
        for language, text in blocks(page)
        if language in ("", "bash")
        for line in text.splitlines()
    ]


def test_every_command_is_run_by_a_test_or_says_why_not():
    pages = {page_of(path) for path in SITE if commands(page_of(path))}
    assert pages == {*PAGES, *PRETRAINING}
    on_site = {line for page in pages for line in commands(page)}
    assert sorted(on_site) == sorted(entry["line"] for entry in COMMANDS)
    for entry in COMMANDS:
        assert len(entry.keys() & {"test", "reason", "more"}) <= 1, entry
        assert "test" in entry or "with" not in entry, entry
        if "test" in entry:
            file, name = entry["test"].split("::")
            assert f"\ndef {name}(" in (ROOT / file).read_text(), entry["test"]


# What a program that trains takes here, as `more` is what a command takes.
SHORT = 'epochs=1, **{"optim.warmup_epochs": 0, "model.depth": 1}'


@pytest.mark.parametrize("page", [page_of(path) for path in SITE])
def test_tables_are_whole(page):
    blocks = re.split(r"\n\s*\n", prose(DOCS / f"{page}.md"))
    for table in (block.splitlines() for block in blocks if block.startswith("|")):
        assert len(table) > 1 and set(table[1]) <= {*"|-: "}, table[0]


@pytest.mark.parametrize("page", [page_of(path) for path in SITE])
def test_commands_stand_in_blocks(page):
    lines = prose(DOCS / f"{page}.md").splitlines()
    rows = [line for line in lines if not line.startswith("| `")]  # Messages.
    inline = re.findall(r"`([^`\n]+)`", "\n".join(rows))
    programs = r"(python3?|bash|sbatch|pip|kubectl apply|gcloud|tensorboard|jupyter) .+"
    found = [code for code in inline if re.fullmatch(programs, code)]
    # The name of a verb is no command yet.
    found = [code for code in found if not re.fullmatch(r"python -m [\w.]+", code)]
    # Their commands gave the numbers there: docs/commands.md says why CI does not run them.
    assert not found or page.startswith("benchmarks/"), found


def run_pages(pages, tmp_path):
    """Runs the commands and programs of some pages, one after another."""
    listed = {entry["line"]: entry for entry in COMMANDS}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "docs").symlink_to(DOCS)
    make_images(tmp_path)
    # In the place of what would be fetched.
    write_weights(
        tmp_path / "WEIGHTS.safetensors",
        preprocess=Preprocess(image_size=(224, 224), crop_fraction=0.875),
        variant="Ti/16",
        num_classes=3,
        activation="gelu",
        image_size=(224, 224),
    )
    jobs = []
    for page in pages:
        for language, text in blocks(page):
            if language == "python":
                match = re.match(r"# (\w+\.py)\n", text)
                path = tmp_path / (match[1] if match else f"program{len(jobs)}.py")
                path.write_text(text.replace("epochs=10", SHORT))
                if not match:
                    jobs.append(["python", str(path)])
            for line in text.splitlines() if language in ("", "bash") else ():
                entry = listed[line]
                if not entry.keys() & {"test", "reason"}:
                    line = line.removeprefix("PYTHONPATH=docs/examples ")
                    jobs.append(shlex.split(f"{line} {entry.get('more', '')}"))
    paths = f"{ROOT}:{tmp_path}:{DOCS / 'examples'}"
    warm.run_all(jobs, tmp_path, PYTHONPATH=paths, XLA_FLAGS=xla_flags())


@pytest.mark.slow
def test_the_commands_and_programs_of_the_site_run(tmp_path):
    run_pages(PAGES, tmp_path)


def make_images(folder):
    """Makes what the site calls IMAGES, PHOTOS, ALBUM and FOLDER, of noise."""
    draw = np.random.default_rng(0)
    names = [f"IMAGES/{i}.png" for i in range(3)]
    counts = {"PHOTOS/train": 5, "PHOTOS/val": 1, "ALBUM": 9, "FOLDER/full": 2}
    for split, count in counts.items():
        for flower in ("daisy", "dandelion", "roses", "sunflowers", "tulips"):
            names += [f"{split}/{flower}/{i}.png" for i in range(count)]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (37, 53, 3), np.uint8)).save(path)


def messages():
    """Returns the strings in the code, with a zero byte for what is put in."""
    found = []
    for path in [*ROOT.glob("vit_jax/**/*.py"), *ROOT.glob("configs/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "\0") for part in node.values)
                found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("page", "least"), [("troubleshooting", 25), ("launch", 6)])
def test_every_message_of_the_site_is_one_of_the_code(page, least):
    text = (DOCS / f"{page}.md").read_text()
    _, _, text = text.partition("| message | what to do |")
    listed = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    assert len(listed) >= least
    known = "\n".join(messages())
    for message in listed:
        parts = [re.escape(part) for part in re.split(r"\.{3}(?!\.)", message)]
        assert re.search("[^\n]*".join(parts), known), message


def test_what_is_to_be_installed_is_an_extra_in_one_spelling():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = *ROOT.glob("vit_jax/**/*.py"), *SITE, ROOT / "README.md"
    text = "\n".join(path.read_text() for path in files)
    assert "vit_jax[" not in text  # It is not published: there is the clone alone.
    named = re.findall(r"-e[\s\"]+'?\.\[([\w,]+)\]", text)
    assert len(named) > 10
    known = extras["optional-dependencies"].keys()
    assert {extra for names in named for extra in names.split(",")} <= known


def test_the_reference_has_every_key_with_its_default_and_a_meaning():
    text = config_reference.markdown(TrainConfig)
    for name, _, cls in (("", "", TrainConfig), *fields.sections(TrainConfig)):
        defaults = fields.defaults(cls)
        for key, about in fields.fields(cls).items():
            chooses = key in ("kind", "variant") or (name and key == "name")
            if isinstance(about, fields.Section) or chooses:
                continue
            assert about.help, (name, key)
            meaning = about.help.replace("|", "\\|")
            line = f"| `{key}` | `{defaults[key]!r}` | {meaning}"
            assert line in text, (name, line)
            assert not about.reason or f" For: {about.reason}. |" in text, (name, key)

    assert "## `optim`, by `name`\n\n| key | default | meaning |\n| --- |" in text
    assert "| `b1` | `0.9` |" in text
    assert '### `kind="fewshot"`' in text
    assert '### `name="rsqrt"`' in text
    assert "| `folder` | yes | Image files" in text
    assert "| `pad_crop(pad=4)` | Shifts by up to" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) - 1 == 3, line


TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *SITE]
TEXTS += [ROOT / "launch" / "README.md", ROOT / "tests" / "golden" / "README.md"]


def anchors(path):
    """Returns what the headings of a page are reached by."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_within_the_project_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue  # These are checked by hand, says CONTRIBUTING.md.
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_reference_of_the_command_line_has_every_flag():
    text = generated.flags()
    for name in generated.COMMANDS:
        part = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        parser = generated.load(name).parser()
        for action in parser._actions:
            for flag in action.option_strings:
                assert re.search(rf"{flag}\b", part), (name, flag)
    assert "config keys with their defaults" not in text


def test_links_out_of_the_site_lead_to_the_repository():
    text = "[a](../launch), [b](../SECURITY.md), [c](api.md#models), "
    text += "[d](../notebooks/quickstart.ipynb)"  # A page of the site.
    assert generated.links(text) == (
        f"[a]({generated.REPOSITORY}/tree/main/launch), "
        f"[b]({generated.REPOSITORY}/blob/main/SECURITY.md), "
        "[c](api.md#models), [d](notebooks/quickstart.ipynb)"
    )


def fidelity(heading):
    """Returns the rows of a table of docs/fidelity.md, without its head."""
    part = (DOCS / "fidelity.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = part.partition("\n## ")[0].strip().splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]


SUBJECTS = {"init", "crop", "augmentation", "schedule", "optimiser", "decay"}
SUBJECTS |= {"evaluation"}


def test_every_recipe_is_compared_with_its_original_by_subject():
    text = (DOCS / "fidelity.md").read_text().partition("\n## ")[0]
    alone = text.partition(" have no original.")[0].rpartition("\n\n")[2]
    seen = set(re.findall(r"`(\w+)\.py`", alone))
    for name, differs, _ in fidelity("Recipes"):
        stem, _, arg = name.strip("`").partition(":")
        stem = stem.removesuffix(".py")
        importlib.import_module(f"configs.{stem}").get_config(arg)
        seen.add(stem)
        if differs != "nothing":
            parts = re.split(r"(?:^|\. )\*\*([a-z, ]+)\*\*: ", differs)
            assert not parts[0], (name, parts[0])
            assert all(re.fullmatch(r"\S.*[^.]", part) for part in parts[2::2]), name
            named = [word for part in parts[1::2] for word in part.split(", ")]
            assert len(named) == len({*named} & SUBJECTS), (name, named)
    assert sorted(seen) == RECIPES


@pytest.mark.parametrize(
    "heading", ["Recipes", "Evaluation, transforms and optimisers"]
)
def test_comparisons_name_their_original_and_what_differs(heading):
    for name, state, original in fidelity(heading):
        links = re.findall(r"\]\((https://github\.com/[^)]*)\)", original)
        for link in links:
            assert re.match(
                r"https://github\.com/[^/]+/[^/]+/blob/[0-9a-f]{40}/.", link
            )
        assert links or "arXiv:" in original, name
        if heading != "Recipes":
            known = state in ("equal", "own")
            assert known or re.fullmatch(r"equal but: \w.*[^.]", state), (name, state)


@pytest.mark.parametrize("page", ["docs/data.md", "docs/finetuning.md"])
def test_all_kinds_of_image_files_are_listed(page):
    Image.init()
    words = set(re.findall(r"\w+", (ROOT / page).read_text().upper()))
    kinds = {Image.EXTENSION.get(ending, "HEIC") for ending in EXTENSIONS} - {"HEIF"}
    assert kinds | {"PGM"} <= words


def public():
    """Returns what docs/api.md has of each module."""
    found = {}
    text = (DOCS / "api.md").read_text()
    for kind, name, members in re.findall(
        r"^\.\. auto(\w+):: (\S+)\n(?:   :members:(.*)\n)?", text, re.MULTILINE
    ):
        if kind == "module":
            found.setdefault(name, set()).update(re.findall(r"\w+", members))
        else:
            module, _, member = name.rpartition(".")
            found[module].add(member)
    return found


def used(text):
    """Returns modules of the project that a program imports, and what it takes of each."""
    tree, names = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vit_jax"):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    found = {}
    for name, whole in names.items():
        if is_module(whole):
            found[whole] = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == name
            }
        else:  # A function or class by itself.
            module, _, member = whole.rpartition(".")
            found.setdefault(module, set()).add(member)
    return found


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def programs():
    """Yields the name and text of each program that users are shown."""
    for path in sorted(ROOT.glob("notebooks/*.py")):
        yield path.name, path.read_text()
    for name in ("listed.py", "mine.py", "noise.py"):  # Others extend other modules.
        yield name, (DOCS / "examples" / name).read_text()
    for path in (ROOT / "README.md", *SITE):
        text = path.read_text()
        found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        yield from ((f"{path.name}, {i}", text) for i, text in enumerate(found))


@pytest.mark.parametrize("program", [p for _, p in programs()], ids=dict(programs()))
def test_what_notebooks_and_examples_call_is_in_the_public_api(program):
    listed = public()
    for module, members in used(program).items():
        assert module in listed, module
        assert members <= listed[module], module
