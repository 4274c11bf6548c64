"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """Bad input: one line that names the thing, its value and the remedy.

    Verbs print the line and exit with code 2; `--debug` shows the traceback.
    """
