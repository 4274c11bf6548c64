"""How a run ends before its time, other than by a mistake of ours."""


class UserError(ValueError):
    """Bad input: one line that names the thing, its value and the remedy.

    Verbs print the line and exit with code 2; `--debug` shows the traceback.
    """


class NoSplit(UserError):
    """A data set has no split of that name."""


class Diverged(UserError):
    """Training came to numbers that are not finite; the line names the step."""


class Preempted(Exception):
    """The run was asked to end (SIGTERM, SIGHUP) or cannot go on; its state is saved."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came, and the run has saved its state."""


class LostHost(Exception):
    """Another process of the job did not come: exit code 75, try again."""
