"""Studies: their configs, what is run and chosen, what is left, and resuming after a kill."""

import csv
import itertools
import json
import pathlib
import time

import hosts
import pytest
from helpers import slow_but, without_times

from vit_jax.data import splits
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.report import pages, results
from vit_jax.tools.sweeps import step_cost, study, study_config
from vit_jax.training import config as configuration

ROOT = pathlib.Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "study"
STUDIES = sorted(p.stem for p in FOLDER.glob("[!_]*.py") if p.stem != "common")
FAST = [f"{name}:size={size}" for name in STUDIES for size in ("cpu", "paper")]
LARGE = ("scaling:size=cpu", "scaling:size=paper", "self_supervision:size=cpu")
FAST = [spec for spec in FAST if spec not in LARGE]
OTHERS = [f"{name}:size=gpu" for name in STUDIES]
OTHERS += [f"{name}:data=cifar10" for name in STUDIES if name != "cost"]
SPECS = slow_but(FAST, [*FAST, *LARGE, *OTHERS])
ONE = {"width": ["12"], "kind": ["a"]}  # The axes of a single point.
# Images of train.
SIZES = {"cifar10": 50_000, "digits": 1_442}
OWN = '''
"""A study of two stages on made images.

Run:    python -m vit_jax.study --config=configs/study/own.py --workdir=runs/own
Result: tests/tools/sweeps/test_study.py
"""

from ml_collections import ConfigDict

from configs.common import parse_arg

ARGUMENTS = dict(width=(12, 18), kind=("a", "b"), stage=("pretrain", "finetune"), more=False)


def get_study(arg=None):
    return dict(
        axes=dict(width=(12, 18), kind=("a", "b")),
        stages=("pretrain", "finetune"),
        scores={"top-1": "test/top1", "upstream": "pretrain:test/params/top1"},
        tune=dict(
            pretrain={"optim.learning_rate": dict(a=(0.02, 0.01), b=(0.03,))},
            finetune={"optim.momentum": (0.5, 0.9)},
        ),
        seeds=2,
    )


def get_config(arg=None):
    arg = parse_arg(arg, **ARGUMENTS)
    c = ConfigDict()
    c.total_steps, c.batch_size = 2, 8
    c.data = dict(name="synthetic", num_classes=5, num_examples=20, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=arg.width, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.01, schedule="constant")
    c.evals = dict(val="val", test="val[:7]")
    if arg.stage == "finetune":
        c.init = "?"
    return c
'''


def spec(text):
    name, colon, argument = text.partition(":")
    return f"{FOLDER / name}.py{colon}{argument}"


@pytest.fixture
def own(tmp_path):
    """The path of a study of a user's own, with `configs` to import from."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("text", SPECS)
def test_every_run_of_a_study_is_a_complete_config(text):
    planned = study.plan(spec(text), "work")
    assert len({point.name for point in planned.points}) == len(planned.points) > 1
    built = set()
    for point in planned.points:
        for stage, recipe in point.recipes.items():
            for choice in planned.config.grid(stage, point.axes):
                config = study._config(recipe, choice, 3, "")
            assert config.seed == 3
            network = repr((config.model, config.data.image_size))
            if network not in built:
                built.add(network)
                config.build_model()
            # Nothing is chosen by test: it is scored once, at the end.
            often = config.eval_every_steps or config.eval_every_epochs
            if often and "test" in config.evals:
                assert text.partition("=")[2] == "paper"
    names = {point.name for point in planned.points}
    for name in planned.config.published:
        assert name in names


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_opens_with_its_commands_and_one_point_is_a_recipe(name):
    doc = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    assert f"--config=configs/study/{name}.py" in doc
    assert "arXiv:2010.11929" in doc and "\nResult:" in doc
    assert configuration.load(f"study/{name}").data.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", ["digits", pytest.param("cifar10", marks=pytest.mark.slow)]
)
def test_parts_of_the_scaling_study_are_nested_and_apart_from_all_else(data):
    planned = study.plan(spec(f"scaling:data={data}"), "work")
    tests = {"digits": 355, "cifar10": 10_000}

    def records(split):
        sizes = {"train": SIZES[data], "test": tests[data]}
        found = splits.select(split, sizes, data)
        return {f"{part}/{i}" for part, numbers in found for i in numbers}

    by_size = {}
    for point in planned.points:
        configs = [configuration.complete(r) for r in point.recipes.values()]
        pretrain, finetune = configs
        part, pool = records(pretrain.data.split), records(finetune.data.split)
        val, test = (records(pretrain.evals[e].split) for e in ("val", "test"))
        assert len(part) == pretrain.data.num_examples == point.axes["images"]
        assert not (part & pool or part & val or part & test)
        assert not (pool & val or pool & test or val & test)
        assert pretrain.evals["fewshot"].train == finetune.data.split
        assert by_size.setdefault(point.axes["images"], part) == part
    ordered = [by_size[size] for size in sorted(by_size)]
    assert len(ordered) == 5
    assert all(a < b for a, b in itertools.pairwise(ordered))


@pytest.mark.slow
def test_hybrid_and_resnet_compute_about_as_much_as_the_middle_vit():
    planned = study.plan(spec("scaling"), "work")
    macs = {}
    for point in planned.points[:5]:
        config = configuration.complete(point.recipes["pretrain"])
        macs[point.axes["model"]] = cost.macs_per_image(config.build_model())
    assert macs["vit-xs"] < macs["vit-s"] < macs["vit-m"]
    for name in ("hybrid", "resnet"):
        assert 0.6 < macs[name] / macs["vit-s"] < 1.4, macs


def test_points_are_the_product_of_the_axes_and_each_has_its_own_grid(own):
    planned = study.plan(f"{own}:more", "work", overrides={"batch_size": 4})
    names = [point.name for point in planned.points]
    assert names == ["12,a", "12,b", "18,a", "18,b"]
    assert all(p.recipes["finetune"]["batch_size"] == 4 for p in planned.points)
    grids = [planned.config.grid("pretrain", p.axes) for p in planned.points[:2]]
    assert grids[0] == [{"optim.learning_rate": 0.02}, {"optim.learning_rate": 0.01}]
    assert grids[1] == [{"optim.learning_rate": 0.03}]
    few = study.plan(str(own), "w", only={"kind": ["b"], "width": ["18"]}, seeds=5)
    assert [point.name for point in few.points] == ["18,b"]
    assert few.config.seeds == 5


AXES = "width=(12, 18), kind=("


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("get_study", "get_other", "has no get_study.*choose one of configs/study/"),
        ("return dict(\n", "return list(\n", "does not run: TypeError"),
        (
            "return dict(\n        axes",
            "return 3\n    dict(\n        axes",
            "give a dict",
        ),
        ("axes", "axis", "get_study returns 'axis', which is not one of axes, scores"),
        ("tune=dict(", "tune=dict(x={}, ", "tune.x, but its stages are pretrain, fin"),
        (
            "seeds=2",
            "measure='speed'",
            "measure='speed', which is not one of train, cost",
        ),
        ("test/top1", "tset/top1", "scores 'tset/top1', but the evaluations of finet"),
        ("pretrain:test", "pretrian:test", "upstream='pretrian:.*its stages are pretr"),
        ("test/top1", "test", "returns scores=.*: give a dict of names to EVAL"),
        ("seeds=2", "seeds=0", "returns seeds=0: give a positive integer"),
        ("seeds=2", "tune_by='val'", "returns tune_by='val': give EVALUATION/ME"),
        (AXES, "width=(), kind=(", "returns axes=.*: give a"),
        (AXES, "width='12', kind=(", "returns axes=.*: give"),
        (AXES, "width=(12, 12), kind=(", "tuple of differ"),
        (AXES, "width=range(9), kind=(", "returns axes=.*: g"),
        ("(0.5, 0.9)", "()", "returns tune=.*: give a dict of stages to dicts of"),
        ("dict(a=(0.02, 0.01), b", "dict(a=(0.02, 0.01), c", "all the values of"),
        ("seeds=2", "labels=[]", "returns labels=.*: give a dict of columns"),
        ("seeds=2", "published={'12,a': '1'}", "published=.*: give a dict of points"),
        (
            "seeds=2",
            "figures=[dict(x='wdth', y='top-1')]",
            "figures with x='wdth', whi",
        ),
        (
            "seeds=2",
            "figures=[dict(x='width', y='top1')]",
            "figures with y='top1', whi",
        ),
        ("seeds=2", "laws=[dict(x='width', y='top-1')]", "returns laws=.*: give"),
        (
            "seeds=2",
            "laws=[dict(x='width', y='top-1', lines=('kid',))]",
            "laws with lines='kid', which is not one of width, kind",
        ),
    ],
)
def test_what_is_no_study_is_one_line(own, old, new, message):
    own.write_text(OWN.replace(old, new))
    with pytest.raises(UserError, match=message):
        study.plan(str(own), "work")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": {"kind": ["c"]}}, "--only=kind=c: the study has a, b"),
        ({"only": {"size": ["c"]}}, "--only=size=.*: the axes are width, kind"),
        ({"overrides": {"model.width": 24}}, "--config.model.width: the study sets"),
        ({"overrides": {"optim.momentum": 0}}, "--config.optim.momentum: the stud"),
        ({"overrides": {"seed": 3}}, "--config.seed: .* seeds with --seeds"),
        ({"overrides": {"optim.rat": 1}}, "unknown config key optim.rat"),
        ({"argument": ":kind=a"}, "varies 'kind'; choose with --only=kind="),
    ],
)
def test_what_a_study_does_not_take_is_one_line(own, options, message):
    argument = options.pop("argument", "")
    with pytest.raises(UserError, match=message):
        study.plan(f"{own}{argument}", "work", **options)


@pytest.fixture
def run(own, tmp_path, monkeypatch):
    """Runs the study with made scores; returns the report and what was trained.

    `scores` gets the folder of a run and its config, and returns a score, or why the
    run diverged.
    """

    def start(scores=lambda place, config: 0.5, path=own, **options):
        order, workdir = [], tmp_path / "work"

        def train(config, folder, shared, *, keep):
            folder = pathlib.Path(folder)
            place = folder.relative_to(workdir).as_posix()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / step_cost.MEASURED).write_text("{}")
            order.append((place, config.init.checkpoint, keep))
            found = scores(place, config)
            if isinstance(found, str):
                return {"diverged": found}
            evaluated = {"params": {"top1": found, "loss": 1 - found}}
            return {
                "variant": "Ti/4",
                "dataset": "synthetic",
                "steps": 2,
                "wall_seconds": 1.0,
                "compute": {"images_seen": 16, "exaflops": 0.5, "device_days": 0.25},
                "final": {"val": evaluated, "test": evaluated},
            }

        monkeypatch.setitem(study_config.MEASURES, "train", train)
        return study.plan(str(path), workdir, **options).run(), order

    return start


def saved(tmp_path):
    return json.loads((tmp_path / "work" / "study.json").read_text())


def test_the_best_on_val_is_run_with_all_seeds_from_its_own_pretraining(run, tmp_path):
    def scores(place, config):
        best = config.optim.learning_rate == 0.01 and config.optim.momentum != 0.5
        return 0.5 + 0.25 * best + 0.125 * config.seed

    report, order = run(scores, only=ONE)
    assert [place for place, _, _ in order] == [
        "12,a/pretrain/learning_rate=0.02/seed0",
        "12,a/pretrain/learning_rate=0.01/seed0",
        # The best trial is the run of the first seed.
        "12,a/pretrain/learning_rate=0.01/seed0",
        "12,a/pretrain/learning_rate=0.01/seed1",
        "12,a/finetune/momentum=0.5/seed0",
        "12,a/finetune/momentum=0.9/seed0",
        "12,a/finetune/momentum=0.9/seed0",
        "12,a/finetune/momentum=0.9/seed1",
    ]
    begun = [pathlib.Path(init).name for _, init, _ in order[4:]]
    assert begun == ["seed0", "seed0", "seed0", "seed1"]
    # What was pretrained stays, for other uses; what was fine-tuned goes.
    assert [keep for _, _, keep in order] == [True] * 4 + [False] * 4
    (point,) = report["points"]
    assert point["stages"]["pretrain"]["chosen"] == {"optim.learning_rate": 0.01}
    tried = [trial["score"] for trial in point["stages"]["pretrain"]["trials"]]
    assert tried == [0.5, 0.75]
    top1 = point["scores"]["top-1"]
    assert (top1["values"], top1["mean"]) == ([0.75, 0.875], 0.8125)
    # Student's t of one degree of freedom, 12.706, times the deviation by root 2.
    assert top1["half_interval"] == pytest.approx(12.706 * 0.0625, 1e-3)
    assert saved(tmp_path)["points"] == json.loads(json.dumps(report))["points"]
    with (tmp_path / "work" / "points.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["point"], row["top-1"], row["top-1 seeds"]) == ("12,a", "0.8125", "2")


def test_a_part_is_run_first_and_the_rest_added(run, tmp_path):
    for only in ({"kind": ["b"]}, {}):
        report, _ = run(only=only)
    names = ["12,a", "12,b", "18,a", "18,b"]
    assert [point["name"] for point in report["points"]] == names
    run(only={"kind": ["a"]})
    assert [point["name"] for point in saved(tmp_path)["points"]] == names
    assert saved(tmp_path)["config"]["axes"]["kind"] == ["a", "b"]
    one = {"width": ["18"], "kind": ["b"]}
    with pytest.raises(UserError, match="with another command .points.18,b.finetune"):
        run(only=one, overrides={"batch_size": 4})


def test_what_earlier_starts_told_stays_until_it_is_told_anew(run, tmp_path):
    only = {"width": ["12"]}
    run(only=only)

    def ended(place, config):
        if place.startswith("12,b/finetune") and config.seed == 2:
            raise KeyboardInterrupt
        return 0.75

    with pytest.raises(KeyboardInterrupt):
        run(ended, only=only, seeds=3)
    values = {
        p["name"]: p["scores"]["top-1"]["values"] for p in saved(tmp_path)["points"]
    }
    assert values == {"12,a": [0.75] * 3, "12,b": [0.5] * 2}


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ('val[:7]"', 'val[:6]"', "points.12,a.*evals.test"),
        ('("a", "b")),', '("a", "b"), more=(False,)),', "axes: width, kind"),
        ("seeds=2", "tune_by='val/loss'", "tune_by: val/top1 -> val/loss"),
        ("", "", "study: own -> other"),
    ],
)
def test_another_study_is_refused_once_there_are_results(
    run, own, old, new, difference
):
    run(only=ONE)
    path = own if old else own.with_name("other.py")
    path.write_text(OWN.replace(old, new))
    with pytest.raises(UserError, match=f"with another command .*{difference}"):
        run(path=path, only=ONE)


def test_a_command_that_left_no_result_may_be_mended(run, own, tmp_path, monkeypatch):
    def unfinished(config, folder, shared, *, keep):
        raise UserError("data.split: no such split")

    monkeypatch.setitem(study_config.MEASURES, "train", unfinished)
    planned = study.plan(
        str(own), tmp_path / "work", only=ONE, overrides={"batch_size": 4}
    )
    with pytest.raises(UserError, match="no such split"):
        planned.run()
    report, _ = run(only=ONE)
    assert len(report["points"]) == 1


@pytest.mark.parametrize("file", ["study.json", "command.json"])
def test_a_damaged_file_of_a_study_is_named(run, tmp_path, file):
    run(only=ONE)
    for content in ("", "{", "[]"):
        (tmp_path / "work" / file).write_text(content)
        with pytest.raises(UserError, match=f"{file} is damaged .*remove it and repe"):
            run(only=ONE)
    (tmp_path / "work" / file).unlink()
    assert len(run(only=ONE)[0]["points"]) == 1


def test_what_points_have_in_common_is_run_once(run, own):
    # The widths are trained apart; kinds differ in what is tuned alone.
    own.write_text(OWN.replace("dict(a=(0.02, 0.01), b=(0.03,))", "(0.01,)"))
    report, order = run()
    firsts = {place.split("/")[0] for place, _, _ in order}
    assert firsts == {"12,a", "18,a"}
    a, b, *_ = report["points"]
    assert a["stages"] == b["stages"] and (a["name"], b["name"]) == ("12,a", "12,b")


def test_what_diverges_is_told_and_the_rest_goes_on(run, tmp_path, capsys):
    def scores(place, config):
        if place.startswith("12,a/pretrain"):
            return "the loss is NaN"
        if place.endswith(("finetune/momentum=0.9/seed0", "momentum=0.5/seed1")):
            return "the loss is inf"
        return 0.5

    report, order = run(scores, only={"width": ["12"]})
    lost, kept = report["points"]
    assert lost["stages"]["pretrain"]["runs"] == [] and "top-1" not in lost["scores"]
    assert not any(place.startswith("12,a/finetune") for place, _, _ in order)
    assert kept["stages"]["finetune"]["chosen"] == {"optim.momentum": 0.5}
    assert kept["scores"]["top-1"]["values"] == [0.5]  # Of the other seed.
    assert capsys.readouterr().out.splitlines()[-1] == (
        "diverged, not part of any mean: 12,a, pretrain (the loss is NaN); 12,b, finetune, seed 1 "
        "(the loss is inf); lower learning rates in the study's config, with another "
        "--workdir, may help"
    )
    pages.write_report([tmp_path / "work"], tmp_path / "report")
    told = (tmp_path / "report" / "report.md").read_text()
    assert (
        "Diverged, not part of any mean: 12,a, pretrain; 12,b, finetune, seed 1."
        in told
    )


def test_the_cost_of_a_network_is_measured_once(monkeypatch, tmp_path):
    monkeypatch.setattr(step_cost, "largest_batch", lambda config, folder: 17)
    config = configuration.load(
        "study/cost", {"data.image_size": (32, 32), "model.depth": 1, "batch_size": 2}
    )
    first = step_cost.measure(config, tmp_path / "run", None, keep=True)
    scores = first["final"]["cost"]["params"]
    assert scores["images_per_second"] > 0 and scores["largest_batch"] == 17
    assert scores["gmacs"] == cost.macs_per_image(config.build_model()) / 1e9 > 0
    assert step_cost.measure(config, tmp_path / "run", None, keep=True) == first
    (read,) = results.read_runs([tmp_path / "run"])
    assert read.training == first


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished study of one point by the command; its folder and report."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "own.py").write_text(OWN)
    hosts.finish(hosts.alone("study", *words(folder / "own.py", folder / "work")))
    return folder, json.loads((folder / "work" / "study.json").read_text())


def words(path, workdir):
    only = ["--only=width=12", "--only=kind=a"]
    return [f"--config={path}", *only, f"--workdir={workdir}"]


@pytest.mark.slow
def test_a_study_leaves_what_reports_read_and_trains_nothing_again(
    done, tmp_path, monkeypatch
):
    folder, report = done
    (point,) = report["points"]
    for stage, outcome in point["stages"].items():
        for one in outcome["runs"]:
            told = json.loads(
                (folder / "work" / one["folder"] / "report.json").read_text()
            )
            assert one["final"] == told["final"]
            kept = (folder / "work" / one["folder"] / "checkpoints").exists()
            assert kept == (stage == "pretrain")
    files = pages.write_report([folder / "work"], tmp_path / "report")
    assert any(name.endswith("pretrain_loss.svg") for name in files)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Points of work" in text and "other trial" in text
    monkeypatch.setattr(study.runs.loop, "train", None)  # Not called.
    planned = study.plan(str(folder / "own.py"), folder / "work", only=ONE)
    assert json.loads(json.dumps(planned.run())) == report


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_result(done, tmp_path):
    folder, whole = done
    killed = tmp_path / "work"
    # Once within its first run, once within its last stage.
    for beginning in (
        "pretrain/learning_rate=0.02/seed0",
        "finetune/momentum=0.9/seed0",
    ):
        process = hosts.alone("study", *words(folder / "own.py", killed))
        with process.stdout:
            until = time.monotonic() + 240
            while not (killed / "12,a" / beginning / "metrics.jsonl").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            process.kill()
        process.wait()
    hosts.finish(hosts.alone("study", *words(folder / "own.py", killed)))
    found = json.loads((killed / "study.json").read_text())
    assert without_times(found) == without_times(whole)
