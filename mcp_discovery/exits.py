"""Exit codes of the command line, and a failure that a command can put in a sentence."""

OK, UNEXPECTED, USAGE, LOAD_REFUSED, NO_MATCH, REQUEST_REFUSED = range(6)
INTERRUPTED = 130


class CommandFailed(Exception):
    """What was asked could not be done; the text is one sentence. Exit code `UNEXPECTED`."""
