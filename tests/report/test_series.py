"""Records sorted, and turned into series over steps."""

from report.synthetic import one_check, one_epoch, one_round
from tailbound.records import Record
from tailbound.report import series


def test_records_are_sorted_by_run_and_kind_and_the_way_back_is_left_out() -> None:
    there, back = one_round("a", 1), one_round("a", 1, direction="back")
    check, epoch = one_check("b", 1), one_epoch("a", 1)

    records: list[Record] = [there, back, check, epoch]

    runs = series.gather(iter(records))

    assert runs == {
        "a": series.RunRecords(way_in=[there], epochs=[epoch]),
        "b": series.RunRecords(steps=[check]),
    }


def test_a_step_is_as_slow_as_its_slowest_worker_and_steps_are_in_order() -> None:
    rounds = [
        one_round("a", 2, latency_s=0.003),
        one_round("a", 1, latency_s=0.001),
        one_round("a", 1, rank=1, latency_s=0.002),
    ]

    step_S, latency_S = series.slowest_ms(rounds)

    assert step_S.tolist() == [1, 2]
    assert latency_S.tolist() == [2.0, 3.0]


def test_probes_and_repairs_are_averaged_over_the_workers() -> None:
    rounds = [
        one_round("a", 1, probes=1, retransmitted=0),
        one_round("a", 1, rank=1, probes=4, retransmitted=9),
    ]

    assert series.mean_probes(rounds)[1].tolist() == [2.5]
    assert series.mean_retransmitted(rounds)[1].tolist() == [4.5]


def test_the_metric_is_averaged_over_ranks() -> None:
    epochs = [one_epoch("a", 1, 0, metric=0.5), one_epoch("a", 1, 1, metric=0.75)]

    epoch_E, metric_E = series.mean_metric(epochs)

    assert (epoch_E.tolist(), metric_E.tolist()) == ([1], [0.625])


def test_critical_steps_are_joined_to_spans() -> None:
    critical = {1: True, 2: True, 3: False, 5: True, 8: False, 9: True}
    rounds = [one_round("a", step, critical=flag) for step, flag in critical.items()]

    assert series.critical_spans(rounds) == [(1, 2), (5, 5), (9, 9)]
    assert series.critical_spans([]) == []


def test_a_decision_counts_once_though_every_rank_reports_it() -> None:
    steps = [
        one_check("a", 20, rank=1),
        one_check("a", 20, rank=0),
        one_check("a", 20, rank=2),
        one_check("a", 10, rank=1),
        one_check("a", 15, ratio=None),
    ]

    checks = series.decisions(steps)

    assert [(report.step, report.rank) for report in checks] == [(10, 1), (20, 0)]
