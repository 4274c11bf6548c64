"""Reports from folders as runs leave them."""

import html.parser
import re
import sys

import pytest
import report_runs
from helpers import run_command

from vit_jax.errors import UserError
from vit_jax.tools.report import pages, results
from vit_jax.tools.report.blocks import Table

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Page(html.parser.HTMLParser):
    """Checks that every element that is opened is closed, and collects attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


def table(parts, words):
    """Returns the only table with these words in its title."""
    (found,) = (t for t in report_runs.blocks(parts, Table) if words in t.title)
    return found


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_else(written):
    text = (written / "index.html").read_text()
    page = Page(text)
    assert "script" not in page.seen
    assert page.seen.count("svg") == len(list(written.glob("plots/*.svg")))
    links = [v for k, v in page.attributes if k in ("href", "src", "data", "action")]
    assert links
    own = "#", "data:text/csv;base64,", "data:image/png;base64,"
    assert all(link.startswith(own) for link in links)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    ids = [value for key, value in page.attributes if key == "id"]
    # matplotlib uses some names twice within a picture, never across two.
    for name in (path.stem for path in written.glob("plots/*.svg")):
        assert any(value.startswith(f"{name}-") for value in ids)
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    # Names of others are text, whatever they look like.
    assert "<very>" not in text
    assert "color-scheme" in text


def test_every_plot_is_there_as_png_svg_and_csv_and_in_both_pages(written):
    stems = {path.stem for path in (written / "plots").iterdir()}
    markdown = (written / "report.md").read_text()
    for stem in stems:
        for suffix in ("png", "svg", "csv"):
            assert (written / "plots" / f"{stem}.{suffix}").stat().st_size > 50
        assert f"](plots/{stem}.png)" in markdown
    assert "| ImageNet | 88.55 ± 0.04 |" in markdown
    assert "measured: L/16 (paper:L/16-i21k)" in markdown
    assert not list(written.rglob("*.new"))


def test_a_sweep_is_told_with_what_was_chosen_and_what_diverged(parts):
    found = table(parts, "transfer_cifar10:")
    rows = {row[0]: row[2:] for row in found.rows}
    assert rows["rate 0.01, chosen"] == ("74.00", "12.5")
    assert rows["rate 1e+09"] == ("diverged", "-")
    assert rows["seed 2"] == ("99.03", "31")
    assert found.note == (
        "Mean 98.93 %, standard deviation 0.03. Mode: full, layer decay 0.75, 384x512; "
        "set: batch_size=24."
    )


def test_tasks_that_are_absent_or_failed_are_listed_with_the_reason(parts):
    remedy = "python -m vit_jax.prepare --dataset=dmlab"
    assert table(parts, "missing").rows == (("DMLab", remedy),)
    assert table(parts, "failed").rows == (("SVHN", "no space"),)


def test_counts_are_no_percentages(tmp_path):
    scores = {"25shot": 0.5, "25shot_short": 3, "examples": 7360, "loss": 0.25}
    about = {"model": "m", "variant": "B/16", "results": {"few": {"weights": scores}}}
    folder = report_runs.evaluation(tmp_path / "run", **about)
    parts = pages.sections(results.read_runs([folder]))
    assert {row[2]: row[3] for row in table(parts, "run: B/16").rows} == {
        "25shot": "50.00%",
        "25shot_short": "3",
        "examples": "7,360",
        "loss": "0.25",
    }


def test_the_compute_of_runs_inside_others_is_there(tmp_path):
    about = {"model": "deit:Ti/16", "variant": "Ti/16"}
    moved = report_runs.transfer(
        tmp_path / "moved", dataset="cifar10", mean=0.5, **about
    )
    tasks = report_runs.vtab(tmp_path / "vtab", tasks={"dtd": 0.5, "pets": ""}, **about)
    study = report_runs.study(tmp_path / "study")

    def share_pretraining(content):
        first, second = content["points"] = content["points"][:2]
        second["stages"]["pretrain"] = first["stages"]["pretrain"]

    report_runs.change_study(study, share_pretraining)
    given = report_runs.training(
        study / "ViT-64,3000" / "finetune" / "run" / "seed1",
        variant="Ti/4",
        dataset="cifar10",
        init="x",
    )
    parts = pages.sections(results.read_runs([moved, tasks, study, given]))
    (section,) = (part for part in parts if part.title == "Compute")
    rows = {row[0]: row[1:] for row in section.blocks[0].rows}
    devices = "16 x TPU v3"
    assert list(rows) == [
        "moved: 3 trials",
        "moved: 3 final runs",
        "vtab: 1 final run",
        "study: ViT-64,3000, pretrain: 1 other trial",
        "study: ViT-64,3000, pretrain: 2 runs",
        "study: ViT-64,3000, finetune: 1 run",
        "study: ViT-64,12000, finetune: 2 runs",
        "seed1",  # In the report by itself, so not a second time.
    ]
    assert rows["moved: 3 final runs"][:7] == (
        *("Ti/16", "cifar10", "3 x 500", "36,000", "0.75", devices, "9.75"),
    )
    assert rows["vtab: 1 final run"][:4] == ("Ti/16", "vtab/dtd", "2,500", "300")
    pretrained = rows["study: ViT-64,3000, pretrain: 2 runs"]
    assert pretrained[:6] == ("Ti/4", "cifar10", "2 x 4", "512", "0.0002", devices)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("", "", "run holds none of report.json, .*: give the workdir of a training"),
        ("command.json", "{}", "run holds nothing that is finished yet: wait for its"),
        (
            "study.json",
            '{"kind": "sca',
            r"study.json is not JSON \(.*\): it is damaged",
        ),
        (
            "study.json",
            "[1]",
            "study.json lacks kind, config, points: give a folder that",
        ),
        (
            "vtab.json",
            '{"kind": "transfer", "model": "a", "tasks": {}}',
            "vtab.json has the kind 'transfer', not 'vtab'",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, file, text, message):
    folder = tmp_path / "run"
    with pytest.raises(
        UserError, match="run is not a folder with any of report.json, .*:"
    ):
        results.read_runs([folder])
    folder.mkdir()
    if file:
        (folder / file).write_text(text)
    with pytest.raises(UserError, match=message):
        pages.write_report([folder], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_report_that_cannot_be_written_is_one_line(folders, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out=.*file cannot be written \("):
        pages.write_report(folders[-1:], tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[plots\]' in the clone"):
        pages.write_report(folders[-1:], tmp_path / "report")


def test_names_are_as_short_as_they_can_be(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    for path in paths:
        report_runs.study(path)
    assert [run.name for run in results.read_runs(paths)] == ["a/run", "b/run", "other"]
    assert len(results.read_runs([paths[0], paths[0]])) == 1


def test_the_verb_writes_the_same_files_each_time(folders, tmp_path, capsys):
    for name in "ab":
        words = [str(folders[-2]), f"--out={tmp_path / name}"]
        assert not run_command("report", words)
    assert capsys.readouterr().out.endswith(
        "b/index.html and report.md, with 4 plots in plots/\n"
    )
    paths = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(paths) > 8
    for path in paths:
        same = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert same.read_bytes() == path.read_bytes()
