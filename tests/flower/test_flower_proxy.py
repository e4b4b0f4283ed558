"""The proxy before a SuperLink, without one: paths, sizes, rates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")

from starlette.testclient import TestClient

from fedquilt.flower.proxy import Buckets, Limits, make_proxy


@pytest.fixture
def client() -> Iterator[TestClient]:
    limits = Limits(largest=100, rate=0.001, burst=5)
    with TestClient(make_proxy("127.0.0.1:1", False, limits)) as client:
        yield client


def test_what_goes_where(client: TestClient) -> None:
    assert client.post("/v1/control/start-run").status_code == 403
    assert client.get("/v1/fleet/pull-messages").status_code == 403
    assert client.post("/v1/fleet/push-object", content=b"x" * 101).status_code == 413
    assert client.post("/v1/fleet/pull-messages").status_code == 503, "nobody is behind it"


def test_a_body_without_an_announced_size_is_read_no_further_than_allowed(
    client: TestClient,
) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 60

    assert client.post("/v1/fleet/push-object", content=endless()).status_code == 413


def test_an_address_that_asks_too_often_is_told_so(client: TestClient) -> None:
    said = [client.get("/").status_code for _ in range(7)]
    assert said == [403] * 5 + [429] * 2


def test_buckets_fill_again() -> None:
    buckets = Buckets(Limits(rate=2.0, burst=2.0))
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0)
    assert buckets.take("a", 0.5)
    assert not buckets.take("a", 0.6)
    assert [buckets.take("a", 100.0) for _ in range(3)] == [True, True, False]
