"""`vit_jax.finetune` on numbers: from a table to predictions in their units."""

import json
import re

import numpy as np
import pytest
from helpers import ROOT, run_command, write_weights
from PIL import Image

import vit_jax
from vit_jax import weights
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.weights import export

COUNT = 130


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a table of images that are brighter the older, and weights."""
    root = tmp_path_factory.mktemp("numbers")
    write_weights(
        root / "weights.safetensors",
        "abcde",
        Preprocess(image_size=(16, 16)),
        variant="Ti/8",
        num_classes=5,
        image_size=(16, 16),
    )
    rng, lines = np.random.default_rng(0), ["path,age,kg"]
    for i in range(COUNT):
        age, kg = rng.uniform(10, 90), rng.uniform(1, 2)
        noise = rng.normal(0, 6, (16, 16, 3))
        image = (2.5 * age + noise).clip(0, 255).astype(np.uint8)
        image[:8] = image[:8] // kg
        Image.fromarray(image).save(root / f"{i}.png")
        lines.append(f"{i}.png,{age:.2f},{'' if i % 5 else round(kg, 3)}")
    (root / "both.csv").write_text("\n".join(lines))
    ages = [",".join(line.split(",")[:2]) for line in lines]
    (root / "ages.csv").write_text("\n".join(ages))
    split = ["split", *("val" if i % 5 else "train" for i in range(COUNT))]
    rows = (f"{line},{name}" for line, name in zip(lines, split, strict=True))
    (root / "gap.csv").write_text("\n".join(rows))
    return root


KEYS = ("--minutes=0", "--config.epochs=25", "--config.task.unit=years")


def command(place, table, *words):
    model = f"--model={place / 'weights.safetensors'}"
    return run_command("finetune", [str(place / table), *words, model])


@pytest.fixture(scope="module")
def run(place):
    """Returns the workdir of a run on the only column of a table."""
    workdir = place / "run"
    assert command(place, "ages.csv", f"--workdir={workdir}", *KEYS) == 0
    return workdir


def test_the_only_column_of_numbers_is_learnt(run, capsys):
    config = json.loads((run / "finetune.json").read_text())
    assert (config["data"]["target_key"], config["data"]["num_classes"]) == ("age", 0)
    report = json.loads((run / "report.json").read_text())
    scores = report["final"]["val"]["ema"]
    assert scores["r2"] > 0.8
    page = (run / "report.html").read_text()
    for text in ("Predicted and true values", "Errors by age", "The largest errors"):
        assert text in page
    assert "true age in years" in page and f"R2 {scores['r2']:.3f}" in page
    assert len(re.findall(r'src="data:image/jpeg;base64,', page)) >= 12


def test_the_same_command_gives_the_score_in_words(place, run, capsys):
    assert command(place, "ages.csv", f"--workdir={run}", *KEYS) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"mean absolute error [\d.]+ years \(95 % interval [\d.]+ to [\d.]+\); R2 0\.\d+ "
        "on 26 images of val",
        out,
    )
    assert re.search(r"worst:     .*\d\.png: [\d.]+ years, predicted [\d.]+", out)


def test_predictions_have_a_unit_and_an_interval(place, run, capsys):
    images = [str(place / f"{i}.png") for i in range(3)]
    assert not run_command("predict", [f"--model={run}", "--json", *images])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ages = [line["predictions"][0] for line in lines]
    margins = json.loads((run / "margins.json").read_text())["margins"]
    for one in ages:
        assert (one["target"], one["unit"], one["sd"]) == ("age", "years", None)
        assert one["high"] - one["value"] == pytest.approx(margins[0])
    assert not run_command("predict", [f"--model={run}", "--tta=flip", *images])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "value", "target"]
    assert re.search(r"0\.png +[\d.]+ years \([\d.]+ to [\d.]+\)  age$", rows[0])
    model = vit_jax.load_model(run, tell=lambda line: None)
    assert model.targets.names == ("age",) and "age" in repr(model)
    values = [one.value for (one,) in model.predict(images)]
    assert values == pytest.approx([one["value"] for one in ages], rel=1e-4)
    with pytest.raises(UserError, match="--threshold=0.4 is about classes"):
        run_command("predict", [f"--model={run}", "--threshold=0.4", *images])


def test_recipes_of_evaluations_score_numbers(place, run, capsys):
    table = place / "ages.csv"

    def evaluate(config, *words):
        words = [f"--model={run}", f"--config={config}", "--json", *words]
        assert not run_command("evaluate", words)
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    path = "--config.data.image_key=path"
    recipes = f"{ROOT}/configs/eval"
    found = evaluate(f"{recipes}/regression.py:data={table},split=all", path)["test"]
    assert found["examples"] == COUNT and found["r2"] > 0.8
    assert 0.8 < found["coverage"] <= 1
    parts = "train=all[:80%],test=all[80%:]"
    config = f"{recipes}/ridge.py:data={table},target=age,{parts}"
    found = evaluate(config, path)["ridge"]
    assert found["examples"] == 26 and found["r2"] > 0.8 and found["l2"] > 0
    with pytest.raises(UserError, match="evals.test needs labels.*kind='regression'"):
        evaluate(f"{recipes}/classification.py:data={table},split=all", path)


def test_exports_have_units_and_intervals(place, run, tmp_path):
    import jax

    pretrained = weights.open_pretrained(str(run), with_task=True)
    export.export(pretrained, "stablehlo", tmp_path / "program")
    image = np.asarray(Image.open(place / "0.png"))[None]
    program = (tmp_path / "program" / "model.stablehlo").read_bytes()
    outputs = jax.export.deserialize(bytearray(program)).call(image)
    model = vit_jax.load_model(run, tell=lambda line: None)
    ((one,),) = model.predict(image)
    for name, value in (("values", one.value), ("low", one.low), ("high", one.high)):
        np.testing.assert_allclose(outputs[name], [[value]], rtol=5e-3)
    about = json.loads((tmp_path / "program" / "preprocess.json").read_text())
    assert about["targets"]["units"] == ["years"] and "values" in about["outputs"]
    _, notes = export.export(pretrained, "timm", tmp_path / "timm")
    assert "outputs of the classifier: age in years" in notes
    other = vit_jax.load_model(tmp_path / "timm", tell=lambda line: None)
    assert other(image)[0, 0] == pytest.approx(one.value, rel=5e-3)


def test_several_columns_from_python_with_missing_numbers(place, tmp_path):
    result = vit_jax.finetune(
        place / "both.csv",
        tmp_path / "run",
        model=place / "weights.safetensors",
        target=["age", "kg"],
        minutes=0,
        tell=lambda line: None,
        **{"epochs": 2, "task.unit": "years,kg", "task.loss": "gaussian"},
    )
    assert result.metric == "mae" and result.interval[0] < result.score
    assert result.scores["values/kg"] < result.scores["values/age"] == 26
    line = result.kind.headline(result)
    assert re.search(r"age [\d.]+ years .*; kg [\d.]+ kg .*\(mean of 2 targets\)", line)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "true kg in kg" in page and "kg unknown" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["both.csv"], "age, kg: give the numbers to predict with --target"),
        (["gap.csv", "--target=age,kg"], r"no image of the split .* in 'kg'"),
        (["both.csv", "--target=path"], "row 1 has '0.png' in 'path'"),
        (["both.csv", "--target=size"], "data.target_key='size'.*path, age, kg"),
        (
            ["ages.csv", "--config.task.name=classification"],
            "task.name='classification' does not learn from numbers",
        ),
    ],
)
def test_wrong_columns_are_refused(place, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        command(place, *words, f"--workdir={tmp_path}", "--minutes=0")
