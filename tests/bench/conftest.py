"""One measuring server for all tests of benchmarks: importing the package takes longer than the tests."""

import pytest

from benchmarks.partition_process import MeasuringServer


@pytest.fixture(scope="session")
def server():
    with MeasuringServer() as server:
        yield server
