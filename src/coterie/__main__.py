"""The ``coterie`` command, also as ``python -m coterie``. Handles Ctrl-C before anything large is imported."""

from coterie._interrupts import leaving_at_once


def main() -> None:
    """Import the command and run it."""
    with leaving_at_once():
        from coterie.cli.main import main as command
    command()


if __name__ == "__main__":
    main()
