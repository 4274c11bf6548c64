"""The training run, from config to report, in the order in which things happen."""

import functools
import json
import os
import time

import jax
from clu import parameter_overview
from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax import models
from vit_jax.data import ops, pipeline, sources
from vit_jax.evaluation import classification
from vit_jax.parallel import mesh as meshes
from vit_jax.report import result
from vit_jax.report.progress import Progress
from vit_jax.report.writer import MetricWriter
from vit_jax.training import checkpoint, guards, optim
from vit_jax.training import state as states
from vit_jax.training import step as steps
from vit_jax.weights import start as start_weights


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict:
    """Trains, evaluates and reports; goes on where `workdir` holds a checkpoint.

    Args:
      config: complete config, from `vit_jax.config.load`.
      workdir: folder for checkpoints, metrics and the report.

    Returns:
      What `report.json` holds: config, commit, devices, steps, wall_seconds,
      images_per_second, final ({evaluation: {"raw": {"top1": ...}, "ema": ...}}),
      params_sha256 and more.

    Raises:
      UserError: something the user can mend; see README, "When it stops".
      guards.Preempted: SIGTERM came and the state is saved.
    """
    began = time.perf_counter()
    data, every = config.data, config.every
    first_process = jax.process_index() == 0
    processes = {
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    jax.config.update("jax_debug_nans", config.debug_nans)
    jax.config.update("jax_debug_infs", config.debug_nans)

    # Mesh.
    mesh = meshes.create(config.mesh.to_dict())
    meshes.check_batch(config.batch_size, config.optim.accumulate, mesh)
    checkpoint.check_workdir(workdir, config)

    # Data.
    source = sources.open_source(data, data.split)
    eval_sources = {
        name: sources.open_source(data, split) for name, split in config.evals.items()
    }
    device_ops = ops.parse_train(data.ops, data.image_size).device
    total = configuration.total_steps(config, len(source))

    # Model.
    model = models.create(
        **config.model,
        classes=data.classes,
        image_size=data.image_size,
        channels=data.channels,
    )
    init = functools.partial(states.init_params, model, config.seed)
    expected = jax.eval_shape(init)

    # Optimiser, and the two jitted steps.
    rate = optim.schedule(config, total, len(source) / config.batch_size)
    tx = optim.optimizer(config, expected, rate)
    train_step = steps.build(model, tx, rate, device_ops, config, mesh)
    eval_step = classification.build(model, config, mesh)

    with (
        guards.clear_errors(config),
        checkpoint.Checkpointer(workdir, config, source.class_names) as checkpoints,
        guards.Preemption() as preemption,
    ):
        # State: created or restored in place, on every device that holds it.
        create = functools.partial(states.create, tx=tx, config=config)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=meshes.replicated(mesh)
            ),
            jax.eval_shape(create, expected),
        )
        place = functools.partial(jax.jit, out_shardings=meshes.replicated(mesh))
        notes, trained_seconds = [], 0.0
        if checkpoints.latest is not None:
            state, trained_seconds = checkpoints.restore(like)
            notes = [f"resume: step {checkpoints.latest} of {workdir}"]
        elif config.init:
            params, notes = start_weights.load(
                config.init,
                expected,
                grid=model.grid,
                head=config.init_head,
                average=config.init_average,
            )
            state = place(create)(jax.device_put(params, meshes.replicated(mesh)))
        else:
            state = place(lambda: create(init()))()
        start = checkpoints.latest or 0

        # Reports.
        progress = Progress(
            start, total, config.batch_size, jax.device_count(), active=first_process
        )
        writer = MetricWriter(workdir, start, active=first_process)
        settings = json.dumps(configuration.to_json(config), indent=2)
        writer.text("config", settings)
        writer.text(
            "parameters",
            parameter_overview.get_parameter_overview(expected, include_stats=False),
        )
        count = sum(x.size for x in jax.tree.leaves(expected))
        progress.say(
            f"{config.name}: {config.model.variant}, {count:,} parameters, "
            f"{len(source):,} images, {total:,} steps of {config.batch_size} on "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}; workdir {workdir}"
        )
        for note in notes:
            progress.say(note)

        def seconds():
            return trained_seconds + time.perf_counter() - began

        def save(step):
            checkpoints.save(step, state, seconds())

        def settle(step, metrics):
            """Waits for a step and looks at its numbers."""
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            guards.check_finite(step, values, checkpoints.latest)
            progress.done(step)
            return values

        def evaluate(step):
            """Scores all evaluations; None if asked to end meanwhile."""
            params = {"raw": state.params}
            if state.average is not None:
                params["ema"] = state.average
            scores = {}
            for name, eval_source in eval_sources.items():
                with pipeline.eval_batches(
                    eval_source, data, batch_size=config.batch_size, **processes
                ) as batches:
                    scores[name] = classification.evaluate(
                        eval_step, params, batches, mesh, lambda: preemption.asked
                    )
                if scores[name] is None:
                    return None
            flat = {
                f"{name}/{kind}/{metric}": value
                for name, kinds in scores.items()
                for kind, values in kinds.items()
                for metric, value in values.items()
            }
            if flat and not writer.has(step, "/raw/"):
                writer.scalars(step, flat)
            tops = [f"{k[:-5]} {v:.2%}" for k, v in flat.items() if k.endswith("/top1")]
            progress.say(f"step {step}/{total}  top-1: {', '.join(tops)}")
            return scores

        def leave(step):
            """Saves and ends, as SIGTERM asks."""
            save(step)
            checkpoints.wait()
            writer.close()
            raise guards.Preempted(
                f"SIGTERM: step {step} of {total} is saved in {workdir}; the same "
                "command goes on from there"
            )

        # A start that was ended in an evaluation owes it still.
        final, skipped = None, 0
        due_before = (
            start and every.evaluate and start % every.evaluate == 0 and config.evals
        )
        owed = due_before and start < total and not writer.has(start, "/raw/")
        if owed and evaluate(start) is None:
            leave(start)

        batches = pipeline.train_batches(
            source,
            data,
            batch_size=config.batch_size,
            seed=config.seed,
            start=start,
            stop=total,
            **processes,
        )
        waiting = None  # The last step and its metrics, while the device is at it.
        # debug_nans runs a failed step again, operation by operation, which transfers.
        guard = "allow" if config.debug_nans else "disallow"
        with batches, jax.transfer_guard(guard):
            for step, batch in enumerate(batches, start + 1):
                skipped += int(batch.pop("skipped").sum())
                if step == 1:
                    writer.images("train/images", batch["image"], 0)
                state, metrics = train_step(state, meshes.to_devices(batch, mesh))
                if waiting:
                    settle(*waiting)
                waiting = (step, metrics)

                def due(interval, step=step):
                    return bool(interval) and step % interval == 0 or step == total

                ending = preemption.reached(step)
                if (
                    due(every.log)
                    or due(every.evaluate)
                    or due(every.checkpoint)
                    or ending
                ):
                    values, waiting = settle(*waiting), None
                if due(every.log):
                    speed = progress.log(step, values["loss"], values["rate"])
                    values |= speed | ({"skipped": skipped} if skipped else {})
                    writer.scalars(step, {f"train/{k}": v for k, v in values.items()})
                if ending:
                    leave(step)
                progress.pause()
                if due(every.checkpoint):
                    save(step)
                if due(every.evaluate):
                    final = evaluate(step)
                    if final is None:
                        leave(step)
                progress.resume()

        if start == total:
            progress.say(f"this run is finished ({total} steps): evaluating only")
            final = evaluate(total)
            if final is None:
                leave(total)
        checkpoints.wait()

        # Report.
        if skipped:
            progress.say(f"skipped damaged images {skipped} times (data.on_error=skip)")
        report = {
            "config": config.name,
            "commit": result.commit(),
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "steps": total,
            "wall_seconds": round(seconds(), 3),
            "images_per_second": round(progress.images_per_second, 3),
            "skipped_images": skipped,
            "class_names": list(source.class_names),
        }
        if start == total:
            report = (result.read(workdir) or report) | {"steps": total}
        report["final"] = final
        report["params_sha256"] = result.params_sha256(state.params)
        if first_process:
            result.write(workdir, report)
        writer.close()
        progress.say("\n" + result.table(report))
    return report
