"""The command line's own error."""


class CommandError(Exception):
    """A command cannot do its work; the message tells the user why."""
