import threading

import pytest

from vit_jax.parallel.together import Together


def test_alone_an_exception_goes_its_way_and_no_thread_is_started():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="by hand"), Together("runs"):
        assert threading.active_count() == before
        raise ZeroDivisionError("by hand")
