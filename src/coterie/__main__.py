"""``python -m coterie`` is the ``coterie`` command."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
