import hashlib
import pathlib

import pytest
import stand_in
from helpers import full_disk
from huggingface_hub import constants, file_download

from vit_jax.errors import UserError
from vit_jax.weights.hub import mirrors, urls
from vit_jax.weights.hub.download import download

COMMIT = stand_in.COMMIT
CONTENT = bytes(range(251)) * 4099
HASH = hashlib.sha256(CONTENT).hexdigest()
REPOSITORY = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def model(server):
    """A repository with the weights of three frameworks, the large ones as LFS."""
    server.large |= {"model.safetensors", "pytorch_model.bin", "tf_model.h5"}
    server.repositories["timm/vit"] = {
        "README.md": b"words",
        "config.json": b"{}",
        "model.safetensors": CONTENT,
        "pytorch_model.bin": b"torch",
        "tf_model.h5": b"tensorflow",
    }
    return server


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# What is fetched.


def test_weights_and_what_describes_them_are_fetched(model, tmp_path):
    lines = []
    folder = download("timm/vit", log=lines.append)
    assert names(folder) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert folder == tmp_path / f"hub/models--timm--vit/snapshots/{COMMIT}"
    assert lines == [f"hf://timm/vit: {folder}"]  # It names the commit.


@pytest.mark.parametrize(
    "place",
    [
        "hf://timm/vit/model.safetensors",
        "hf://timm/vit@main/model.safetensors",
        f"timm/vit@{COMMIT}/model.safetensors",
        f"hf://timm/vit/model.safetensors#sha256={HASH}",
        "https://huggingface.co/timm/vit/blob/main/model.safetensors",
        "https://hf.co/timm/vit/resolve/main/model.safetensors?download=true",
    ],
)
def test_a_file_comes_with_what_describes_it(model, place):
    path = download(place)
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["config.json", "model.safetensors"]


def test_other_weights_are_fetched_where_there_are_no_safetensors(model):
    del model.repositories["timm/vit"]["model.safetensors"]
    assert names(download("timm/vit")) == ["config.json", "pytorch_model.bin"]
    model.repositories["a/b"] = {"some.npz": CONTENT, "pytorch_model.bin": b"torch"}
    assert names(download("hf://a/b")) == ["some.npz"]


def test_flax_files_are_fetched_where_only_they_are(model):
    flax = {"flax_model.msgpack": CONTENT, "config.json": b"{}"}
    model.repositories["a/b"] = {"tf_model.h5": b"", **flax}
    assert names(download("hf://a/b")) == sorted(flax)
    model.repositories["a/c"] = {"pytorch_model.bin": b"torch", **flax}
    assert names(download("hf://a/c")) == ["config.json", "pytorch_model.bin"]
    shards = {f"flax_model-0000{i}-of-00002.msgpack": b"%d" % i for i in (1, 2)}
    shards |= {"flax_model.msgpack.index.json": b"{}"}
    model.repositories["a/d"] = shards
    assert names(download("hf://a/d")) == sorted(shards)


def test_all_parts_of_sharded_weights_are_fetched(model):
    parts = {f"model-0000{i}-of-00003.safetensors": b"%d" % i for i in (1, 2, 3)}
    index = {"model.safetensors.index.json": b"{}"}
    model.repositories["a/b"] = {"x.bin": b"", "preprocessor_config.json": b"{}"}
    model.repositories["a/b"] |= parts | index
    wanted = sorted([*parts, *index, "preprocessor_config.json"])
    assert names(download("hf://a/b")) == wanted
    model.repositories["a/c"] = index
    with pytest.raises(
        UserError, match="model.safetensors.index.json but none of its part"
    ):
        download("hf://a/c")


def test_a_folder_of_a_repository_is_a_model_too(model):
    files = {
        "one/model.safetensors": CONTENT,
        "one/config.json": b"{}",
        "two/a.bin": b"",
    }
    model.repositories["a/b"] = files
    path = download("hf://a/b/one")
    assert path.name == "one"
    assert names(path) == ["config.json", "model.safetensors"]
    assert names(path.parent) == ["one"]


# The cache.


def test_what_is_in_a_cache_is_not_fetched_again(model, tmp_path):
    first = download("timm/vit")
    model.log.clear()
    assert download("timm/vit") == first
    # Only whether the branch has moved.
    assert model.log == [("GET", "/api/models/timm/vit", "")]
    model.log.clear()
    assert download(f"timm/vit@{COMMIT}") == first
    assert model.log == []
    own = download("timm/vit", cache_dir=tmp_path / "own")
    assert own.is_relative_to(tmp_path / "own")
    model.log.clear()
    assert download(f"timm/vit@{COMMIT}", cache_dir=tmp_path / "own") == own
    assert model.log == []


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_without_a_network_the_cache_is_used(model, monkeypatch, revision):
    place = f"timm/vit{revision}"
    path = download(place)
    offline(monkeypatch)
    assert download(place) == path
    assert download(f"{place}/config.json") == path / "config.json"


def test_what_another_program_put_into_the_cache_is_used(model, monkeypatch):
    from huggingface_hub import hf_hub_download

    path = hf_hub_download("timm/vit", "model.safetensors")
    offline(monkeypatch)
    assert download("timm/vit") == pathlib.Path(path).parent
    with pytest.raises(UserError, match="is not in the cache and cannot be reached"):
        download("timm/vit/pytorch_model.bin")


def test_a_hub_that_fails_leaves_the_cache(model):
    path = download("timm/vit")
    model.status["/api/models/timm/vit"] = 503
    assert download("timm/vit") == path
    with pytest.raises(UserError, match=r"README.md is not available \(503\): try"):
        download("timm/vit/README.md")


@pytest.mark.parametrize("revision", ["", f"@{COMMIT}"])
def test_what_is_not_in_the_cache_is_told(model, monkeypatch, revision):
    offline(monkeypatch)
    message = (
        rf"hf://timm/vit{revision} is not in the cache and cannot be reached \(HF_HUB_O"
        rf"FFLINE is set\): open {model.url}/timm/vit.* in a browser, save the weights"
    )
    with pytest.raises(UserError, match=message):
        download(f"timm/vit{revision}")


@pytest.mark.parametrize("revision", ["", f"@{COMMIT}"])
def test_a_hub_out_of_reach_is_told(server, monkeypatch, revision):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be reached \(.*refused\): open"):
        download(f"hf://a/b{revision}")


# Bytes.


def blobs(tmp_path):
    return list((tmp_path / "hub/models--timm--vit/blobs").iterdir())


def test_a_download_that_broke_off_leaves_nothing(model, tmp_path):
    model.break_after[f"/store/{HASH}"] = [700_003, 0]
    with pytest.raises(UserError, match=r"timm/vit/mod.* cannot be reached \(peer"):
        download("timm/vit/model.safetensors")
    assert HASH not in {blob.name for blob in blobs(tmp_path)}
    model.break_after.clear()
    path = download("timm/vit/model.safetensors")
    assert path.read_bytes() == CONTENT
    assert len(blobs(tmp_path)) == len(names(path.parent)) == 2


def test_a_failure_of_xet_is_told(model, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Data processing error:\nCAS service error")

    monkeypatch.setattr(file_download, "http_get", fail)
    message = (
        r"reached \(Data processing error: CAS service error\): set HF_HUB_DISABLE_"
    )
    with pytest.raises(UserError, match=message):
        download("timm/vit")


@pytest.mark.parametrize("place", ["timm/vit", "URL/a.npz"])
def test_a_full_disk_is_told_and_nothing_is_kept(model, tmp_path, place):
    model.files["/a.npz"] = CONTENT
    message = r"written \(File too large\): free"
    with full_disk(500_000), pytest.raises(UserError, match=message):
        download(place.replace("URL", model.url))
    sizes = [p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()]
    assert max(sizes) < 10_000


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_content_is_told_and_not_kept(model, monkeypatch, tmp_path, name):
    whole = stand_in._Handler._resolve

    def damaged(self, repository, revision, found):
        if found != name:
            return whole(self, repository, revision, found)
        return self._content(f"/{name}", b"damaged", {"X-Repo-Commit": COMMIT})

    monkeypatch.setattr(stand_in._Handler, "_resolve", damaged)
    kind = "SHA-256" if name == "model.safetensors" else "SHA-1"
    with pytest.raises(
        UserError, match=f"/{name} has the {kind} [0-9a-f]+, not [0-9a-f]"
    ):
        download(f"timm/vit/{name}")
    assert all(blob.read_bytes() != b"damaged" for blob in blobs(tmp_path))
    assert not list(tmp_path.glob(f"hub/*/snapshots/*/{name}"))


def test_a_hash_for_a_folder_is_refused(model):
    model.repositories["a/b"] = {"one/model.safetensors": CONTENT}
    for place in ("hf://a/b", "hf://a/b/one"):
        with pytest.raises(UserError, match=f"{place} is a folder, but a SHA-256 is"):
            download(place, sha256=HASH)


def test_a_hash_that_the_hub_does_not_have_costs_no_download(model):
    with pytest.raises(UserError, match=f"has the SHA-256 {HASH}, not 00000000"):
        download("timm/vit/model.safetensors", sha256="00000000")
    assert model.bodies == []
    download("timm/vit/model.safetensors")
    with pytest.raises(UserError, match=f"has the SHA-256 {HASH}, not 00000000"):
        download("timm/vit/model.safetensors", sha256="00000000")


def test_the_token_goes_to_the_hub_alone(model):
    download("timm/vit")
    tokens = dict(model.tokens)
    assert tokens.pop(f"/store/{HASH}") == ""
    assert set(tokens.values()) == {"Bearer secret"}


# Refusals.


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf://a/b", r"hf://a/b does not exist or is private \(401\): check owner"),
        ("timm/vit@v9", r"has no revision 'v9' \(404\): see .*/timm/vit/commits"),
        ("timm/vit@" + "f" * 40, r"has no revision 'ffff.* \(404\)"),
        (
            "timm/vit/model.npz",
            "has no file 'model.npz': it has README.md, config.json, model.safe",
        ),
        (
            "hf://b/none",
            r"has no weights in a known format .*: it has README.md, tf_model.h5",
        ),
        (
            "hf://b/two",
            r"has more than one model \(a.npz, b.npz\): give the path of one file",
        ),
    ],
)
def test_what_a_hub_does_not_have_is_told(model, place, message):
    model.repositories["b/none"] = {"README.md": b"", "tf_model.h5": b""}
    model.repositories["b/two"] = {"a.npz": b"a", "b.npz": b"b"}
    with pytest.raises(UserError, match=message):
        download(place)


@pytest.mark.parametrize("code", ["GatedRepo", ""])
def test_refused_files_are_told(model, monkeypatch, code):
    def refused(self, repository, revision, name):
        self._send(403, b"", {"X-Error-Code": code} if code else {})

    monkeypatch.setattr(stand_in._Handler, "_resolve", refused)
    message = {
        "GatedRepo": r"hf://timm/vit is gated \(403\): ask for access at .*/timm/vit, ",
        "": r"hf://timm/vit is refused \(403\): set HF_TOKEN",
    }
    with pytest.raises(UserError, match=message[code]):
        download("timm/vit")


def test_what_is_no_hub_is_told(server, monkeypatch):
    def page(self, *_):
        self._send(200, b"<html>")

    monkeypatch.setattr(stand_in._Handler, "_api", page)
    with pytest.raises(UserError, match=f"{server.url} does not answer as a hub"):
        download("hf://a/b")


# Names.


@pytest.fixture
def two_places(model, monkeypatch):
    """A name whose first place is a bucket, whose second is on the hub."""
    monkeypatch.setattr(urls, "_remote_path", lambda place: None)
    table = {"augreg:X/1": ("gs://bucket/a.npz", "hf://timm/vit")}
    monkeypatch.setattr(mirrors, "_SOURCES", table)
    return model


def test_the_second_place_gives_what_the_first_refuses(two_places, tmp_path):
    two_places.status["/bucket/a.npz"] = 403
    lines = []
    path = download("augreg:X/1", log=lines.append)
    assert names(path) == ["config.json", "model.safetensors"]
    assert lines[-1] == "augreg:X/1: from hf://timm/vit"
    two_places.log.clear()
    assert download("augreg:X/1") == path
    assert two_places.log == []
    del two_places.status["/bucket/a.npz"]
    two_places.files["/bucket/a.npz"] = CONTENT
    assert download("augreg:X/1", cache_dir=tmp_path / "own").name == "a.npz"


def test_all_places_that_fail_are_listed(two_places):
    two_places.status["/bucket/a.npz"] = 403
    del two_places.repositories["timm/vit"]
    message = (
        r"augreg:X/1 could not be downloaded from any mirror \(gs://bucket/a.npz refuses "
        r"anonymous reads \(403\); hf://timm/vit does not exist or is private \(401\)\)"
    )
    with pytest.raises(UserError, match=message) as caught:
        download("augreg:X/1")
    assert "\n" not in str(caught.value)
