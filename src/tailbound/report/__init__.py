"""The report: reads what a run left behind, and says and shows what came of it.

    records.jsonl, settings.json -> series -> summary -> verdict, rows
                                      |                    |
                                    plots, svg --------> html, table

Only this room knows matplotlib, and only ``plots`` and ``svg`` import it; a summary
and a table on the terminal do without. Nothing is imported here, so that each of them
costs only what it needs.
"""
