"""What the explorer's server answers, and to whom."""

import concurrent.futures
import http.client
import json
import re
import socket
import threading
import time
import urllib.parse

import explored
import numpy as np
import pytest

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.tools.explorer import images, server, session
from vit_jax.tools.explorer.images import Refused


@pytest.fixture
def ask(served):
    """Sends a request: method, path, body, headers -> (status, headers, content)."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=20)

    def send(method, path, body=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        path += f"{'&' if '?' in path else '?'}token={served.token}"
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    yield send
    connection.close()


def raw(served, request):
    """Sends bytes, with the token, and returns all that comes until the end."""
    host = b"Host: localhost\r\n"
    cookie = f"Cookie: other={{;vit_jax_80={served.token}\r\n".encode()
    request = request.replace(host, host + cookie, 1)
    address = "127.0.0.1", served.server_port
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def sentence(answer, status):
    """Returns why a request was refused."""
    assert answer[0] == status
    assert answer[1]["Content-Type"] == "application/json"
    return json.loads(answer[2])["error"]


@pytest.fixture
def key(ask, photograph):
    """The key of an image that was looked at."""
    return json.loads(ask("POST", "/api/see?name=photograph", photograph)[2])["key"]


def test_the_page_may_do_nothing_but_ask_its_own_server(ask):
    status, headers, content = ask("GET", "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    # No address of another place, no style or script in line.
    page = content.decode()
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    assert {name for name in named if not name.startswith("data:")} == {
        *(
            "style.css",
            "colours.js",
            "rows.js",
            "source.js",
            "overview.js",
            "thumbnails.js",
            "pane.js",
            "main.js",
        )
    }
    assert not re.search(r"<style|style=|\son\w+=|<script>", page)
    for name in ("style.css", "main.js"):
        status, headers, content = ask("GET", f"/{name}")
        assert status == 200
        assert b"http" not in content
    assert headers["Content-Type"] == "text/javascript; charset=utf-8"


def test_about(ask):
    about = json.loads(ask("GET", "/api/about")[2])
    assert [model["name"] for model in about["models"]] == [
        "models/tiny1",
        "models/tiny2",
    ]
    assert "one.png" in about["images"]
    assert about["limits"] == {"bytes": 32 << 20, "pixels": 50_000_000}


def test_looking_at_an_upload(ask, key, explored_models, photograph):
    _, headers, picture = ask("GET", f"/api/picture?image={key}&model=0")
    seen = explored_models[0].run(photograph, "photograph")
    assert headers["Content-Type"] == "image/png"
    assert picture == seen.picture
    _, headers, row = ask("GET", f"/api/row?image={key}&model=0&query=7")
    assert headers["Content-Type"] == "application/octet-stream"
    assert row == seen.rows.to_bytes(7)


def test_looking_at_an_image_of_the_folder(ask):
    name = "deeper/zwei & drei.jpg"
    status, _, content = ask("POST", f"/api/open?name={urllib.parse.quote(name)}")
    seen = json.loads(content)
    assert (status, seen["name"]) == (200, name)
    assert [len(model["classes"]) for model in seen["models"]] == [5, 0]
    assert ask("GET", "/api/thumbnail?name=torn.png")[0] == 200


def test_an_image_is_computed_once(ask, key, explored_models, photograph, monkeypatch):
    monkeypatch.setattr(type(explored_models[0]), "run", None)
    again = ask("POST", "/api/see?name=other", photograph)
    assert json.loads(again[2])["key"] == key
    assert json.loads(again[2])["name"] == "other"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::1",
        "",
    ],
)
def test_a_name_that_was_made_to_stand_for_this_computer_is_refused(ask, host):
    for path in ("/", "/api/about"):
        assert "is not this server's" in sentence(ask("GET", path, Host=host), 403)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9999", "localhost", "LOCALHOST:1", "[::1]:8"]
)
def test_this_computer_has_several_names(ask, host):
    assert ask("GET", "/api/about", Host=host)[0] == 200


def test_pages_of_other_sites_may_not_ask(ask, served, photograph):
    refused = "other sites may not ask"
    evil = {"Origin": "http://evil.example"}
    assert refused in sentence(ask("POST", "/api/see", photograph, **evil), 403)
    cross = {"Sec_Fetch_Site": "cross-site"}
    assert refused in sentence(ask("GET", "/api/about", **cross), 403)
    assert ask("GET", "/", **cross)[0] == 200  # A link may lead here.
    own = {"Origin": f"http://127.0.0.1:{served.server_port}"}
    assert ask("GET", "/api/about", **own, Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    ("host", "served", "known"),
    [
        ("10.0.0.7:80", "0.0.0.0", True),  # An address cannot be made to stand for it.
        ("evil.example", "0.0.0.0", False),
        ("gpu7:8000", "gpu7", True),
        ("gpu7.evil.example", "gpu7", False),
        ("127.0.0.2", "127.0.0.1", True),
        ("192.168.0.1", "localhost", False),
    ],
)
def test_names_of_a_server_for_the_network(host, served, known):
    if known:
        server.check_origin({"Host": host}, served, api=True)
        return
    with pytest.raises(Refused, match="is not this server's"):
        server.check_origin({"Host": host}, served, api=True)


@pytest.mark.parametrize(
    "path",
    [
        "/api/open?name=..%2Fsecret.png",
        "/api/open?name=../secret.png",
        "/api/open?name=%2Fetc%2Fpasswd",
        "/api/open?name=out.png",
        "/api/open?name=elsewhere/secret.png",
        "/api/open?name=one.png%00",
        "/api/open",
    ],
)
def test_nothing_outside_the_folder_is_read(ask, path):
    answer = ask("POST", path)
    assert "is no image of the chosen folder" in sentence(answer, 404)


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/page/main.js", "/etc/passwd", "/x"]
)
def test_only_the_page_s_own_files_are_served(ask, path):
    assert "There is nothing at" in sentence(ask("GET", path), 404)


@pytest.mark.parametrize(
    ("line", "more", "status", "reason"),
    [
        (b"GET http://[/ HTTP/1.1", b"", b"400", b"'http://[/' is no address."),
        (b"POST //[x/api/see HTTP/1.1", b"", b"404", b"There is nothing at"),
        (b"GET /api/about HTTP/1.1", b"Origin: http://[x\r\n", b"403", b"other sites"),
    ],
)
def test_malformed_addresses_are_refused(served, capfd, line, more, status, reason):
    request = line + b"\r\nHost: localhost\r\n" + more + b"\r\n"
    answer = raw(served, request)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert reason in answer
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "line", [b"POST /api/open?name=one.png", b"GET /api/about", b"GET /main.js"]
)
def test_a_body_that_nobody_asked_for_is_no_second_request(served, line):
    body = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
    length = str(len(body)).encode()
    answer = raw(
        served,
        line
        + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        + length
        + b"\r\n\r\n"
        + body,
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_body_of_unknown_length_ends_the_connection(served):
    answer = raw(
        served,
        b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    assert answer.count(b"HTTP/1.1 200 ") == 1


def test_a_connection_serves_many_requests(ask, served, photograph):
    for _ in range(2):  # Of which each has read its body.
        assert "Connection" not in ask("POST", "/api/see?name=x", photograph)[1]
        assert "Connection" not in ask("GET", "/api/about")[1]


def test_methods(ask, key):
    assert sentence(ask("GET", "/api/open?name=one.png"), 404)
    assert sentence(ask("POST", f"/api/row?image={key}&model=0&query=0"), 404)
    assert ask("PUT", "/api/see", b"x")[0] == 501


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "photo.png is empty (0 bytes)"),
        (b"GIF of no kind", "photo.png cannot be decoded (of no known format)"),
        (explored.picture(0)[:900], "photo.png cannot be decoded"),
    ],
)
def test_a_broken_image_is_one_sentence(ask, data, reason):
    said = sentence(ask("POST", "/api/see?name=photo.png", data), 415)
    assert said.startswith(reason)
    assert said.endswith("give a JPEG, PNG, WebP, GIF, BMP or TIFF file.")


def test_a_broken_image_of_the_folder(ask):
    assert sentence(ask("POST", "/api/open?name=torn.png"), 415).startswith("torn.png")


def test_a_large_upload_is_refused_unread(served):
    answer = raw(
        served,
        b"POST /api/see?name=huge HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 99999999999999\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"huge has 99,999,999,999,999 bytes, more than 33,554,432" in answer


@pytest.mark.parametrize("line", [b"Transfer-Encoding: chunked", b"Content-Length: -1"])
def test_an_upload_must_tell_its_length(served, line):
    request = b"POST /api/see HTTP/1.1\r\nHost: localhost\r\n" + line
    answer = raw(served, request + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert b"does not say how long" in answer


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"query": "16"}, 404, "There is no token 16."),
        ({"query": "-1"}, 400, "query='-1' is not a whole number."),
        ({"query": "٣"}, 400, "is not a whole number"),
        ({"model": "2"}, 404, "There is no model 2."),
        ({"model": ""}, 400, "model='' is not a whole number."),
        ({"image": "0" * 32}, 410, "no longer kept by the server: open it again"),
        ({"image": "../x"}, 410, "no longer kept"),
    ],
)
def test_rows_that_are_not_there(ask, key, change, status, reason):
    query = {"image": key, "model": "0", "query": "0"} | change
    answer = ask("GET", f"/api/row?{urllib.parse.urlencode(query)}")
    assert reason in sentence(answer, status)


def test_a_failure_is_told(served, monkeypatch, capfd):
    def fail(*_):
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(session.Session, "about", fail)
    answer = raw(served, b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"The server failed; its terminal says how." in answer
    # Before the connection is closed.
    assert "ZeroDivisionError: of a test" in capfd.readouterr().err


@pytest.mark.parametrize("answering", [False, True])
def test_an_interrupt_while_a_request_begins_reports_nothing(
    explored_models, monkeypatch, capfd, answering
):
    asked, closed = threading.Event(), threading.Event()

    def about(_):
        asked.set()
        closed.wait()
        return {}

    class Interrupted(server.Server):
        def process_request(self, request, client_address):
            super().process_request(request, client_address)
            if answering:
                asked.wait()
            raise KeyboardInterrupt

    monkeypatch.setattr(session.Session, "about", about)
    before = set(threading.enumerate())
    held = session.Session(explored_models)
    with Interrupted(held, "127.0.0.1", 0) as running:
        place = f"127.0.0.1:{running.server_port}"
        with socket.create_connection(running.server_address) as connection:
            request = f"GET /api/about?token={running.token} HTTP/1.1\r\nHost: {place}"
            connection.sendall(f"{request}\r\n\r\n".encode())
            with pytest.raises(KeyboardInterrupt):
                running.handle_request()
            closed.set()
            for thread in set(threading.enumerate()) - before:
                thread.join()
    assert capfd.readouterr().err == ""


def test_a_diverged_model_is_told(ask, monkeypatch):
    def nothing(*_):
        return {"logits": np.full((1, 5), np.nan, np.float32)}

    monkeypatch.setattr(models.Model, "classify_tokens", nothing)
    answer = ask("POST", "/api/see?name=x", explored.picture(8))
    assert "tiny1's output for x is not finite" in sentence(answer, 500)


def test_requests_at_once_share_what_is_computed():
    model, output = explored.made((3, 5), layers=2, heads=2)
    calls, start = [], threading.Barrier(8)

    def run(data, name):
        calls.append(data)
        time.sleep(0.05)  # The others come meanwhile.
        return output

    model.run = run
    held = session.Session([model])

    def ask_for(data):
        start.wait()
        return held.run(data, "x")["key"]

    one, two = explored.picture(1), explored.picture(2)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(ask_for, 4 * [one, two]))
    assert sorted(calls) == sorted([one, two])
    assert len(set(keys)) == 2
    assert all(held.output(key, 0) is output for key in keys)


def test_the_oldest_images_are_given_up(explored_models):
    one, two, three = (explored.picture(seed) for seed in range(3))
    size = session.Session(explored_models)
    first = size.run(one, "one")["key"]
    held = sum(size.output(first, model).rows.nbytes for model in (0, 1))
    small = session.Session(explored_models, budget=2 * held)
    keys = [small.run(data, "x")["key"] for data in (one, two, one, three)]
    assert small.output(keys[0], 0)
    assert small.output(keys[3], 1)
    with pytest.raises(Refused, match="no longer kept"):
        small.output(keys[1], 0)
    tiny = session.Session(explored_models, budget=0)
    assert tiny.output(tiny.run(one, "one")["key"], 0)


def test_without_a_folder(explored_models):
    held = session.Session(explored_models)
    assert held.about()["images"] == []
    with server.Server(held, "127.0.0.1", 0) as running:
        expected = r"http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32}"
        assert re.fullmatch(expected, running.address)


def test_a_port_that_is_taken(served, explored_models):
    port = served.server_port
    with pytest.raises(UserError, match=f"--port={port} cannot be served: .*--port=0"):
        server.Server(session.Session(explored_models), "127.0.0.1", port)


def test_limits_of_an_upload(ask, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 2000)
    said = sentence(ask("POST", "/api/see?name=x", explored.picture(9)), 413)
    assert said == "x has 61x47 pixels, more than 2,000: make it smaller."


def test_relevance_and_the_page_as_a_file(ask, key, explored_models, photograph):
    output = explored_models[0].run(photograph, "photograph")
    label = output.classes[1].label
    status, _, data = ask("GET", f"/api/relevance?image={key}&model=0&class={label}")
    assert status == 200
    wanted = explored_models[0].relevance(output, label)
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), wanted, rtol=1e-6)
    for model, label in ((0, 5), (1, 0)):
        answer = ask("GET", f"/api/relevance?image={key}&model={model}&class={label}")
        assert "has no relevance to a class" in sentence(answer, 404)
    status, _, data = ask("GET", f"/api/page?image={key}&name=a%20cat.png")
    assert status == 200 and data.startswith(b"<!doctype html>")
    assert b'"name": "a cat.png"' in data and b'"relevances": [{"' in data
