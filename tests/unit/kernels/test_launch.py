"""A launcher that has bound a kernel launches the variant that Triton would launch."""

import json

import pytest

from tests.support.module_process import said_by

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def said():
    *_, line = said_by("tests.support.list_launches")
    return json.loads(line)


def test_no_launch_differs_from_that_of_triton(said):
    """Addresses that are not aligned, and numbers where Triton's choice changes, among them."""
    assert said["differences"] == []
    assert said["variants"] > 500
    assert said["bound"] > 3000, "few launches are those of the launcher"


def test_every_kernel_is_bound_after_one_launch(said):
    assert said["by Triton again"] == {}
    assert said["launches"] > 150
