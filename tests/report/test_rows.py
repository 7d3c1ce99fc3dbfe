"""The rows of the comparison, shared by the terminal and the page."""

from report.synthetic import make_settings, one_epoch, one_round
from tailbound.records import Record
from tailbound.report.rows import Row, make_rows
from tailbound.report.summary import summarise

DASH = "–"  # noqa: RUF001


def test_both_runs_stand_side_by_side_with_their_ratio() -> None:
    settings = make_settings(workers=1, epochs=1, burst_rounds=[1])
    records: list[Record] = [
        one_round("fixed", 1, latency_s=0.02, probes=14, missing=1),
        one_epoch("fixed", 1, metric=0.8, train_s=12.0),
        one_round("adaptive", 1, latency_s=0.005, probes=3, missing=4),
        one_epoch("adaptive", 1, metric=0.76, train_s=10.0, digest="other"),
    ]

    rows = make_rows(summarise(records, settings))

    assert rows == [
        Row("burst round 1", "20.0 ms", "5.00 ms", "4.00×", True),  # noqa: RUF001
        Row("latency, 99th percentile", "20.0 ms", "5.00 ms", "4.00×", True),  # noqa: RUF001
        Row("latency, mean", "20.0 ms", "5.00 ms", "4.00×", True),  # noqa: RUF001
        Row("latency, median", "20.0 ms", "5.00 ms", "", False),
        Row("training time", "12.0 s", "10.0 s", "1.20×", True),  # noqa: RUF001
        Row("accuracy", "0.8000", "0.7600", "95.0 % kept", True),
        Row("probes per round", "14.0", "3.00", "", False),
        Row("datagrams retransmitted", "0.00 %", "0.00 %", "", False),
        Row("chunks given up", "10.0 %", "40.0 %", "", False),
        Row("rounds in the critical regime", "0.00 %", "0.00 %", "", False),
        Row("steps", "25", "25", "", False),
        Row("replicas bit-identical", "yes", "yes", "", False),
    ]


def test_chunks_beyond_the_bound_have_a_row_only_if_a_deadline_gave_any_up() -> None:
    settings = make_settings(workers=1, burst_rounds=[])
    records: list[Record] = [
        one_round("fixed", 1, missing=3, given_up=2),
        one_round("fixed", 2, missing=1),
        one_round("adaptive", 1, missing=1),
    ]

    rows = make_rows(summarise(records, settings))

    labels = [row.label for row in rows]
    where = labels.index("chunks beyond the bound")
    assert labels[where - 1] == "chunks given up"
    assert rows[where] == Row("chunks beyond the bound", "10.0 %", "0.00 %", "", False)
    quiet = make_rows(summarise(records[1:], settings))
    assert "chunks beyond the bound" not in [row.label for row in quiet]


def test_what_is_not_known_is_a_dash() -> None:
    settings = make_settings(burst_rounds=[4])

    rows = make_rows(summarise([one_round("fixed", 1)], settings))

    by_label = {row.label: (row.fixed, row.adaptive, row.ratio) for row in rows}
    assert by_label["burst round 4"] == (DASH, DASH, DASH)
    assert by_label["metric"] == (DASH, DASH, "")
    assert by_label["steps"] == ("1", DASH, "")
    assert by_label["replicas bit-identical"] == (DASH, DASH, "")


def test_the_label_says_that_lower_is_better_and_no_is_loud() -> None:
    settings = make_settings(workers=2, epochs=1, burst_rounds=[])
    records: list[Record] = [
        one_epoch("adaptive", 1, 0, metric_name="perplexity", digest="x"),
        one_epoch("adaptive", 1, 1, metric_name="perplexity", digest="y"),
    ]

    labels = {
        row.label: row.adaptive for row in make_rows(summarise(records, settings))
    }

    assert labels["perplexity (lower is better)"] == "0.9000"
    assert labels["replicas bit-identical"] == "NO"
