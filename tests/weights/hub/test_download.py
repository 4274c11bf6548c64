import hashlib
import importlib.util
import subprocess
import sys
import time
from concurrent import futures

import huggingface_hub
import pytest
from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights.hub import urls
from vit_jax.weights.hub.download import download

CONTENT = bytes(range(256)) * 4097  # A bit more than one chunk of a download.
HASH = hashlib.sha256(CONTENT).hexdigest()


# Local paths and bad places.


def test_a_local_path_is_returned_as_it_is(tmp_path):
    (tmp_path / "a.npz").write_bytes(CONTENT)
    assert download(tmp_path / "a.npz", sha256=HASH) == tmp_path / "a.npz"
    assert download(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=f"a.npz is of {HASH}, not of the SHA-256 1234"):
        download(tmp_path / "a.npz", sha256="12345678")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "runs/x",
            "'runs/x' does not exist and is not an address .* gs://bucket/file, or a name",
        ),
        ("", "'' does not exist"),
        ("x" * 999, "xxx cannot be read: File name too long"),
        ("ftp://host/a.npz", "'ftp://host/a.npz' does not exist"),
        ("https://[host/a.npz", r"https://\[host/a.npz is not a URL"),
        ("augreg:B/15", "'augreg:B/15' is not one of augreg:Ti/16, "),
        ("hf://vit", "hf://vit is not an address on the hub .* write hf://owner/name"),
        ("hf://datasets/a/b", "is a dataset, not a model"),
        ("https://huggingface.co/a", "is not an address on the hub"),
        ("https://host/", "https://host/ names no file"),
        ("gs://bucket", "gs://bucket is a whole bucket"),
        ("https://host/a#sha256=12", "'12' is not a SHA-256: give its 64"),
        ("https://host/a#sha256=", "'' is not a SHA-256"),
    ],
)
def test_what_is_no_place_is_told(place, message):
    with pytest.raises(UserError, match=message):
        download(place)


def test_hashes_that_do_not_go_together_are_told():
    with pytest.raises(UserError, match="is given two SHA-256: aaaaaaaa and bbbbbbbb"):
        download("https://host/a#sha256=aaaaaaaa", sha256="bbbbbbbb")
    with pytest.raises(UserError, match="augreg:B/16 stands for several files"):
        download("augreg:B/16", sha256="aaaaaaaa")
    with pytest.raises(UserError, match="a/b is a folder, but a SHA-256 is for a file"):
        download("hf://a/b", sha256="aaaaaaaa")


# https://


def test_a_download_is_kept_and_asked_for_once(server, tmp_path):
    server.files["/some/a.npz"] = CONTENT
    lines = []
    first = download(f"{server.url}/some/a.npz#sha256={HASH}", log=lines.append)
    assert first.read_bytes() == CONTENT
    assert first.is_relative_to(tmp_path / "cache")
    assert lines == [f"{server.url}/some/a.npz: {first}"]
    asked = len(server.log)
    assert download(f"{server.url}/some/a.npz", sha256=HASH[:8].upper()) == first
    assert len(server.log) == asked
    assert [p.suffix for p in first.parent.iterdir() if p != first] in ([], [".lock"])


def test_addresses_with_other_queries_are_other_files(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    paths = {download(f"{server.url}/a.npz{q}") for q in ("", "?key=1", "?key=2")}
    assert len(paths) == 3
    assert not any("key" in str(path) for path in paths)
    own = download(f"{server.url}/a.npz", cache_dir=tmp_path / "own")
    assert own.is_relative_to(tmp_path / "own")


def test_one_process_downloads_and_the_others_wait(server):
    server.files["/a.npz"] = CONTENT
    server.pause["/a.npz"] = 0.3  # Until the others have come.
    with futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(download, [f"{server.url}/a.npz"] * 4))
    assert paths.pop().read_bytes() == CONTENT
    assert len(server.bodies) == 1


def kept(tmp_path):
    """Returns the files of the cache, without the locks."""
    files = (p for p in (tmp_path / "cache").rglob("*") if p.is_file())
    return [p.name for p in files if p.suffix != ".lock"]


def test_a_download_that_broke_off_leaves_nothing(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    server.break_after["/a.npz"] = [700_001, None]
    with pytest.raises(UserError, match=r"stopped after 700001 bytes .*: open http"):
        download(f"{server.url}/a.npz")
    assert kept(tmp_path) == []
    assert download(f"{server.url}/a.npz").read_bytes() == CONTENT


def test_what_a_killed_download_left_is_written_over(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    server.pause["/a.npz"] = 60
    code = "import sys; from vit_jax.weights.hub import urls as t; "
    code += "t.download(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, f"{server.url}/a.npz"])
    while not any(name.endswith(".part") for name in kept(tmp_path)):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert kept(tmp_path) == ["a.npz.part"]
    server.pause.clear()
    assert download(f"{server.url}/a.npz").read_bytes() == CONTENT
    assert kept(tmp_path) == ["a.npz"]


def test_a_wrong_hash_is_told_and_nothing_is_kept(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    wrong = "0" * 64
    with pytest.raises(UserError, match=f"has the SHA-256 {HASH}, not {wrong}"):
        download(f"{server.url}/a.npz#sha256={wrong}")
    assert kept(tmp_path) == []


def test_a_cached_file_of_another_hash_is_replaced(server):
    server.files["/a.npz"] = b"old"
    path = download(f"{server.url}/a.npz")
    server.files["/a.npz"] = CONTENT
    assert download(f"{server.url}/a.npz").read_bytes() == b"old"
    assert download(f"{server.url}/a.npz", sha256=HASH) == path
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, r"a.npz is refused \(403\): check the address"),
        (404, r"a.npz does not exist \(404\)"),
        (500, r"a.npz is not available \(500\)"),
    ],
)
def test_refusals_are_told(server, status, message):
    server.status["/a.npz"] = status
    with pytest.raises(UserError, match=message):
        download(f"{server.url}/a.npz")


def test_without_a_network_the_cache_is_used(server, monkeypatch):
    server.files["/a.npz"] = CONTENT
    path = download(f"{server.url}/a.npz")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download(f"{server.url}/a.npz") == path
    message = (
        r"b.npz is not in the cache and cannot be reached \(HF_HUB_OFFLINE is set\): "
        "open http.*b.npz in a browser and give the path"
    )
    with pytest.raises(UserError, match=message):
        download(f"{server.url}/b.npz")


def test_a_server_that_is_not_there_is_told():
    with pytest.raises(UserError, match=r"cannot be reached \(.*refused\)"):
        download("http://127.0.0.1:9/a.npz")  # The port that discards.


def test_a_folder_that_cannot_be_written_is_told(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .* VIT_JAX_CACHE"):
        download(f"{server.url}/a.npz", cache_dir=tmp_path / "file")


# gs://


@pytest.fixture
def without_credentials(monkeypatch):
    monkeypatch.setattr(urls, "_remote_path", lambda place: None)


def test_public_objects_are_read_anonymously(server, without_credentials):
    server.files["/bucket/R50+ViT-B_16.npz"] = CONTENT
    path = download("gs://bucket/R50+ViT-B_16.npz")
    assert path.read_bytes() == CONTENT


def test_a_bucket_that_refuses_names_the_copies(server, without_credentials):
    server.status["/vit_models/imagenet21k/ViT-B_16.npz"] = 403
    message = (
        r"refuses anonymous reads \(403\): `gcloud auth application-default login` and "
        "the gcs extra may help; copies: hf://google/vit-base-patch16-224-in21k, "
    )
    with pytest.raises(UserError, match=message):
        download("gs://vit_models/imagenet21k/ViT-B_16.npz")


def test_an_absent_object_is_told(server, without_credentials):
    with pytest.raises(
        UserError, match=r"does not exist as a file \(404\).*-e '\.\[gcs\]'"
    ):
        download("gs://bucket/runs/x")


def test_credentials_read_what_is_refused(server, monkeypatch, tmp_path):
    # A folder stands in for what gcsfs shows of a bucket.
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "a.npz").write_bytes(CONTENT)
    monkeypatch.setattr(
        urls,
        "_remote_path",
        lambda place: epath.Path(place.replace("gs://", f"{tmp_path}/")),
    )
    run = download("gs://bucket/run/")
    assert isinstance(run, epath.Path)
    assert run == epath.Path(tmp_path / "bucket" / "run")
    server.status["/bucket/a.npz"] = 403
    with pytest.raises(UserError, match=f"has the SHA-256 {HASH}, not 0000"):
        download("gs://bucket/a.npz#sha256=" + "0" * 64)
    path = download(f"gs://bucket/a.npz#sha256={HASH}")
    assert path.is_relative_to(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    with pytest.raises(UserError, match=r"none.npz does not exist as a file \(404\)"):
        download("gs://bucket/none.npz")


def test_refused_credentials_are_told(server, monkeypatch):
    class Refused:
        def is_dir(self):
            raise OSError("Forbidden:\nno access")

    monkeypatch.setattr(urls, "_remote_path", lambda place: Refused())
    server.status["/bucket/b.npz"] = 401
    with pytest.raises(UserError, match=r"\(401\); with credentials: Forbidden: no"):
        download("gs://bucket/b.npz")


def test_credentials_are_tried_where_a_library_can():
    found = any(importlib.util.find_spec(n) for n in ("gcsfs", "tensorflow"))
    assert (urls._remote_path("gs://bucket/a") is not None) == found
