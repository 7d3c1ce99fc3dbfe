"""The report: reads what a run left behind, and says and shows what came of it.

    rounds.jsonl ---> series --> summary --> verdict, rows --> table, html
    settings.json ----------------^             plots, svg -----------^

``outcome`` is the shape of a summary, ``build`` does all of it for a folder. Only this
room knows matplotlib, and only ``plots`` (with ``drawing`` and ``svg``) and ``html``
need it; a summary and a table on the terminal do without. Nothing is imported here, so
that each of them costs only what it needs.
"""
