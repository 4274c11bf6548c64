"""A server in the place of the hub, of buckets and of other servers."""

import types

import pytest
import stand_in


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The server; caches are empty and under `tmp_path`."""
    import huggingface_hub
    from huggingface_hub import constants, file_download

    with stand_in.serve() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        no_wait = types.SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr(file_download, "time", no_wait)  # Before retries.
        monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setenv("HF_TOKEN", "secret")
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()
