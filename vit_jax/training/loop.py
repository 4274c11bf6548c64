"""The training run, from config to report, in the order in which things happen."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence

import jax

from vit_jax.data import fingerprint, pipeline
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import start as hosts
from vit_jax.errors import UserError
from vit_jax.evaluators.suite import Suite
from vit_jax.printing import masked
from vit_jax.training import guards, lock, resume_check, run_report, timers
from vit_jax.training.best_checkpoint import BestCheckpoint
from vit_jax.training.callbacks import Callback, Callbacks
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.config import TrainConfig
from vit_jax.training.local_checkpoint import LocalCheckpointer
from vit_jax.training.metric_logger import MetricLogger
from vit_jax.training.periodic_actions import (
    Evaluations,
    Interval,
    PendingMetrics,
)
from vit_jax.training.resume_check import Restored
from vit_jax.training.sweep import SweepCache
from vit_jax.training.timers import CompilationCounter, RunClock, StartupTimer
from vit_jax.training.train_state import TrainState
from vit_jax.training.train_step import (
    BackgroundCompilation,
    TrainSetup,
    build_train_setup,
)
from vit_jax.training.watchdog import Watchdog
from vit_jax.weights import workdir as layout
from vit_jax.weights.load import load_initial


def train(
    config: TrainConfig,
    workdir: str | os.PathLike,
    startup: StartupTimer | None = None,
    sweep: SweepCache | None = None,
    callbacks: Iterable[Callback] = (),
) -> dict:
    """Trains, evaluates and reports; resumes if `workdir` holds a checkpoint.

    Args:
      config: complete config, from `vit_jax.training.config.load`.
      workdir: folder for checkpoints, metrics and the report.
      startup: holds the phases before this call.
      sweep: shared by the runs of a sweep; the result is the same without it.
      callbacks: told of what happens.

    Returns:
      The content of `report.json`: config, commit, devices, steps, wall_seconds,
      compute, images_per_second, final ({evaluation: {"params": {"top1": ...}, "ema":
      ...}}), params_sha256 and more.

    Raises:
      UserError: bad input or full memory or disk; see docs/resume.md.
      Preempted: SIGTERM or SIGHUP came, or a loader process was killed, and the state
        is saved.
      Interrupted: Ctrl-C, or the stop button of a notebook, and the state is saved; a
        second one raises KeyboardInterrupt at once.
    """
    watchdog = Watchdog(config.stall_timeout)
    with (
        guards.clear_errors(config),
        lock.held(workdir),
        guards.Preemption() as preemption,
        watchdog,
        contextlib.ExitStack() as stack,
    ):
        return _train(
            config,
            workdir,
            preemption,
            watchdog,
            startup or StartupTimer(),
            sweep,
            Callbacks(config.tracker, callbacks),
            stack,
        )


def _train(
    config, workdir, preemption, watchdog, startup, sweep, callbacks, stack
) -> dict:
    clock, commit = RunClock(), run_report.commit()  # Of the code that runs.
    data = config.data
    is_first = jax.process_index() == 0
    announce = startup.announce if is_first else lambda begins: None
    announce("imported; finding the devices")
    jax.config.update("jax_debug_nans", config.debug_nans)
    jax.config.update("jax_debug_infs", config.debug_nans)
    uncached = compilation.enable_cache(config.compilation_cache_dir)
    resume_check.check_hosts(config, workdir)

    # Mesh.
    mesh = meshes.create(config.mesh)
    data_shard, num_data_shards = meshes.data_shard(mesh)
    replicas_per_shard = jax.process_count() // num_data_shards
    saved = resume_check.check_workdir(workdir, config)
    startup.end_phase("devices")
    announce(f"opening {data.name}")

    # Data.
    source = open_source(data, data.split)
    startup.end_phase("data")
    watchdog.reset("opening the data")
    announce("tracing the train step")

    # Task, optimiser, train step and evaluations.
    build, make_suite = build_train_setup, Suite
    if sweep:
        build, make_suite = sweep.build_train_setup, sweep.suite
    task = config.task.of_records(data, source)
    setup = build(dataclasses.replace(config, task=task), mesh, len(source), saved)
    total = setup.total_steps
    timers.check_profile_steps(config.profile_steps, total)
    named = len(source.class_names) == data.num_classes
    suite = make_suite(
        setup.model,
        config.evals,
        data,
        config.batch_size,
        mesh,
        class_names=source.class_names if named else (),
        trained=setup.trained_task,
    )
    pipeline.try_training(source, data)
    suite.try_first()
    log_interval = Interval(config.log_every_steps, config.log_every_epochs, setup)
    save_interval = Interval(
        config.checkpoint_every_steps, config.checkpoint_every_epochs, setup
    )

    # State: restored or initialised on the devices while the step compiles.
    checkpoints = stack.enter_context(
        Checkpointer(workdir, config, source, setup.metadata)
    )
    compilations = stack.enter_context(CompilationCounter())
    resume_check.check_data_of_hosts(
        {"train": source} | suite.sources(),
        checkpoints.latest,
        checkpoints.data.get("tokenizer"),
    )
    if config.extend_schedule != "none" and total < (checkpoints.latest or 0):
        raise UserError(
            f"extend_schedule={config.extend_schedule!r}: {workdir} is at step "
            f"{checkpoints.latest} already, and the run would have {total}: raise "
            "total_steps or epochs"
        )
    compiling = BackgroundCompilation(setup, debug_nans=config.debug_nans)
    startup.end_phase("trace")
    announce("making or restoring the state, while the train step compiles")
    local = LocalCheckpointer(config, workdir, source, setup.shapes, setup.shardings)
    state, start, *before, notes = restore_or_init(
        config, setup, checkpoints, local, source.class_names
    )
    clock.add(*before)

    # Logging.
    logger = stack.enter_context(
        MetricLogger(
            config,
            workdir,
            setup,
            start,
            replicas_per_shard=replicas_per_shard,
            startup=startup,
            compilations=compilations,
            callbacks=callbacks,
        )
    )
    step_timer, stall_timer = logger.step_timer, logger.stall_timer
    logger.log_header(len(source))
    trace = timers.Trace(config.profile_steps, workdir, start, active=is_first)
    labelled = bool(data.num_classes)
    unchecked = fingerprint.unchecked(
        checkpoints.data, labelled=labelled, captioned=bool(data.caption_key)
    )
    notes += [*setup.task.notes, *suite.notes, unchecked, uncached, trace.note]
    for note in filter(None, notes):
        logger.info(note)
    pending = PendingMetrics(checkpoints, logger, watchdog)
    evaluations = Evaluations(suite, config, setup, logger, preemption, watchdog)
    early_exit = guards.EarlyExit(
        preemption, checkpoints, setup, clock, workdir, config.data
    )

    # The best so far, with evaluations that preemption interrupted.
    final, skipped = {}, 0
    best = BestCheckpoint(config, logger.history, [*layout.steps(workdir), start])
    if evaluations.is_pending(start):
        final = evaluations.run(start, state)
        if final is None:
            early_exit.save_and_raise(start, state)
        best.update(start, final)
    checkpoints.keep_best(best.record)
    if best.record and best.step == start:  # It may be on the hosts' own disks alone.
        checkpoints.save(start, setup.to_disk(state), *clock.elapsed())
    last = start if best.is_exhausted else max(start, total)

    # Training.
    batches = pipeline.train_batches(
        source,
        data,
        batch_size=config.batch_size,
        seed=config.seed,
        start=start,
        stop=last,
        data_shard=data_shard,
        num_data_shards=num_data_shards,
    )
    if preemption.reached():  # Before the first step, which compiles, begins.
        early_exit.save_and_raise(start, state)
    startup.end_phase("init")
    watchdog.reset("making or restoring the state")
    finished = start == last
    if not finished:
        announce("waiting for the compiled train step")
    train_step = None if finished else compiling.result()
    startup.end_phase("compile")
    watchdog.reset("compilation")
    # debug_nans runs a failed step again, operation by operation, which transfers.
    guard = "allow" if config.debug_nans else "disallow"
    with batches, jax.transfer_guard(guard), stall_timer, trace:
        for step, batch in enumerate(stall_timer.iterate(batches), start + 1):
            step_timer.mark("input")
            skipped += int(batch.pop("skipped").sum())
            if step == 1:
                logger.images("train/images", batch["image"], 0)
            batch = {name: batch[name] for name in setup.batch_shapes}
            batch = meshes.to_devices(batch, mesh)
            step_timer.mark("host-to-device")
            with trace.around(step):
                state, metrics = train_step(state, batch)
            stall_timer.step_started(metrics)
            pending.put(step, metrics)

            stop, evaluate = preemption.reached(), evaluations.due(step)
            log, save = log_interval.is_due(step), save_interval.is_due(step)
            if stop or log or save or evaluate or local.is_due(step):
                values = pending.fetch()
            step_timer.mark("device step")
            if log:
                if warning := setup.task.warning(values):
                    logger.info(f"step {step}/{total}  warning: {warning}")
                logger.log_metrics(
                    step,
                    values,
                    skipped=skipped,
                    failed_saves=checkpoints.failures,
                    read_ahead=batches.read_ahead,
                )
                step_timer.mark("logging")
            if stop:
                early_exit.save_and_raise(step, state)
            with logger.pause():
                if save:
                    checkpoints.save(step, setup.to_disk(state), *clock.elapsed())
                    callbacks.checkpoint(step)
                    watchdog.reset(f"waiting for a save at step {step}")
                    step_timer.mark("checkpoint")
                elif local.is_due(step):
                    local.save(step, state, *clock.elapsed())
                    step_timer.mark("checkpoint")
                if evaluate:
                    final = evaluations.run(step, state)
                    if final is None:
                        early_exit.save_and_raise(step, state)
                    if best.update(step, final) or best.is_exhausted:
                        checkpoints.keep_best(best.record)
                        checkpoints.save(step, setup.to_disk(state), *clock.elapsed())
                        callbacks.checkpoint(step)
                    step_timer.mark("evaluation")
                for line in trace.after(step, metrics), step_timer.end_step(step):
                    if line:
                        logger.info(line)
            if best.is_exhausted:
                last = step
                break
    if checkpoints.wait():  # The last save failed: try once more, some time later.
        checkpoints.save(last, setup.to_disk(state), *clock.elapsed())
    watchdog.reset("the save of the last step")
    if finished:
        logger.info(f"this run is finished ({last} steps): evaluating only")
    elif last < total:
        logger.info(
            f"stopped early at step {last}/{total}: "
            f"{config.early_stopping_evals} evaluations were no better by "
            f"{config.checkpoint.best_metric} than step {best.step}"
        )
    handed_on = best.step if best.step in layout.steps(workdir) else last
    if handed_on != best.step:  # There is none, or it could not be saved.
        checkpoints.keep_best({})
    if handed_on != last:
        checkpoints.demand(last, "the training is done")
        logger.info(
            f"restoring step {handed_on}, the best by {config.checkpoint.best_metric} "
            f"({best.score:.4f})"
        )
        del state  # Two need not fit.
        state = setup.from_disk(
            checkpoints.load(handed_on, setup.disk_shapes, setup.disk_shardings)
        )
    scored = final and last == total  # By all evaluations, which are due then.
    if handed_on != last or (finished and not scored):
        final = evaluations.run(handed_on, state, due_at=total)
        if final is None:
            early_exit.save_and_raise(last, state)

    # Report.
    skipped = int(meshes.process_allgather(skipped=skipped)["skipped"].sum())
    skipped //= replicas_per_shard
    report = _make_report(
        config,
        setup,
        source,
        state,
        commit=commit,
        clock=clock,
        startup=startup,
        steps=last,
        best=best.record if handed_on == best.step else {},
        compile_seconds=compilations.seconds,
        images_per_second=logger.images_per_second,
        skipped=skipped,
        final=final,
    )
    if finished:
        kept = {name: report[name] for name in ("best", "params_sha256")}
        report = report | (run_report.read_report(workdir) or {}) | kept
        report["final"] = report["final"] | final
    if skipped:
        logger.info(
            f"skipped damaged images {skipped} times (data.on_error={data.on_error})"
        )
    logger.info("\n" + run_report.format_report(report))
    if is_first:
        run_report.write_report(workdir, report)
    checkpoints.demand(last, "the training is done and reported")
    local.remove()
    callbacks.end(report)
    return report


def _make_report(
    config: TrainConfig,
    setup: TrainSetup,
    source: Source,
    state: TrainState,
    *,
    commit: str | None,
    clock: RunClock,
    startup: StartupTimer,
    steps: int,
    best: dict,
    compile_seconds: float,
    images_per_second: float,
    skipped: int,
    final: dict,
) -> dict:
    """Returns the content of `report.json`, see `train`."""
    seconds, device_seconds = clock.elapsed()
    return {
        "config": config.name,
        "commit": commit,
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "steps": steps,
        "best": best,
        "variant": config.model.variant,
        "dataset": config.data.name,
        "examples": len(source),
        "init": masked(config.init.checkpoint),
        "wall_seconds": round(seconds, 3),
        "compute": run_report.compute_record(
            images=steps * config.batch_size,
            flops_per_image=setup.training_flops,
            device_kind=jax.devices()[0].device_kind,
            devices=jax.device_count(),
            device_seconds=device_seconds,
        ),
        "startup": {k: round(v, 3) for k, v in startup.seconds.items()},
        "compile_seconds": round(compile_seconds, 3),
        "images_per_second": round(images_per_second, 3) or None,
        "skipped_images": skipped,
        "class_names": list(source.class_names),
        "final": final,
        "params_sha256": run_report.params_sha256(setup.to_disk(state).params),
    }


def restore_or_init(
    config: TrainConfig,
    setup: TrainSetup,
    checkpoints: Checkpointer,
    local: LocalCheckpointer,
    class_names: Sequence[str] = (),
) -> Restored:
    """Restores or initialises the state, each part on the devices that hold it.

    Args:
      config: complete config; its `init` names weights for a run that begins.
      setup: of the run.
      checkpoints: in the workdir.
      local: on the hosts' own disks; the newer of the two is taken.
      class_names: of the training data.

    Returns:
      The state, at step 0 for a run that begins.

    Raises:
      UserError: no checkpoint is intact, it was saved with other data, or `init`
        cannot be read, does not fit, or differs between hosts.
    """
    latest, notes = checkpoints.latest or 0, []
    found = local.restore(newer_than=latest)
    while found.state is None and latest:
        checkpoints.verify()
        if checkpoints.latest < latest:  # A local checkpoint may be newer now.
            found = local.restore(newer_than=checkpoints.latest)
        if found.state is None:
            notes += found.notes
            found = checkpoints.restore(setup.disk_shapes, setup.disk_shardings)
            if found.state is not None:
                found = found._replace(state=setup.from_disk(found.state))
    if latest:
        notes += checkpoints.put_damaged_aside()
    elif found.state is None and config.init.checkpoint:
        params, others, notes = load_initial(
            config.init,
            config.data,
            setup.model,
            lambda: setup.task.backbone(*setup.init()),
            head_bias_init=config.model.head_bias_init,
            task=config.task.name,
            class_names=class_names,
        )
        _check_weights_of_hosts(setup, params | {"task": others})
        found = found._replace(state=setup.state_from(params, others))
    elif found.state is None:
        _check_weights_of_hosts(setup, {})
        found = found._replace(state=setup.initial_state())
    return found._replace(notes=[*notes, *found.notes])


def _check_weights_of_hosts(setup: TrainSetup, params: dict) -> None:
    if jax.process_count() > 1:
        params = {"params": params, "extra": setup.task.load()}
        hosts.check_agreement(
            weights={
                "sha256": run_report.params_sha256(params),
                "task": setup.metadata["task"],
            }
        )
