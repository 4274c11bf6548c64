"""Commands and programs of the site's pages on pretraining, and what comes after them."""

import pytest
from helpers import ON_SITE, assert_took_three_steps
from test_docs import PRETRAINING, run_pages


@pytest.mark.slow
def test_the_commands_and_programs_of_pretraining_run(tmp_path):
    run_pages(PRETRAINING, tmp_path)
    for recipe in ON_SITE:
        assert_took_three_steps(tmp_path / "runs" / recipe)
