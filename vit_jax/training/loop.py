"""The training run from config to report; functions stand in the order of execution."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from vit_jax.command_line.printing import masked
from vit_jax.data import normalization, pipeline
from vit_jax.data.config import ESTIMATE
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import agreement, compilation
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators.suite import Suite
from vit_jax.training import guards, lock, resume_check, run_report, train_setup
from vit_jax.training.actions import Evaluating, Saving, Tracing
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.config import TrainConfig
from vit_jax.training.metric_logger import MetricLogger
from vit_jax.training.resume_check import Restored
from vit_jax.training.step import Step, compile_in_background, of_any_shape
from vit_jax.training.timers import CompilationCounter, RunClock, StartupTimer
from vit_jax.training.train_setup import TrainSetup


def train(
    config: TrainConfig,
    workdir: str | os.PathLike,
    startup: StartupTimer | None = None,
    setup: TrainSetup | None = None,
    callbacks: Iterable[Callback] = (),
) -> dict:
    """Trains, evaluates and reports; resumes if `workdir` holds a checkpoint.

    Args:
      config: complete config, from `vit_jax.training.config.load`.
      workdir: folder for checkpoints, metrics and the report.
      startup: timer that has measured the phases before this call.
      setup: result of `build_setup`, or, in a sweep, of `SweepSetups.build`, which
        shares compiled programs between runs.
      callbacks: user's callbacks, called after those of the loop.

    Returns:
      The content of `report.json`: config, commit, devices, steps, wall_seconds,
      compute, images_per_second, final ({evaluation: {"params": {"top1": ...}, "ema":
      ...}}), params_sha256 and more.

    Raises:
      UserError: the input is invalid, or memory or disk is full; see docs/resume.md.
      Preempted: the process received SIGTERM or SIGHUP, or a loader process was killed;
        the state is saved.
      Interrupted: the user pressed Ctrl-C, or the stop button of a notebook; the state
        is saved. Pressing it again raises KeyboardInterrupt at once.
    """
    with _guarded(config, workdir, startup or StartupTimer()) as start:
        config = resolved(config)
        setup = _ready(config, workdir, setup, start)
        tracing = Tracing(config, setup)
        run, compiled_step = _begin(
            config, workdir, setup, start, [*callbacks], tracing
        )
        _take_steps(run, start.timer, tracing, compiled_step)
        report = _make_report(run)
        if jax.process_index() == 0:
            run_report.write_report(workdir, report)
        run.checkpoints.demand(run.last_step, "the training is done and reported")
        run.notify("end", report)
        return report


class _Start(NamedTuple):
    """Timers and guards of a start; `stack` closes the context managers of the run."""

    timer: StartupTimer
    clock: RunClock
    commit: str | None
    notes: list[str]
    preemption: guards.Preemption
    watchdog: guards.Watchdog
    stack: contextlib.ExitStack


@contextlib.contextmanager
def _guarded(config, workdir, timer):
    """Locks the workdir, handles signals and watches for stalls while it is open."""
    watchdog = guards.Watchdog(config.stall_timeout)
    with (
        guards.clear_errors(config),
        lock.held(workdir),
        guards.Preemption() as preemption,
        watchdog,
        contextlib.ExitStack() as stack,
    ):
        commit = run_report.commit()
        yield _Start(timer, RunClock(), commit, [], preemption, watchdog, stack)


def _ready(config, workdir, setup, start) -> TrainSetup:
    """Returns the setup with its evaluations, after reading some data of each split."""
    start.timer.announce("imported; finding the devices")
    jax.config.update("jax_debug_nans", config.debug_nans)
    jax.config.update("jax_debug_infs", config.debug_nans)
    start.notes.append(compilation.enable_cache(config.compilation_cache_dir))
    resume_check.check_hosts(config, workdir)
    setup = setup or build_setup(config, workdir, start.timer)
    if setup.suite is None:
        setup = setup._replace(suite=open_suite(config, setup))
    start.watchdog.reset("opening the data")
    pipeline.try_training(setup.source, config.data)
    setup.suite.try_first()
    return setup


def _begin(config, workdir, setup, start, callbacks, tracing) -> tuple[Run, Callable]:
    """Restores or initialises the state while the step compiles.

    Returns:
      The run, and a function that waits for its compiled step.
    """
    checkpoints = start.stack.enter_context(
        Checkpointer(workdir, config, setup.source, setup.metadata, setup.layout.disk)
    )
    compilations = start.stack.enter_context(CompilationCounter())
    _check_resumed(config, workdir, setup, checkpoints)
    compiled_step = _start_compiling(config, setup)
    start.timer.end_phase(
        "trace", "making or restoring the state, while the train step compiles"
    )
    local = _local_checkpoints(config, workdir, setup)
    elsewhere = local.restore if local else _nothing_elsewhere
    restored = restore_or_init(config, setup, checkpoints, elsewhere)
    start.clock.add(restored.seconds, restored.device_seconds)
    logger = start.stack.enter_context(MetricLogger(start.timer, compilations))
    evaluating = Evaluating(config, setup)
    trackers = [config.tracker.callback()] if jax.process_index() == 0 else []
    run = Run(
        config=config,
        workdir=os.fspath(workdir),
        commit=start.commit,
        start=restored.step,
        total_steps=setup.total_steps,
        num_parameters=sum(x.size for x in jax.tree.leaves(setup.layout.shapes.params)),
        step=restored.step,
        state=restored.state,
        last_step=max(restored.step, setup.total_steps),
        setup=setup,
        checkpoints=checkpoints,
        logger=logger,
        clock=start.clock,
        watchdog=start.watchdog,
        preemption=start.preemption,
        # They are called after each step in this order.
        callbacks=[
            logger,
            Saving(),
            *([local] if local else []),
            evaluating,
            tracing,
            *trackers,
            *callbacks,
        ],
        notes=[
            *(*restored.notes, *start.notes, config.ema.note(setup.total_steps)),
            config.optim.note(restored.state.params),
        ],
    )
    del restored  # The first step overwrites the memory of its state.
    run.notify("begin", run)
    start.timer.end_phase("init")
    if evaluating.catch_up():
        start.timer.end_phase("evaluation")
    _end_if_asked(run)
    return run, compiled_step


def _start_compiling(config, setup) -> Callable[[], Step]:
    """Starts to compile the step, if needed; returns a function that waits for it."""
    # To find a NaN, JAX runs a failed step again, operation by operation.
    if config.debug_nans or setup.compiled:
        return lambda: setup.compiled or setup.train_step
    shapes, batch = setup.layout.shapes, setup.layout.batch
    return compile_in_background(setup.train_step, shapes, batch)


def _take_steps(run, timer, tracing, compiled_step) -> None:
    """Runs the steps of this start; calls the callbacks after each and at the end."""
    config, setup = run.config, run.setup
    data_shard, num_data_shards = meshes.data_shard(setup.mesh)
    batches = pipeline.train_batches(
        setup.source,
        config.data,
        batch_size=config.batch_size,
        seed=config.seed,
        start=run.start,
        stop=run.last_step,
        data_shard=data_shard,
        num_data_shards=num_data_shards,
    )
    if run.preemption.reached():  # Checked now, because the first step compiles.
        guards.end_early(run)
    timer.end_phase("init", "waiting for the compiled train step")
    run.watchdog.reset("making or restoring the state")
    jitted, shapes = setup.train_step, setup.layout.batch
    compiled = jitted if run.start == run.last_step else compiled_step()
    train_step = of_any_shape(compiled, jitted, shapes)
    timer.end_phase("compile")
    run.watchdog.reset("compilation")
    # With debug_nans, JAX runs a failed step again, which transfers arrays to the host.
    guard = "allow" if config.debug_nans else "disallow"
    with batches, jax.transfer_guard(guard), tracing:
        for step, batch in run.logger.steps(batches):
            batch = {name: batch[name] for name in shapes}
            batch = meshes.to_devices(batch, setup.mesh)
            run.logger.step_timer.mark("host-to-device")
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                run.take(step, *train_step(run.state, batch))
            run.notify("after_step", step)
            run.ending = run.ending or run.preemption.reached()
            _end_if_asked(run)
    run.notify("finish")
    _end_if_asked(run)


def _end_if_asked(run: Run) -> None:
    """Saves and ends the run if a signal was received."""
    if run.ending:
        run.metrics()  # Raises if they are not finite.
        guards.end_early(run)


def _local_checkpoints(config, workdir, setup) -> Callback | None:
    """Returns the callback that saves on local disks; None if the config has it off."""
    if not config.local_checkpoint.every_steps:
        return None
    from vit_jax.training.local_checkpoint import LocalCheckpointer

    layout = setup.layout
    return LocalCheckpointer(
        config, workdir, setup.source, layout.shapes, layout.shardings
    )


def _nothing_elsewhere(newer_than: int) -> Restored:
    """Restores nothing, because all checkpoints are in the workdir."""
    return Restored()


def resolved(config: TrainConfig) -> TrainConfig:
    """Returns the config with `data.mean` and `data.std` estimated if they ask for it.

    Raises:
      UserError: data cannot be opened or read.
    """
    data = config.data
    if ESTIMATE not in (data.mean, data.std):
        return config
    source = open_source(data, data.split)
    data = normalization.resolve(data, source, config.seed)
    return dataclasses.replace(config, data=data)


def build_setup(
    config: TrainConfig,
    workdir: str | os.PathLike,
    startup: StartupTimer | None = None,
) -> TrainSetup:
    """Opens the training split and builds the functions of a run.

    The workdir may contain checkpoints of the run.

    Raises:
      UserError: the workdir contains another run, the data cannot be opened, or the
        config does not fit the data or the devices, or contradicts itself.
    """
    config = resolved(config)
    startup, data = startup or StartupTimer(), config.data
    mesh = meshes.create(config.mesh)
    saved = resume_check.check_workdir(workdir, config)
    startup.end_phase("devices", f"opening {data.name}")
    source = open_source(data, data.split)
    startup.end_phase("data", "tracing the train step")
    task = config.task.of_records(data, source)
    config = dataclasses.replace(config, task=task)
    setup = train_setup.build(config, mesh, len(source), saved)
    return setup._replace(source=source)


def open_suite(config: TrainConfig, setup: TrainSetup) -> Suite:
    """Opens the evaluations of a run.

    Raises:
      UserError: data cannot be opened, or an evaluation does not fit its data or the
        task.
    """
    names = setup.source.class_names
    return Suite(
        setup.model,
        config.evals,
        config.data,
        config.batch_size,
        setup.mesh,
        class_names=names if len(names) == config.data.num_classes else (),
        trained=setup.trained_task,
    )


def _check_resumed(config, workdir, setup, checkpoints) -> None:
    """Raises UserError if hosts differ, or the run is already beyond `total_steps`."""
    latest = checkpoints.latest
    resume_check.check_data_of_hosts(
        config.data, {"train": setup.source} | setup.suite.sources(), latest
    )
    if config.extend_schedule != "none" and setup.total_steps < (latest or 0):
        raise UserError(
            f"extend_schedule={config.extend_schedule!r}: {workdir} is already at step "
            f"{latest}, but the config has only {setup.total_steps} steps: raise "
            "total_steps or epochs"
        )


def _make_report(run: Run) -> dict:
    """Returns the content of `report.json`, see `train`, and prints it as a table."""
    config, setup = run.config, run.setup
    device_kind = jax.devices()[0].device_kind
    seconds, device_seconds = run.clock.elapsed()
    report = {
        "config": config.name,
        "commit": run.commit,
        "devices": jax.device_count(),
        "device_kind": device_kind,
        "steps": run.last_step,
        "best": run.best,
        "variant": config.model.variant,
        "dataset": config.data.name,
        "examples": len(setup.source),
        "init": masked(config.init.checkpoint),
        "wall_seconds": round(seconds, 3),
        "compute": run_report.compute_record(
            images=run.last_step * config.batch_size,
            flops_per_image=setup.training_flops,
            device_kind=device_kind,
            devices=jax.device_count(),
            device_seconds=device_seconds,
        ),
        **run.logger.measured(),
        "class_names": list(setup.source.class_names),
        "final": run.final,
        "params_sha256": run_report.params_sha256(
            setup.layout.disk.to_disk(run.state).params
        ),
    }
    if skipped := report["skipped_images"]:
        run.logger.info(
            f"skipped damaged images {skipped} times (data.on_error={config.data.on_error})"
        )
    if run.start == run.last_step:  # The run was finished: its old report applies.
        kept = {name: report[name] for name in ("best", "params_sha256")}
        report = report | (run_report.read_report(run.workdir) or {}) | kept
        report["final"] = report["final"] | run.final
    run.logger.info("\n" + run_report.format_report(report))
    if note := config.ema.note(run.last_step):
        run.logger.info(note)
    return report


def restore_or_init(
    config: TrainConfig,
    setup: TrainSetup,
    checkpoints: Checkpointer,
    restore_newer: Callable[[int], Restored] = _nothing_elsewhere,
) -> Restored:
    """Restores or initialises the state, each part on the devices that hold it.

    A new run starts at step 0, from the weights that `config.init` names, if any.

    Args:
      config: complete config.
      setup: parts of the run.
      checkpoints: checkpoints of the workdir; the newest is restored.
      restore_newer: function of a step that restores a newer state from another place,
        such as local disks, if there is one.

    Raises:
      UserError: no checkpoint is intact, it was saved with other data, or `init`
        cannot be read, does not fit, or differs between hosts.
    """
    latest, notes = checkpoints.latest or 0, []
    restored = restore_newer(latest)
    while restored.state is None and latest:
        checkpoints.verify()
        if checkpoints.latest < latest:  # Now the other place may have a newer state.
            restored = restore_newer(checkpoints.latest)
        if restored.state is None:
            notes += restored.notes
            restored = checkpoints.restore()
    if latest:
        notes += checkpoints.put_damaged_aside()
    elif restored.state is None and config.init.checkpoint:
        from vit_jax.weights.initial import load_initial  # Only runs with init need it.

        params, others, notes = load_initial(
            config.init,
            config.data,
            setup.model,
            lambda: setup.task.backbone(*setup.first.init()),
            head_bias_init=config.model.head_bias_init,
            task=config.task.pretrained_name,
            left_out=lambda others: setup.task.left_out(
                setup.layout.shapes.params, setup.layout.shapes.extra, others
            ),
            class_names=setup.source.class_names if setup.source is not None else (),
        )
        _check_weights_of_hosts(setup, params | {"task": others})
        restored = restored._replace(state=setup.state_from(params, others))
    elif restored.state is None:
        _check_weights_of_hosts(setup, {})
        restored = restored._replace(state=setup.initial_state())
    return restored._replace(notes=[*notes, *restored.notes])


def _check_weights_of_hosts(setup: TrainSetup, params: dict) -> None:
    if jax.process_count() > 1:
        params = {"params": params, "extra": setup.task.load()}
        agreement.check_agreement(
            weights={
                "sha256": run_report.params_sha256(params),
                "task": setup.metadata["task"],
            }
        )
