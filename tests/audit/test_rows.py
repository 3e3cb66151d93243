import numpy as np
import pytest

from tests import small
from tfdp.audit.rows import rows_of_fit


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_an_outlier_is_far_from_all_others_however_large_they_are(scale):
    x, y = small.data()
    rows = rows_of_fit(small.private(), (x * scale, y, None), 4, None, None)
    for one in rows.rest:
        without, sizes = (
            np.abs(rows.with_one(one, is_outlier=is_outlier).x).max(1)
            for is_outlier in (False, True)
        )
        np.testing.assert_array_equal(sizes[:-1], without[:-1])
        assert sizes[-1] == pytest.approx(1e3 * without.max(), rel=1e-5)


def test_an_outlier_of_nothing_is_nothing():
    x, y = small.data()
    x[:] = 0
    rows = rows_of_fit(small.private(), (x, y, None), 4, None, None)
    batch = rows.with_one(int(rows.rest[0]), is_outlier=True)
    np.testing.assert_array_equal(batch.x, 0)


def test_an_outlier_alone_in_its_batch_is_finite():
    rows = rows_of_fit(small.private(), (*small.data(), None), 1, None, None)
    assert np.isfinite(rows.with_one(int(rows.rest[0]), is_outlier=True).x).all()
