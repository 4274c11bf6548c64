import os

import jax
import pytest

from vit_jax.errors import LostHost, UserError
from vit_jax.parallel import distributed
from vit_jax.parallel.place import Place


@pytest.fixture
def clean(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.delenv("no_grpc_proxy")
    yield monkeypatch
    jax.config.update("jax_check_proxy_envs", True)


def test_a_web_proxy_is_not_asked_for_process_0(clean):
    distributed._pass_by_proxies("host0:1234")
    assert "no_grpc_proxy" not in os.environ
    clean.setenv("https_proxy", "http://proxy:3128")
    clean.setenv("no_proxy", "intern,10.0.0.1")
    distributed._pass_by_proxies("host0:1234")
    assert os.environ["no_grpc_proxy"] == "intern,10.0.0.1,host0"


@pytest.mark.parametrize("value", ["4", "-1", "1.5", ""])
def test_too_short_a_silence_is_refused(monkeypatch, value):
    monkeypatch.setenv("VIT_JAX_LOST_SECONDS", value)
    with pytest.raises(
        UserError, match=rf"VIT_JAX_LOST_SECONDS='{value}': .* from 5 on"
    ):
        distributed.lost_seconds()


def test_an_address_nobody_listens_at_is_tried_until_the_limit():
    place = Place("SLURM", "localhost:9", 3, 2)
    message = r"process 2 of 3 \(.*\) cannot reach process 0 at localhost:9 \(.*for 1 s"
    with pytest.raises(LostHost, match=message):
        distributed._wait_for_service(place, 1)
