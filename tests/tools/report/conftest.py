"""A report of every kind of run, made once."""

import pytest
import report_runs

from vit_jax.analysis.charts import Chart
from vit_jax.tools.report import pages, results


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return report_runs.everything(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def read(folders):
    return results.read_runs(folders)


@pytest.fixture(scope="session")
def parts(read):
    return pages.sections(read)


@pytest.fixture(scope="session")
def found(read):
    return results.collect(read)


@pytest.fixture(scope="session")
def written(folders, tmp_path_factory):
    """A report of everything; returns its folder."""
    out = tmp_path_factory.mktemp("report") / "deeper" / "report"
    pages.write_report(folders, out)
    return out


@pytest.fixture(scope="session")
def charts(parts):
    """Name -> chart."""
    return {chart.name: chart for chart in report_runs.blocks(parts, Chart)}
