"""How a verb that trains ends: done, preempted or failed, all processes alike."""

import sys
from collections.abc import Callable

from vit_jax import cli
from vit_jax.errors import Preempted, UserError

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again.


def run(work: Callable[[], object], workdir: str, *, debug: bool) -> int:
    """Does the work of a job, in every process of it.

    Args:
      work: trains, once or often, in `workdir`.
      workdir: named where a process tells why the others end.
      debug: show tracebacks of bad input too.

    Returns:
      The exit code: 0, or 75 after SIGTERM.

    Raises:
      UserError: as `work`.
    """
    import jax

    from vit_jax.parallel import distributed, together
    from vit_jax.training import ahead, saving

    code = 0
    with together.Together(workdir, debug=debug):
        try:
            work()
        except Preempted as preempted:
            print(preempted, file=sys.stderr, flush=True)
            code = EXIT_PREEMPTED
        except UserError as error:
            if jax.process_count() > 1 or not ahead.under_way():
                raise
            cli.show(error, debug=debug)
            together.leave(cli.EXIT_USER_ERROR)
        # All leave in the same way: process 0 waits for those who do not wait.
        hasty = saving.left_threads() or ahead.under_way()
        hasty = bool(distributed.gather(hasty=hasty)["hasty"].any())
    if hasty:
        together.leave(code)
    return code
