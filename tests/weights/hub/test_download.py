import hashlib
import importlib.util
from concurrent import futures

import huggingface_hub
import pytest
from etils import epath

from vit_jax.errors import UserError
from vit_jax.weights.hub import transfer
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
            "'runs/x' is not here and is no place .* gs://bucket/file, or a name",
        ),
        ("", "'' is not here"),
        ("x" * 999, "xxx cannot be read: File name too long"),
        ("ftp://host/a.npz", "'ftp://host/a.npz' is not here"),
        ("augreg:B/15", "'augreg:B/15' is none of augreg:Ti/16, "),
        ("hf://vit", "hf://vit is no place on the hub .* write hf://owner/name"),
        ("hf://datasets/a/b", "is a dataset, not a model"),
        ("https://huggingface.co/a", "is no place on the hub"),
        ("https://host/", "https://host/ names no file"),
        ("gs://bucket", "gs://bucket is a whole bucket"),
        ("https://host/a#sha256=12", "'12' is no SHA-256: give its 64"),
        ("https://host/a#sha256=", "'' is no SHA-256"),
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
    with pytest.raises(UserError, match="a/b is a folder, but a SHA-256 is of a file"):
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
    server.break_after["/a.npz"] = [300_001]  # Several requests, so that it takes time.
    with futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(download, [f"{server.url}/a.npz"] * 4))
    assert paths.pop().read_bytes() == CONTENT
    assert len(server.bodies) == 4  # Of one download.


def test_a_broken_download_goes_on_where_it_was(server):
    server.files["/a.npz"] = CONTENT
    server.break_after["/a.npz"] = [300_001]
    path = download(f"{server.url}/a.npz#sha256={HASH}")  # All in one call.
    assert path.read_bytes() == CONTENT
    spans = [span for _, span in server.bodies]
    assert spans == ["", "bytes=300001-", "bytes=600002-", "bytes=900003-"]


def test_the_next_call_goes_on_where_the_last_one_broke_off(server):
    server.files["/a.npz"] = CONTENT
    server.break_after["/a.npz"] = [700_001, 0]
    with pytest.raises(UserError, match="broke off after 700001 bytes .* resumes from"):
        download(f"{server.url}/a.npz")
    server.break_after.clear()
    server.log.clear()
    assert download(f"{server.url}/a.npz").read_bytes() == CONTENT
    assert server.bodies == [("/a.npz", "bytes=700001-")]


def leave_part(server, url, content, mark):
    """Leaves what a download that was killed leaves."""
    path = transfer._cache_path(url, None)
    path.parent.mkdir(parents=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.with_name(part.name + ".etag").write_text(mark)


@pytest.mark.parametrize("mark", ['"older"', ""])
def test_a_file_that_has_changed_starts_anew(server, mark):
    server.files["/a.npz"] = CONTENT
    leave_part(server, f"{server.url}/a.npz", b"something else", mark)
    assert download(f"{server.url}/a.npz").read_bytes() == CONTENT


def test_a_weak_etag_is_not_trusted(server):
    server.files["/a.npz"], server.etags["/a.npz"] = CONTENT, 'W/"1"'
    server.break_after["/a.npz"] = [1_000_000]
    with pytest.raises(UserError, match="broke off after 1000000 bytes"):
        download(f"{server.url}/a.npz")
    assert {span for _, span in server.bodies} == {""}


def test_a_whole_part_is_not_downloaded_again(server):
    server.files["/a.npz"], server.etags["/a.npz"] = CONTENT, "1"
    leave_part(server, f"{server.url}/a.npz", CONTENT, '"1"')
    assert download(f"{server.url}/a.npz#sha256={HASH}").read_bytes() == CONTENT


def test_a_wrong_hash_is_told_and_nothing_is_kept(server, tmp_path):
    server.files["/a.npz"] = CONTENT
    wrong = "0" * 64
    with pytest.raises(UserError, match=f"has the SHA-256 {HASH}, not {wrong}"):
        download(f"{server.url}/a.npz#sha256={wrong}")
    kept = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert [p.suffix for p in kept] in ([], [".lock"])


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
        (404, r"a.npz is not there \(404\)"),
        (500, r"a.npz is not given \(500\)"),
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
    monkeypatch.setattr(transfer, "_remote_path", lambda place: None)


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
    with pytest.raises(UserError, match=r"is not a file there \(404\).*-e '\.\[gcs\]'"):
        download("gs://bucket/runs/x")


def test_credentials_read_what_is_refused(server, monkeypatch, tmp_path):
    # A folder stands in for what gcsfs shows of a bucket.
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    (tmp_path / "bucket" / "a.npz").write_bytes(CONTENT)
    monkeypatch.setattr(
        transfer,
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
    with pytest.raises(UserError, match=r"none.npz is not a file there \(404\)"):
        download("gs://bucket/none.npz")


def test_refused_credentials_are_told(server, monkeypatch):
    class Refused:
        def is_dir(self):
            raise OSError("Forbidden:\nno access")

    monkeypatch.setattr(transfer, "_remote_path", lambda place: Refused())
    server.status["/bucket/b.npz"] = 401
    with pytest.raises(
        UserError, match=r"\(401\); with credentials: Forbidden: no acc"
    ):
        download("gs://bucket/b.npz")


def test_credentials_are_tried_where_a_library_can():
    found = any(importlib.util.find_spec(n) for n in ("gcsfs", "tensorflow"))
    assert (transfer._remote_path("gs://bucket/a") is not None) == found
