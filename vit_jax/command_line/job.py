"""Runs the work of a command in all processes of its job, and ends them together."""

from collections.abc import Callable

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error
from vit_jax.errors import (
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    Interrupted,
    Preempted,
    UserError,
)


def run(work: Callable[[], object], workdir: str, *, debug: bool) -> int:
    """Connects the processes of a job, and runs its work in each of them.

    Args:
      work: function that trains in `workdir`, or evaluates.
      workdir: folder that the messages to other processes name.
      debug: whether to show tracebacks of bad input too.

    Returns:
      The exit code: 0; 75 when the state is saved and the same command resumes, as
      after SIGTERM; 130 after Ctrl-C. In a job of several processes it does not return:
      each process exits without JAX's last barriers, which would wait for a lost
      process.

    Raises:
      UserError: `work` raised it, or the other processes are not configured.
      LostHost: another process did not connect.
    """
    import jax

    from vit_jax.distributed import ending, multihost
    from vit_jax.training import step

    code = 0
    multihost.start()
    with multihost.FailureBroadcast(workdir, debug=debug):
        try:
            work()
        except Preempted as preempted:
            print_error(str(preempted))
            code = EXIT_TRY_AGAIN
        except Interrupted as interrupted:
            print_error(str(interrupted))
            code = EXIT_INTERRUPTED
        except UserError as error:
            if jax.process_count() > 1 or not step.is_compiling():
                raise
            cli.show(error, debug=debug)
            ending.exit_process(EXIT_USER_ERROR)
    if jax.process_count() > 1 or step.is_compiling():
        ending.exit_process(code)
    return code
