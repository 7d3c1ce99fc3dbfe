"""``python -m tailbound``: the same as the ``tailbound`` command."""

from tailbound.cli import main

main()
