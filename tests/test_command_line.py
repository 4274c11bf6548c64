"""The command `vit_jax`, recipes by name, hints at keys, and what a wheel holds."""

import ast
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile

import grimp
import pytest
from helpers import run_command, run_python
from jax._src import cloud_tpu_init

import vit_jax
from vit_jax import __main__ as command
from vit_jax.command_line import cli
from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.training import config as configuration
from vit_jax.training import loop
from vit_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).parents[1]


def run(*words):
    return run_python("-m", "vit_jax", *words)


def test_all_commands_are_listed_with_a_line_each():
    shown = run()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run("--help").stdout == command.usage() + "\n"
    for name, line in command.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown.stdout, re.MULTILINE)
        assert callable(command.load(name).main)
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_every_file_is_a_command_or_has_a_rank_and_nothing_imports_a_command():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    ranks = settings["importlinter"]["contracts"][0]["layers"]
    ranked = {name for rank in ranks for name in rank.split(" | ")}
    graph = grimp.build_graph("vit_jax", exclude_type_checking_imports=True)
    shared = "vit_jax.command_line"
    files = graph.find_children("vit_jax") - {shared} | graph.find_children(shared)
    modules = {name.removeprefix("vit_jax.") for name in files}
    assert modules == ranked | command.COMMANDS.keys()
    for name in command.COMMANDS:
        assert not graph.find_modules_that_directly_import(f"vit_jax.{name}"), name


def test_the_version_and_a_word_that_is_no_command():
    assert run("--version").stdout == f"vit_jax {vit_jax.__version__}\n"
    shown = run("trian")
    assert shown.returncode == 2 and shown.stderr.count("\n") == 1
    assert "error: 'trian' is not a command: did you mean train? " in shown.stderr
    for word, meant in (("predct", "predict"), ("eval", "evaluate"), ("zzz", "")):
        shown = run(word).stderr
        assert (f"did you mean {meant}? " in shown) == bool(meant), shown


@pytest.mark.parametrize(
    ("name", "word", "meant"),
    [
        ("finetune", "--lr=0.1", "--config.optim.learning_rate"),
        ("finetune", "--epochs=3", "--config.epochs"),
        ("finetune", "--lr=0.1 --epochs=3", "--config.optim.learning_rate --config.ep"),
        ("train", "--batch_size=8", "--config.batch_size"),
        ("transfer", "--weight_decay=0", "--config.optim.weight_decay"),
        ("finetune", "--init=deit:Ti/16", "--model"),
        ("finetune", "--pretrained=x", "--model"),
        ("finetune", "--minuets=3", "--minutes"),
        ("predict", "--top_k=3", "--topk"),
    ],
)
def test_an_unknown_flag_leads_to_what_it_may_mean(name, word, meant, capsys):
    parser = command.load(name).parser()
    words = ["x"] if name in ("finetune", "predict") else []
    needed = [a for a in parser._actions if a.required and a.option_strings]
    words += [f"{action.option_strings[0]}=x" for action in needed]
    with pytest.raises(SystemExit) as ended:
        cli.parse(parser, [*words, *word.split()])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1
    assert word in shown and meant in shown


def test_lines_of_the_log_stay_plain_after_one_of_absl():
    text = """
import logging
from absl import logging as absl
from vit_jax.command_line import cli
def main(flags):
    absl.warning("of absl")
    logging.getLogger("vit_jax").warning("a notice")
cli.run(main, cli.Parser(""))
"""
    done = run_python("-c", text)
    assert (done.returncode, done.stderr) == (0, "of absl\na notice\n")


@pytest.mark.parametrize("shell", command.SHELLS)
def test_shells_complete_commands_and_flags(shell):
    pytest.importorskip("shtab", reason="needs the extra completion")
    done = run(f"--completion={shell}")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("predict", "topk", "workdir"):
        assert word in done.stdout
    if shell == "bash":
        words = (
            f"{done.stdout}\nCOMP_WORDS=(vit_jax tra); COMP_CWORD=1\n"
            "_shtab_vit_jax\necho ${COMPREPLY[@]}"
        )
        shown = subprocess.run(
            ["bash", "-c", words], capture_output=True, text=True, check=True
        )
        assert shown.stdout.split() == ["train", "transfer"]
        wrong = run("--completion=fish")
        assert wrong.returncode == 2 and "give one of bash, zsh, tcsh" in wrong.stderr


def test_an_edit_of_the_same_length_and_second_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    own = tmp_path / "own.py"
    for seed in 1, 2:
        own.write_text(f"def get_study(arg=None):\n    return {{'seeds': {seed}}}\n")
        os.utime(own, (10**9, 10**9))
        assert loading.read_study(str(own)) == {"seeds": seed}


def test_recipes_are_found_by_name_unless_a_file_is_meant(tmp_path, monkeypatch):
    named = loading.recipes()
    assert {"digits", "b16_i21k", "eval/probe", "study/positions"} <= {*named}
    assert not any("common" in name or name.startswith("_") for name in named)
    assert all(title and len(title) < 100 for title in named.values())
    by_name = configuration.load("digits", {"epochs": 3})
    assert by_name == configuration.load(str(ROOT / "configs/digits.py"), {"epochs": 3})
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "digits.py", "configs/digits.py"):
        assert loading.find(name) == ROOT / "configs" / "digits.py"
    assert loading.find("eval/fewshot.py") == ROOT / "configs" / "eval" / "fewshot.py"
    (tmp_path / "digits").write_text("mine")
    with pytest.raises(UserError, match="digits: does not end in .py"):
        configuration.load("digits")
    with pytest.raises(UserError, match="given by its name: b16_i1k, "):
        configuration.load("digit")


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("learning_rate", "optim.learning_rate"),
        ("optim.lr", "optim.learning_rate"),
        ("mixup", "data.train_transform"),
        ("grad_clip", "optim.grad_clip_norm"),
        ("batch", "batch_size"),
        ("epoch", "epochs"),
        ("img_size", "data.image_size"),
        ("stoch_depth", "model.drop_path_rate"),
    ],
)
def test_the_fields_words_lead_to_our_keys(key, wanted):
    with pytest.raises(UserError, match=f"nearest known key is {re.escape(wanted)}$"):
        configuration.load("b16_i1k", {key: 1})


def test_synonyms_are_of_keys_that_exist():
    known = {
        f"{where}.{name}".strip(".")
        for where, kind, section in [
            ("", "", TrainConfig),
            *fields.sections(TrainConfig),
        ]
        for name in fields.fields(section)
    }
    for word, keys in loading.SYNONYMS.items():
        assert re.fullmatch("[a-z0-9]+", word), word
        assert set(keys) <= known, keys


@pytest.mark.slow
@pytest.mark.skipif(
    cloud_tpu_init.running_in_cloud_tpu_vm, reason="this machine has a TPU"
)
@pytest.mark.parametrize(
    "first", ["vit_jax; vit_jax.load_model", "vit_jax.distributed.mesh, flax"]
)
def test_libtpu_is_not_heard_where_there_is_no_tpu(first):
    pytest.importorskip("libtpu", reason="needs the extra tpu")
    code = f"import jax, {first}; print(jax.devices())"
    shown = run_python("-c", code, JAX_PLATFORMS="")
    assert shown.stdout and shown.stderr == ""


def test_help_lists_the_recipes_and_quick_is_announced(tmp_path, monkeypatch, capsys):
    shown = command.load("train").parser().help_text()
    assert re.search(r"^  digits +A small ViT from scratch", shown, re.MULTILINE)
    assert "eval/probe" not in shown
    shown = command.load("evaluate").parser().help_text()
    assert "  eval/probe " in shown

    def train(*_, **__):
        shown = "".join(capsys.readouterr())
        assert "mixer:quick: a small stand-in for the net" in shown
        raise UserError("far enough")

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(UserError, match="far enough"):
        run_command("train", ["--config=mixer:quick", f"--workdir={tmp_path}/run"])


def build(tmp_path, kind):
    """Builds a wheel of a copy of the sources, tmp_path / "vit_jax"; returns its path."""
    source = tmp_path / "vit_jax"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("vit_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools import build_meta; print(build_meta.{kind}('..'))"
    done = run_python("-c", code, cwd=source)
    assert done.returncode == 0, done.stderr
    return tmp_path / done.stdout.split()[-1]


def test_python_beside_the_clone_finds_the_package_in_it(tmp_path):
    with zipfile.ZipFile(build(tmp_path, "build_editable")) as packed:
        packed.extractall(tmp_path / "installed")
    code = (
        "import site, sys; sys.path.insert(0, ''); site.addsitedir('installed'); "
        "import vit_jax; print(vit_jax.__file__)"
    )
    shown = run_python("-I", "-S", "-c", code, cwd=tmp_path)
    assert shown.stdout.strip().endswith("vit_jax/vit_jax/__init__.py")


def test_a_wheel_holds_the_recipes(tmp_path):
    wheel = build(tmp_path, "build_wheel")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "vit_jax = vit_jax.__main__:main" in packed.read(entry).decode()
    for recipe in loading.recipes():
        assert f"vit_jax/recipes/configs/{recipe}.py" in names
    assert "vit_jax/weights/hub/mirrors.tsv" in names
    for template in ("finetuning/page.html", "report/base.html", "report/page.md"):
        assert f"vit_jax/tools/{template}" in names
    program = "from vit_jax.config import loading as l; print(l.find('swin'))"
    installed = tmp_path / "installed"
    shown = run_python("-c", program, cwd=installed, PYTHONPATH="")
    assert pathlib.Path(shown.stdout.strip()).is_relative_to(installed.resolve())


def written():
    """Yields place and text of every string of the package and of the recipes.

    What an f-string fills in is the word VALUE.
    """
    for path in sorted((ROOT / "vit_jax").rglob("*.py")) + sorted(
        (ROOT / "configs").rglob("*.py")
    ):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in filled for part in node.values}
        alone = [
            n for n in nodes if isinstance(n, ast.Constant) and id(n) not in inside
        ]
        for node in filled + alone:
            parts = node.values if node in filled else [node]
            values = [getattr(part, "value", None) for part in parts]
            text = "".join(v if isinstance(v, str) else "VALUE" for v in values)
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            yield place, re.sub(r"\s*\\\n\s*", " ", text)


# A command, and the flags and placeholders that follow it.
COMMAND = re.compile(
    r"(python -m vit_jax[. ]|\bvit_jax )([a-z_]+)\b"
    r'((?: +(?:--[a-z_.\d]+(?:="[^"]*"|[^\s`]*)|(?!VALUE:)[A-Z]{2,}[^\s`]*|\.{3}|-(?=[\s)])))*)'
)


def stand_in(parser, word):
    """Returns a word with a value that its flag takes in place of VALUE and "..."."""
    flag, equals, value = word.rstrip(".,;:)").partition("=")
    if value in ("VALUE", "") and word != flag:
        (action,) = [a for a in parser._actions if flag in a.option_strings] or [None]
        choices = getattr(action, "choices", None)
        value = next(iter(choices)) if choices else "1"
    return f"{flag}{equals}{value}" if equals else flag


def test_every_command_in_the_sources_is_one_of_its_parser(monkeypatch):
    count, wrong = 0, []

    def refuse(_, text):
        raise UserError(text)

    monkeypatch.setattr(cli.Parser, "error", refuse)
    for place, text in written():
        for start, name, words in COMMAND.findall(text):
            if start == "vit_jax " and name not in command.COMMANDS:
                continue  # The package in a sentence.
            assert name in command.COMMANDS, (place, name)
            count += 1
            elided, words = "..." in words, shlex.split(words)
            words = [word for word in words if word != "..."]
            if not words or "--help" in words[0]:
                continue  # The name of the command in a sentence.
            parser = command.load(name).parser()
            try:
                flags = cli.parse(parser, [stand_in(parser, word) for word in words])
                config = getattr(flags, "config", None) or ""
                if config.startswith("configs/"):
                    assert (ROOT / config.partition(":")[0]).is_file(), (place, config)
            except UserError as error:
                if elided and "arguments are required" in str(error):
                    continue
                wrong.append((place, name, words, str(error)))
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 80
