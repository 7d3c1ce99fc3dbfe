"""The step time's distribution, from those of the workers."""

import numpy as np
import pytest

from tailbound.compute.distribution import (
    identical_step_cdf,
    identical_step_pdf,
    normal_cdf,
    normal_pdf,
    step_cdf,
    step_pdf,
)


def test_a_step_is_over_once_every_worker_is() -> None:
    cdf_WX = [[0.2, 1.0], [0.5, 1.0], [0.9, 1.0]]

    assert step_cdf(cdf_WX) == pytest.approx([0.09, 1.0])


def test_the_density_of_a_step_counts_each_worker_as_the_last() -> None:
    """1 * 0.5 * 0.9 + 2 * 0.2 * 0.9 + 3 * 0.2 * 0.5."""
    density_X = step_pdf([[1.0], [2.0], [3.0]], [[0.2], [0.5], [0.9]])

    assert density_X == pytest.approx([1.11])


def test_a_worker_that_cannot_be_done_yet_leaves_only_its_own_density() -> None:
    assert step_pdf([[1.0], [2.0]], [[0.0], [0.5]]) == pytest.approx([0.5])


def test_identical_workers_have_the_power_form() -> None:
    assert identical_step_cdf([0.5, 1.0], 3) == pytest.approx([0.125, 1.0])
    assert identical_step_pdf([2.0], [0.5], 3) == pytest.approx([1.5])


def test_one_worker_is_the_step() -> None:
    assert step_pdf([[0.7]], [[0.3]]) == pytest.approx([0.7])
    assert identical_step_pdf([0.7], [0.0], 1) == pytest.approx([0.7])


def test_both_forms_agree_for_identical_workers() -> None:
    seconds_X = np.linspace(3.0, 12.0, 7)
    cdf_WX = normal_cdf(seconds_X, [8.1] * 4, [0.8] * 4)
    pdf_WX = normal_pdf(seconds_X, [8.1] * 4, [0.8] * 4)

    assert step_cdf(cdf_WX) == pytest.approx(identical_step_cdf(cdf_WX[0], 4))
    assert step_pdf(pdf_WX, cdf_WX) == pytest.approx(
        identical_step_pdf(pdf_WX[0], cdf_WX[0], 4)
    )


def test_normal_workers_have_the_normal_s_values() -> None:
    cdf_WX = normal_cdf([5.0, 7.0, 100.0], [5.0, 6.0], [2.0, 1.0])
    pdf_WX = normal_pdf([5.0, 7.0], [5.0, 6.0], [2.0, 1.0])

    assert cdf_WX[0] == pytest.approx([0.5, 0.841344746, 1.0])
    assert cdf_WX[1] == pytest.approx([0.158655254, 0.841344746, 1.0])
    assert pdf_WX[0] == pytest.approx([0.199471140, 0.120985362])
    assert pdf_WX[1] == pytest.approx([0.241970725, 0.241970725])


def test_the_mean_of_the_density_is_the_expected_maximum() -> None:
    """Of two standard normals it is 1 / sqrt(pi); all the mass is there."""
    seconds_X = np.linspace(-9.0, 9.0, 3001)
    density_X = step_pdf(
        normal_pdf(seconds_X, [0.0, 0.0], [1.0, 1.0]),
        normal_cdf(seconds_X, [0.0, 0.0], [1.0, 1.0]),
    )

    spacing = 18.0 / 3000
    assert density_X.sum() * spacing == pytest.approx(1.0)
    assert (density_X * seconds_X).sum() * spacing == pytest.approx(0.5641895835)
