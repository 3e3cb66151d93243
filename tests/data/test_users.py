"""Rows of users: which they are, and how many of them stay."""

import numpy as np
import pytest

from tfdp.data.users import Users, bound_contributions


@pytest.mark.parametrize(
    "ids",
    [
        [7, 3, 7, -2],
        np.array([7, 3, 7, 2], "uint64"),
        ["b", "a", "b", "c"],
        np.array(["b", "a", "b", "c"], object),
        np.array([b"b", b"a", b"b", b"c"], object),
        np.array([7, 3, 7, np.int8(-2)], object),
    ],
    ids=str,
)
def test_users_are_numbered_by_their_first_rows(ids):
    users = Users("ids", ids, 1)
    assert users.of_rows.tolist() == [0, 1, 0, 2]
    assert [users.rows(user).tolist() for user in range(len(users))] == [
        [0, 2],
        [1],
        [3],
    ]


def test_no_user_keeps_more_rows_than_the_bound():
    ids = np.repeat(np.arange(50), np.arange(1, 51))
    np.random.default_rng(0).shuffle(ids)
    kept = bound_contributions(ids, max_per_user=7)
    assert (np.diff(kept) > 0).all()
    assert np.bincount(ids[kept]).tolist() == [min(n, 7) for n in range(1, 51)]


@pytest.mark.statistical
def test_every_row_stays_as_often_as_every_other():
    ids, counts = np.array([4] * 5 + [9] * 2), np.zeros(7)
    for _ in range(2000):
        counts[bound_contributions(ids, max_per_user=2)] += 1
    assert (counts[5:] == 2000).all()
    assert (abs(counts[:5] / 2000 - 0.4) < 5 * np.sqrt(0.24 / 2000)).all()


@pytest.mark.parametrize(
    "ids", [[1.0, 2.0], [1, "a"], np.array([1, "a"], object), [True], [-1, 2**63]]
)
def test_ids_that_may_not_tell_users_apart_are_refused(ids):
    with pytest.raises(TypeError, match=r"`ids` must be whole numbers or strings"):
        bound_contributions(ids, max_per_user=1)


@pytest.mark.parametrize(
    ("ids", "missing"),
    [
        ([1.0, np.nan, 2.0, np.nan], 2),
        (["a", float("nan"), "b"], 1),
        (["a", None, "nan"], 1),
        (np.array(["2020-01-01", "NaT"], "datetime64[D]"), 1),
    ],
)
def test_missing_ids_are_counted_and_the_advice_works(ids, missing):
    known = r"`known = pandas\.notna\(ids\)`"
    message = rf"ids with {missing} missing of {len(ids)}\. .*{known}"
    with pytest.raises(TypeError, match=message):
        bound_contributions(ids, max_per_user=1)
    pandas = pytest.importorskip("pandas")
    for each in (ids, pandas.Series(ids)):
        with pytest.raises(TypeError, match=message):
            bound_contributions(each, max_per_user=1)
        kept = np.asarray(each)[pandas.notna(each)].astype(str)
        assert len(bound_contributions(kept, max_per_user=1)) == len(ids) - missing


def test_columns_of_pandas():
    pandas = pytest.importorskip("pandas")
    names = pandas.DataFrame({"who": ["b", "a", "b", "c"], "at": [1, 2, 1, 3]})
    for ids in (names.who, names.who.astype("string"), names.who.astype("category")):
        assert Users("ids", ids, 1).of_rows.tolist() == [0, 1, 0, 2]
        with pytest.raises(TypeError, match="ids with 1 missing of 4"):
            Users("ids", ids.where(ids != "a"), 1)
    assert Users("ids", names["at"].astype("Int64"), 1).of_rows.tolist() == [0, 1, 0, 2]
    with pytest.raises(ValueError, match=r"`np\.ravel\(ids\)`"):
        Users("ids", names[["who"]], 1)
    assert len(Users("ids", np.ravel(names[["who"]]), 1)) == 3
    with pytest.raises(ValueError, match=r"`\[str\(each\) for each in ids\]`"):
        Users("ids", list(zip(names.who, names["at"], strict=True)), 1)


def test_masked_ids_are_refused_and_the_advice_works():
    ids = np.ma.masked_array([1, 1, 7, 9], mask=[0, 0, 1, 1])
    x = np.arange(4)
    with pytest.raises(TypeError, match=r"with 2 masked of 4.*`x\[~ids.mask\]`"):
        bound_contributions(ids, max_per_user=1)
    assert x[~ids.mask].tolist() == [0, 1]
    assert len(bound_contributions(ids.compressed(), max_per_user=2)) == 2
    assert len(bound_contributions(np.ma.masked_array([1, 2]), max_per_user=1)) == 2


@pytest.mark.parametrize("ids", [np.array([], int), [[1], [2]], 3])
def test_ids_of_another_shape_are_refused(ids):
    with pytest.raises(ValueError, match=r"`ids` must be one id for each row"):
        bound_contributions(ids, max_per_user=1)


@pytest.mark.parametrize("most", [0, -1, 1.5, float("nan"), float("inf")])
def test_bounds_out_of_range_are_refused(most):
    with pytest.raises(ValueError, match="max_per_user"):
        bound_contributions([1, 2], max_per_user=most)
