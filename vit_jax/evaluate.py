"""Evaluates weights: python -m vit_jax.evaluate --model=CHECKPOINT --config=CONFIG

CHECKPOINT is a run's workdir, an exported file, a file or folder of timm, Hugging Face
or Google, or hf://owner/name. CONFIG is a file under configs/eval/ with its argument:
configs/eval/fewshot.py:data=FOLDER. Without it the evaluations of a run are repeated, on
its data. The preprocessing is stored with the weights; flags override parts of it. With
--layers, evaluations of features are repeated for the given layers, counted from 0, and
--out has a figure of them (layers.png; extra `plots`).
--json ends with one line that has the scores of each evaluation; with
--config.data.on_error=skip, its "skipped" lists how many damaged images were left out.
With --calibrate, which needs no --config, a temperature, prediction sets (predict
--coverage) and, for several labels per image, a threshold per class are fitted on the
run's validation images and stored in its workdir; the scores are those of its test
images, or of parts of the validation images that were not fitted on.
Exit codes: 0 done, 2 bad input (one line says what).
"""

import argparse
import dataclasses
import functools
import json

from etils import epath

from vit_jax.command_line import cli, job
from vit_jax.command_line.printing import address, masked, print_error
from vit_jax.errors import UserError


def main(flags: argparse.Namespace) -> int:
    """Runs the evaluations given by the flags; returns the exit code."""
    from vit_jax.training import config as configuration
    from vit_jax.weights import checkpoint_folders

    if flags.calibrate is not None:
        return job.run(lambda: calibrate(flags), "", debug=flags.debug)
    if flags.config:
        config = configuration.load_evaluation(flags.config, flags.overrides)
    elif checkpoint_folders.has_checkpoint(flags.model):
        stored = checkpoint_folders.read_metadata(flags.model)["config"]
        config = configuration.evaluation_of_run(stored, flags.overrides)
    else:
        raise UserError(
            f"--config is missing, and --model={masked(flags.model)} is not the workdir of "
            "a run, whose evaluations would be repeated: give a recipe of configs/eval"
        )
    if flags.only_present_classes is not None:
        config = _restrict(config, flags.only_present_classes)
    return job.run(lambda: run(flags, config), "", debug=flags.debug)


def run(flags: argparse.Namespace, config) -> None:
    """Evaluates and prints the scores.

    Args:
      flags: parsed by `parser`.
      config: complete config.
    """
    import jax

    from vit_jax import weights
    from vit_jax.distributed import compilation
    from vit_jax.evaluators import checkpoint, result_tables
    from vit_jax.training import resume_check

    resume_check.check_hosts(config)
    first = jax.process_index() == 0

    def tell(line):
        if first:
            print_error(line)

    if flags.out and first:
        result_tables.prepare(flags.out)  # Fails early, before hours of evaluation.
    if uncached := compilation.enable_cache(config.compilation_cache_dir):
        tell(uncached)
    pretrained, preprocess = weights.open_weights(
        flags.model,
        cli.image_flags(flags),
        use_ema=not flags.no_ema,
        num_heads=flags.num_heads,
        architecture=flags.architecture,
        with_task=True,
        token_merging=flags.token_merging,
        tell=tell,
    )
    config, names_by_layer = _by_layer(flags, config, pretrained)
    check = functools.partial(
        resume_check.check_evaluation_of_hosts, pretrained, preprocess
    )
    scores, confusions, described = checkpoint.evaluate(
        pretrained, preprocess, config, tell, check, views=flags.tta
    )
    if not first:
        return
    shown = result_tables.table(scores, confusions)
    if flags.json:
        shown = json.dumps(checkpoint.summary(config.evals, scores))
    print(shown, flush=True)
    if flags.out:
        report = {
            "kind": "evaluate",
            "model": masked(flags.model),
            "variant": pretrained.options["variant"],
            "config": config.name,
            "preprocess": dataclasses.asdict(preprocess),
            "tta": flags.tta,
            "token_merging": flags.token_merging,
            "evals": described,
            "results": scores,
        }
        names = _write(flags, report, confusions, names_by_layer)
        tell(f"written to {flags.out}: {', '.join(names)}")


def calibrate(flags: argparse.Namespace) -> None:
    """Calibrates the run of a workdir, and prints the scores."""
    from vit_jax.tools import calibrating

    cli.refuse_overrides(flags, "calibrating")
    for name in ("config", "out", "tta", "layers", "token_merging"):
        if value := getattr(flags, name):
            raise UserError(
                f"--{name}={value} with --calibrate, which reads the run's own images: "
                "leave one of them out"
            )
    how = {"use_ema": not flags.no_ema}
    found = calibrating.calibrate(flags.model, flags.calibrate, **how)
    shown = calibrating.lines(found)
    if flags.json:
        shown = [json.dumps({"fitted": found.fitted, "measured": found.measured})]
    for line in shown:
        print(line, flush=True)


def _by_layer(flags: argparse.Namespace, config, pretrained):
    """Returns a config with the layers of --layers, and the names of `by_layer.expand`."""
    if flags.layers is None:
        return config, {}
    from vit_jax import models
    from vit_jax.analysis import by_layer

    if flags.out:
        by_layer.check_drawing()
    model = models.create(**pretrained.options)
    evals, names = by_layer.expand(config.evals, model, flags.layers)
    return dataclasses.replace(config, evals=evals), names


def _write(flags: argparse.Namespace, report, confusions, names_by_layer) -> list[str]:
    """Writes the files requested by --out; returns their names."""
    from vit_jax.evaluators import result_tables

    names = result_tables.write(flags.out, report, confusions)
    if not names_by_layer:
        return names
    from vit_jax.analysis import by_layer
    from vit_jax.analysis.figures import writing

    title = f"{address(flags.model)}, by layer"
    picture = by_layer.draw(title, names_by_layer, report["results"])
    return names + writing.save("layers", picture, epath.Path(flags.out))


def _restrict(config, only_present_classes: bool):
    """Returns a config that sets `only_present_classes` in every classification."""
    from vit_jax.evaluators.classification import ClassificationConfig

    change = {"only_present_classes": only_present_classes}
    evals = {
        name: dataclasses.replace(one, **change)
        for name, one in config.evals.items()
        if isinstance(one, ClassificationConfig)
    }
    if not evals:
        raise UserError(
            "--only_present_classes: the config has no evaluation of kind "
            "'classification': leave the flag out"
        )
    return dataclasses.replace(config, evals={**config.evals, **evals})


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() == "true"


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="EvaluationConfig", recipes=r"eval/\w+")
    add = parser.add_argument
    add(
        "--config",
        default="",
        help="recipe or file, :argument; without it, the evaluations of a run are repeated",
    )
    add("--json", action="store_true", help="print one line of JSON, not a table")
    add(
        "--only_present_classes",
        nargs="?",
        type=_truth,
        const=True,
        metavar="true|false",
        help="whether only the data's classes are possible answers; default: if they "
        "are fewer than the model's",
    )
    add(
        "--calibrate",
        nargs="?",
        const="",
        metavar="SPLIT",
        help="calibrate the probabilities of a run; SPLIT: images to fit on, by default "
        "the validation images",
    )
    cli.add_layers_flag(
        parser, "score features of these layers with k-NN, probe and few-shot"
    )
    cli.add_tta_flag(parser)
    cli.add_token_merging_flag(parser)
    cli.add_patch_flags(parser)
    add("--out", default="", help="folder for evaluate.json and figures")
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
