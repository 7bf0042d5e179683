"""The invented year: believable, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from scripts.demo_lines import Rejected, Settlement, by_invoice, open_input, read_lines
from scripts.demo_year import write_year


def lines_of(path):
    with open_input(path) as stream:
        return list(read_lines(stream))


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    path = tmp_path_factory.mktemp("year") / "year.csv.gz"
    write_year(path, 20_000, seed=1)
    return lines_of(path)


@pytest.fixture(scope="module")
def settlements(year):
    return [line for line in year if isinstance(line, Settlement)]


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    contents = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_year(tmp_path / name, 500, seed)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("rows", [1, 2, 99, 1_000])
def test_there_are_as_many_settlements_as_asked_for(rows, tmp_path):
    write_year(tmp_path / "year.csv.gz", rows, seed=3)
    assert sum(isinstance(line, Settlement) for line in lines_of(tmp_path / "year.csv.gz")) == rows


def test_a_few_broken_lines_come_on_top(year, settlements):
    assert len(settlements) == 20_000
    assert sum(isinstance(line, Rejected) for line in year) == 2


def test_lines_come_in_the_order_of_the_year(settlements):
    assert all(earlier.settled_at <= later.settled_at for earlier, later in pairwise(settlements))
    assert len({line.settled_at[:7] for line in settlements}) == 12


@pytest.mark.slow
def test_an_invoice_has_one_customer_one_country_and_one_moment(settlements):
    for lines in by_invoice(settlements):
        facts = {(line.customer_id, line.country, line.settled_at) for line in lines if isinstance(line, Settlement)}
        assert len(facts) == 1


def test_a_cancellation_takes_back_no_more_than_was_bought(settlements):
    bought: Counter[tuple] = Counter()
    for line in settlements:
        if not line.is_refund:
            assert line.quantity > 0
            bought[line.customer_id, line.stock_code, line.unit_price] += line.quantity
        else:
            assert line.quantity < 0
            bought[line.customer_id, line.stock_code, line.unit_price] += line.quantity
            assert bought[line.customer_id, line.stock_code, line.unit_price] >= 0


def test_proportions_are_those_of_a_shop(settlements):
    refunds = [line for line in settlements if line.is_refund]
    assert 0.01 < len(refunds) / len(settlements) < 0.06
    assert 0.05 < sum(line.customer_id is None for line in settlements) / len(settlements) < 0.3
    assert Counter(line.country for line in settlements).most_common(1)[0][0] == "United Kingdom"
