"""The ``coterie`` command, also as ``python -m coterie``. Handles Ctrl-C before anything large is imported."""

from coterie._interrupts import WORDS, leave, leaving_at_once


def main() -> None:
    """Import the command and run it."""
    with leaving_at_once():
        from coterie.cli.main import main as command
    try:
        command()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code in WORDS:
            leave(end.code)
        raise


if __name__ == "__main__":
    main()
