"""The training run, from config to report, in the order in which things happen."""

import contextlib
import dataclasses
import os
import time

import jax

from vit_jax.data import fingerprint, pipeline, sources
from vit_jax.evaluation.suite import Suite
from vit_jax.parallel import compilation_cache, distributed
from vit_jax.parallel import mesh as meshes
from vit_jax.printing import masked
from vit_jax.report import result, tracing
from vit_jax.report.compilations import Compilations
from vit_jax.report.startup import Startup
from vit_jax.training import (
    checkpoint,
    efficiency,
    guards,
    lock,
    nearby,
    same_run,
    starting,
    watchdog,
)
from vit_jax.training import program as programs
from vit_jax.training.ahead import Ahead
from vit_jax.training.config import TrainConfig
from vit_jax.training.logbook import Logbook
from vit_jax.training.shared import Shared


def train(
    config: TrainConfig,
    workdir: str | os.PathLike,
    startup: Startup | None = None,
    shared: Shared | None = None,
) -> dict:
    """Trains, evaluates and reports; goes on where `workdir` holds a checkpoint.

    Args:
      config: complete config, from `vit_jax.config.load`.
      workdir: folder for checkpoints, metrics and the report.
      startup: holds what was done before this call.
      shared: between the runs of a sweep; the result is the same without it.

    Returns:
      What `report.json` holds: config, commit, devices, steps, wall_seconds, compute,
      images_per_second, final ({evaluation: {"raw": {"top1": ...}, "ema": ...}}),
      params_sha256 and more.

    Raises:
      UserError: something the user can mend; see README, "When it stops".
      Preempted: SIGTERM or SIGHUP came, or a loader process was killed, and the state
        is saved.
      Interrupted: Ctrl-C, or the stop button of a notebook, and the state is saved; a
        second one raises KeyboardInterrupt at once.
    """
    watch = watchdog.Watchdog(config.stall_timeout)
    with (
        guards.clear_errors(config),
        lock.held(workdir),
        guards.Preemption() as preemption,
        watch,
    ):
        return _train(config, workdir, preemption, watch, startup or Startup(), shared)


def _train(config, workdir, preemption, watch, startup, shared) -> dict:
    began, commit = time.perf_counter(), result.commit()  # Of the code that runs.
    data, every = config.data, config.every
    first_process = jax.process_index() == 0
    jax.config.update("jax_debug_nans", config.debug_nans)
    jax.config.update("jax_debug_infs", config.debug_nans)
    uncached = compilation_cache.enable(config.compilation_cache)

    same_run.check_hosts(config)

    # Mesh.
    mesh = meshes.create(dataclasses.asdict(config.mesh))
    part, parts = meshes.share(mesh)  # Of every batch, to load here ...
    alike = jax.process_count() // parts  # ... and in as many processes.
    same_run.check_workdir(workdir, config)
    startup.done("devices")

    # Data.
    source = sources.open_source(data, data.split)
    startup.done("data")
    watch.beat("opening the data")

    # Model, optimiser, step and evaluations.
    build, evaluations = programs.build, Suite
    if shared:
        build, evaluations = shared.program, shared.suite
    program = build(config, mesh, len(source))
    total, epoch = program.total, program.epoch
    tracing.check(config.profile, total)
    suite = evaluations(
        program.model,
        config.evals,
        data,
        config.batch_size,
        mesh,
        program.shardings.params,
    )

    def due(what, step):
        if what == "evaluate":
            return suite.due(step, every, total=total, epoch=epoch)
        epochs = getattr(every, f"{what}_epochs")
        intervals = getattr(every, what), round(epochs * epoch)
        return step == total or any(i and step % i == 0 for i in intervals)

    with (
        checkpoint.Checkpointer(workdir, config, source) as checkpoints,
        Compilations() as compilations,
        contextlib.ExitStack() as open_files,
    ):
        read = {"train": source} | suite.sources()
        same_run.check_data_of_hosts(read, checkpoints.latest)
        compiling = Ahead(program, debug_nans=config.debug_nans)
        startup.done("trace")

        # State: created or restored in place, each part on the devices that hold it.
        near = nearby.Nearby(config, workdir, source, program.shapes, program.shardings)
        state, start, *before, notes = starting.begin(
            config, program, checkpoints, near
        )

        # Reports.
        book = open_files.enter_context(
            Logbook(
                config,
                workdir,
                program,
                start,
                alike=alike,
                startup=startup,
                compilations=compilations,
            )
        )
        book.head(len(source))
        trace = tracing.Trace(config.profile, workdir, start, active=first_process)
        unchecked = fingerprint.unchecked(checkpoints.data)
        for note in filter(None, (*notes, unchecked, uncached, trace.note)):
            book.say(note)

        def spent():
            """Returns seconds, and seconds times devices, of this and former starts."""
            own = time.perf_counter() - began
            return before[0] + own, before[1] + own * jax.device_count()

        def settle(step, metrics):
            """Waits for a step and looks at its numbers."""
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            guards.check_finite(step, values, checkpoints)
            book.done(step)
            watch.beat(f"step {step}", step=True)
            return values

        def leave(step):
            """Saves and ends the run before its time."""
            why = preemption.why()
            if step and step != checkpoints.latest:
                checkpoints.save(step, program.to_disk(state), *spent())
                checkpoints.demand(step, why)
            saved = (
                f"step {step} of {total} is saved" if step else "nothing to save yet"
            )
            raise guards.ended(why, saved, workdir, data)

        def evaluate(step):
            """Scores the raw and the averaged parameters; leaves if asked meanwhile."""
            params = {"raw": state.params}
            if state.average is not None:
                params["ema"] = state.average

            def stop():
                watch.beat(f"a part of the evaluation of step {step}")
                return preemption.reached()

            scores = suite.run(params, stop, due("evaluate", step))
            if scores is None:
                leave(step)
            book.scores(step, scores, suite.confusions)
            return scores

        # A start that was ended in an evaluation owes it still.
        final, skipped = {}, 0
        owed = due("evaluate", start) if 0 < start < total else ()
        if not all(book.has_scores(start, name) for name in owed):
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
        with batches, jax.transfer_guard(guard), book.wait, trace:
            for step, batch in enumerate(book.wait.over(batches), start + 1):
                book.laps.mark("input")
                skipped += int(batch.pop("skipped").sum())
                if step == 1:
                    book.images("train/images", batch["image"], 0)
                batch = meshes.to_devices(batch, mesh)
                book.laps.mark("host-to-device")
                with trace.around(step):
                    state, metrics = train_step(state, batch)
                book.wait.began(metrics)
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
                book.laps.mark("device step")
                if due("log", step):
                    book.log(
                        step,
                        values,
                        skipped=skipped,
                        failed=checkpoints.failures,
                        read_ahead=batches.read_ahead,
                    )
                    book.laps.mark("logging")
                if ending:
                    leave(step)
                with book.pause():
                    if due("checkpoint", step):
                        checkpoints.save(step, program.to_disk(state), *spent())
                        watch.beat(f"waiting for a save at step {step}")
                        book.laps.mark("checkpoint")
                    elif near.due(step):
                        near.save(step, state, *spent())
                        book.laps.mark("checkpoint")
                    if due("evaluate", step):
                        final = evaluate(step)
                        book.laps.mark("evaluation")
                    for line in trace.after(step, metrics), book.laps.end(step):
                        if line:
                            book.say(line)
        if checkpoints.wait():
            # Once more, some time later.
            checkpoints.save(total, program.to_disk(state), *spent())
        watch.beat("the save of the last step")

        # Report.
        skipped = int(distributed.gather(skipped=skipped)["skipped"].sum()) // alike
        report = {
            "config": config.name,
            "commit": commit,
            "devices": jax.device_count(),
            "device_kind": jax.devices()[0].device_kind,
            "steps": total,
            "variant": config.model.variant,
            "dataset": data.name,
            "examples": len(source),
            "init": masked(config.init),
            "wall_seconds": round(spent()[0], 3),
            "compute": efficiency.compute(
                program.model, total * config.batch_size, spent()[1]
            ),
            "startup": {k: round(v, 3) for k, v in startup.seconds.items()},
            "compile_seconds": round(compilations.seconds, 3),
            "images_per_second": round(book.images_per_second, 3) or None,
            "skipped_images": skipped,
            "class_names": list(source.class_names),
            "final": final,
            "params_sha256": result.params_sha256(program.to_disk(state).params),
        }
        if start >= total:
            book.say(f"this run is finished ({total} steps): evaluating only")
            scores = evaluate(start)
            report = report | (result.read(workdir) or {})
            report["final"] = report["final"] | scores
        if skipped:
            book.say(f"skipped damaged images {skipped} times (data.on_error=skip)")
        book.say("\n" + result.table(report))
        if first_process:
            result.write(workdir, report)
        checkpoints.demand(total, "the training is done and reported")
        near.forget()
    return report
