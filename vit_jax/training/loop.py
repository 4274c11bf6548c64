"""The training run, from config to report, in the order in which things happen."""

import contextlib
import json
import os
import time

import jax
from clu import parameter_overview
from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax.data import pipeline, sources
from vit_jax.errors import Preempted
from vit_jax.evaluation.suite import Suite
from vit_jax.parallel import compilation_cache, distributed
from vit_jax.parallel import mesh as meshes
from vit_jax.report import result
from vit_jax.report.compilations import Compilations
from vit_jax.report.laps import Laps
from vit_jax.report.progress import Progress
from vit_jax.report.startup import Startup
from vit_jax.report.tracing import Trace
from vit_jax.report.waiting import InputWait
from vit_jax.report.writer import MetricWriter
from vit_jax.training import checkpoint, efficiency, guards, nearby, same_run, watchdog
from vit_jax.training import program as programs
from vit_jax.training.ahead import Ahead
from vit_jax.weights import start as start_weights


def train(
    config: ConfigDict, workdir: str | os.PathLike, startup: Startup | None = None
) -> dict:
    """Trains, evaluates and reports; goes on where `workdir` holds a checkpoint.

    Args:
      config: complete config, from `vit_jax.config.load`.
      workdir: folder for checkpoints, metrics and the report.
      startup: holds what was done before this call.

    Returns:
      What `report.json` holds: config, commit, devices, steps, wall_seconds,
      images_per_second, final ({evaluation: {"raw": {"top1": ...}, "ema": ...}}),
      params_sha256 and more.

    Raises:
      UserError: something the user can mend; see README, "When it stops".
      Preempted: SIGTERM came and the state is saved.
    """
    watch = watchdog.Watchdog(config.stall_timeout)
    with guards.clear_errors(config), guards.Preemption() as preemption, watch:
        return _train(config, workdir, preemption, watch, startup or Startup())


def _train(config, workdir, preemption, watch, startup) -> dict:
    began, commit = time.perf_counter(), result.commit()  # Of the code that runs.
    data, every = config.data, config.every
    first_process = jax.process_index() == 0
    jax.config.update("jax_debug_nans", config.debug_nans)
    jax.config.update("jax_debug_infs", config.debug_nans)
    uncached = compilation_cache.enable(config.compilation_cache)

    # Mesh.
    mesh = meshes.create(config.mesh.to_dict())
    part, parts = meshes.share(mesh)  # Of every batch, to load here ...
    alike = jax.process_count() // parts  # ... and in as many processes.
    same_run.check_workdir(workdir, config)
    startup.done("devices")

    # Data.
    source = sources.open_source(data, data.split)
    startup.done("data")
    watch.beat("opening the data")

    # Model, optimiser, step and evaluations.
    program = programs.build(config, mesh, len(source))
    total, epoch = program.total, program.epoch
    suite = Suite(program.model, config, mesh, program.shardings.params)

    def due(what, step):
        intervals = every[what], round(every[f"{what}_epochs"] * epoch)
        return step == total or any(i and step % i == 0 for i in intervals)

    with (
        checkpoint.Checkpointer(workdir, config, source) as checkpoints,
        Compilations() as compilations,
        contextlib.ExitStack() as open_files,
    ):
        compiling = Ahead(program, debug_nans=config.debug_nans)
        startup.done("trace")

        # State: created or restored in place, each part on the devices that hold it.
        near = nearby.Nearby(config, workdir, source, program.shapes, program.shardings)
        latest = checkpoints.latest or 0
        state, start, trained_seconds, notes = near.restore(newer_than=latest)
        if state is None and latest:
            state, start, trained_seconds, more = checkpoints.restore(
                program.disk_shapes, program.disk_shardings
            )
            state, notes = program.from_disk(state), [*notes, *more]
        elif state is None and config.init:
            params, notes = start_weights.load(config, program.model, program.init)
            state = program.start_from(params)
        elif state is None:
            state = program.start()

        # Reports.
        progress = Progress(
            start,
            total,
            config.batch_size,
            jax.device_count(),
            active=first_process,
            ideal=efficiency.ideal_seconds(program.model, jax.devices()[0].device_kind),
        )
        writer = open_files.enter_context(
            MetricWriter(workdir, start, active=first_process)
        )
        writer.text("config", json.dumps(configuration.to_json(config), indent=2))
        writer.text(
            "parameters",
            parameter_overview.get_parameter_overview(
                program.disk_shapes.params, include_stats=False
            ),
        )
        count = sum(x.size for x in jax.tree.leaves(program.shapes.params))
        progress.say(
            f"{config.name}: {config.model.variant}, {count:,} parameters, "
            f"{len(source):,} images, {total:,} steps of {config.batch_size} on "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}; workdir {workdir}"
        )
        trace = Trace(config.profile, workdir, start, total, active=first_process)
        for note in filter(None, (*notes, uncached, trace.note)):
            progress.say(note)

        def seconds():
            return trained_seconds + time.perf_counter() - began

        wait = InputWait()

        def settle(step, metrics):
            """Waits for a step and looks at its numbers."""
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            guards.check_finite(step, values, checkpoints)
            progress.done(step, wait.seconds)
            watch.beat(f"step {step}", step=True)
            if step == start + 1:
                startup.done("first step")
                progress.say(f"{startup.line()}; {compilations.line()}")
            return values

        def leave(step):
            """Saves and ends, as SIGTERM asks."""
            if step and step != checkpoints.latest:
                checkpoints.save(step, program.to_disk(state), seconds())
                checkpoints.demand(step, "SIGTERM")
            saved = (
                f"step {step} of {total} is saved" if step else "nothing to save yet"
            )
            raise Preempted(
                f"SIGTERM: {saved} in {workdir}; the same command goes on from there"
            )

        def evaluate(step):
            """Scores the raw and the averaged parameters; leaves if asked meanwhile."""
            params = {"raw": state.params}
            if state.average is not None:
                params["ema"] = state.average

            def stop():
                watch.beat(f"a part of the evaluation of step {step}")
                return preemption.reached()

            scores = suite.run(params, stop)
            if scores is None:
                leave(step)
            for name, kinds in scores.items():
                if not writer.has(step, f"{name}/raw/"):
                    writer.scalars(step, result.flatten({name: kinds}))
            progress.say(f"step {step}/{total}  {result.line(scores)}")
            return scores

        # A start that was ended in an evaluation owes it still.
        final, skipped, advised = {}, 0, False
        owed = start and start < total and due("evaluate", start)
        if owed and not all(writer.has(start, f"{n}/raw/") for n in config.evals):
            evaluate(start)

        # Training.
        batches = pipeline.train_batches(
            source,
            data,
            batch_size=config.batch_size,
            seed=config.seed,
            start=start,
            stop=max(start, total),
            process_index=part,
            process_count=parts,
        )
        if preemption.reached():  # Before the first step, which compiles, begins.
            leave(start)
        startup.done("init")
        watch.beat("making or restoring the state")
        train_step = compiling.step() if start < total else None
        startup.done("compile")
        watch.beat("compilation")
        waiting = None  # The last step and its metrics, while the device is at it.
        # debug_nans runs a failed step again, operation by operation, which transfers.
        guard = "allow" if config.debug_nans else "disallow"
        laps = Laps(config.slow_step, jax.process_index())
        with batches, jax.transfer_guard(guard), wait, trace:
            for step, batch in enumerate(wait.over(batches), start + 1):
                laps.mark("input")
                skipped += int(batch.pop("skipped").sum())
                if step == 1:
                    writer.images("train/images", batch["image"], 0)
                batch = meshes.to_devices(batch, mesh)
                laps.mark("host-to-device")
                with trace.around(step):
                    state, metrics = train_step(state, batch)
                wait.began(metrics)
                if waiting:
                    settle(*waiting)
                waiting = (step, metrics)

                ending = preemption.reached()
                if (
                    ending
                    or near.due(step)
                    or any(map(due, ("log", "evaluate", "checkpoint"), [step] * 3))
                ):
                    values, waiting = settle(*waiting), None
                laps.mark("device step")
                if due("log", step):
                    # The slowest input holds all up.
                    own = distributed.gather(skipped=skipped, waited=wait.seconds)
                    waited, lost = float(own["waited"].max()), int(own["skipped"].sum())
                    lost //= alike
                    memory, own = efficiency.memory(), laps.report()
                    speed = progress.log(
                        step,
                        values["loss"],
                        waited,
                        own["checkpoint_stall"],
                        memory.get("memory_gib", 0.0),
                    )
                    values |= speed | own | memory | startup.news()
                    values["compile_seconds"] = compilations.seconds
                    values |= {"skipped": lost} if lost else {}
                    failed = checkpoints.failures
                    values |= {"failed_saves": failed} if failed else {}
                    if batches.read_ahead and not advised:
                        advised = progress.advise(speed, data)
                    writer.scalars(step, {f"train/{k}": v for k, v in values.items()})
                    laps.mark("logging")
                if ending:
                    leave(step)
                progress.pause()
                if due("checkpoint", step):
                    checkpoints.save(step, program.to_disk(state), seconds())
                    watch.beat(f"waiting for a save at step {step}")
                    laps.mark("checkpoint")
                elif near.due(step):
                    near.save(step, state, seconds())
                    laps.mark("checkpoint")
                if due("evaluate", step):
                    final = evaluate(step)
                    laps.mark("evaluation")
                for line in filter(None, (trace.after(step, metrics), laps.end(step))):
                    progress.say(line)
                progress.resume()
        if checkpoints.wait():
            # Once more, some time later.
            checkpoints.save(total, program.to_disk(state), seconds())
        watch.beat("the save of the last step")

        # Report.
        skipped = int(distributed.gather(skipped=skipped)["skipped"].sum()) // alike
        report = {
            "config": config.name,
            "commit": commit,
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "steps": total,
            "wall_seconds": round(seconds(), 3),
            "startup": {k: round(v, 3) for k, v in startup.seconds.items()},
            "compile_seconds": round(compilations.seconds, 3),
            "images_per_second": round(progress.images_per_second, 3) or None,
            "skipped_images": skipped,
            "class_names": list(source.class_names),
            "final": final,
            "params_sha256": result.params_sha256(program.to_disk(state).params),
        }
        if start >= total:
            progress.say(f"this run is finished ({total} steps): evaluating only")
            scores = evaluate(start)
            report = report | (result.read(workdir) or {})
            report["final"] = report["final"] | scores
        if skipped:
            progress.say(f"skipped damaged images {skipped} times (data.on_error=skip)")
        progress.say("\n" + result.table(report))
        if first_process:
            result.write(workdir, report)
        checkpoints.demand(total, "the training is done and reported")
        near.forget()
    return report
