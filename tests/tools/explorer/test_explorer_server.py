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

from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.errors import UserError
from vit_jax.tools.explorer import server, session
from vit_jax.tools.explorer.images import Refused


@pytest.fixture
def send(served):
    """Sends a request: method, path, body, headers -> (status, headers, content)."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=20)

    def send(method, path, body=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()

    yield send
    connection.close()


def with_token(path, token):
    """Adds a token to the query of a path."""
    return f"{path}{'&' if '?' in path else '?'}token={token}"


@pytest.fixture
def ask(send, served):
    """Sends a request with the token, as `send`."""
    return lambda method, path, *body, **headers: send(
        method, with_token(path, served.token), *body, **headers
    )


def raw(served, line, *headers, body=b""):
    """Sends lines with the token and a body; returns all that comes until the end."""
    cookie = f"Cookie: other={{;vit_jax_80={served.token}"
    lines = [f"{line} HTTP/1.1", "Host: localhost", cookie, *headers, "", ""]
    address = "127.0.0.1", served.server_port
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/main.js"),
        ("GET", "/api/about"),
        ("GET", "/nowhere"),
        ("POST", "/api/open?name=one.png"),
    ],
)
def test_without_the_token_nothing_is_answered(send, served, method, path):
    def check(path, cookie=""):
        answer = send(method, path, None, Cookie=cookie)
        assert "This address lacks the server's token: open" in sentence(answer, 403)
        assert "Set-Cookie" not in answer[1]

    check(path)
    for wrong in ("", "x", served.token[:-1], served.token + "0", "%C3%A4"):
        check(with_token(path, wrong))
    name = f"vit_jax_{served.server_port}"
    check(path, f"{name}={served.token[:-1]}x")
    # A stale address is not helped by a cookie, nor the cookie of another port.
    check(with_token(path, "x"), f"{name}={served.token}")
    check(path, f"vit_jax_1={served.token}")


def test_the_printed_address_brings_a_cookie_for_all_others(
    send, served, explored_models
):
    address = urllib.parse.urlsplit(served.address)
    status, headers, content = send("GET", f"{address.path}?{address.query}")
    assert status == 200
    assert served.token not in content.decode()
    pair, *rest = headers["Set-Cookie"].split("; ")
    assert rest == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert pair == f"vit_jax_{served.server_port}={served.token}"
    # Beside one of another server that no parser of cookies would take.
    for path in ("/", "/main.js", "/api/about"):
        status, headers, _ = send("GET", path, Cookie=f'a={{"b": [;{pair}; c=d')
        assert status == 200
        assert "Set-Cookie" not in headers
    with server.Server(session.Session(explored_models), "127.0.0.1", 0) as other:
        expected = r"http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{32}"
        assert re.fullmatch(expected, other.address)
        assert other.token != served.token


def test_silent_senders_are_dropped_and_slow_ones_are_not(served, monkeypatch, capfd):
    monkeypatch.setattr(server.Handler, "timeout", 0.5)
    head = f"POST /api/see?name=x&token={served.token} HTTP/1.1\r\nHost: localhost\r\n"
    head = f"{head}Content-Length: 60\r\n\r\n".encode()
    address = "127.0.0.1", served.server_port
    for begin in (b"", b"GET / HTTP/1.1\r\nX: ", head + b"x"):
        with socket.create_connection(address, timeout=20) as sender:
            sender.sendall(begin)
            assert sender.recv(1) == b""
    with socket.create_connection(address, timeout=20) as sender:
        sender.sendall(head)
        for _ in range(5):
            time.sleep(0.2)
            sender.sendall(b"not an image")
        assert sender.recv(1 << 16).startswith(b"HTTP/1.1 415 ")
    assert capfd.readouterr().err == ""


def test_the_page_may_do_nothing_but_ask_its_own_server(ask):
    status, headers, content = ask("GET", "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    # No address of another place, no style or script in line.
    page = content.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script>", page)
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        if not name.startswith("data:"):
            status, headers, content = ask("GET", f"/{name}")
            assert status == 200
            assert b"http" not in content
    assert headers["Content-Type"] == "text/javascript; charset=utf-8"


def test_about(ask):
    about = json.loads(ask("GET", "/api/about")[2])
    names = [model["name"] for model in about["models"]]
    assert names == ["models/tiny1", "models/tiny2"]
    assert "one.png" in about["images"]
    assert about["limits"] == {"bytes": 32 << 20}


def test_looking_at_an_upload(ask, key, explored_models, photograph):
    _, headers, picture = ask("GET", f"/api/picture?image={key}&model=0")
    seen = explored_models[0].run(photograph, "photograph")
    assert headers["Content-Type"] == "image/png"
    assert picture == seen.picture
    _, headers, row = ask("GET", f"/api/row?image={key}&model=0&query=7")
    assert headers["Content-Type"] == "application/octet-stream"
    assert row == seen.rows.to_bytes(7)
    refused = ask("GET", f"/api/mask?image={key}&model=0")
    assert "Model 0 has no segmentation head" in sentence(refused, 404)


def test_looking_at_an_image_of_the_folder(ask):
    name = "deeper/zwei & drei.jpg"
    status, _, content = ask("POST", f"/api/open?name={urllib.parse.quote(name)}")
    seen = json.loads(content)
    assert (status, seen["name"]) == (200, name)
    assert [len(model["classes"]) for model in seen["models"]] == [5, 0]
    assert ask("GET", "/api/thumbnail?name=torn.png")[0] == 200


@pytest.mark.parametrize(
    ("host", "served", "known"),
    [
        ("127.0.0.1:9999", "127.0.0.1", True),
        ("LOCALHOST:1", "127.0.0.1", True),
        ("[::1]:8", "127.0.0.1", True),
        ("127.0.0.2", "127.0.0.1", True),
        # A name that was made to resolve to this computer.
        ("evil.example:80", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("192.168.0.1", "localhost", False),
        ("10.0.0.7:80", "0.0.0.0", True),  # An address cannot be made to stand for it.
        ("evil.example", "0.0.0.0", False),
        ("gpu7:8000", "gpu7", True),
        ("gpu7.evil.example", "gpu7", False),
    ],
)
def test_names_of_the_server(host, served, known):
    for api in (False, True):
        if known:
            server.check_origin({"Host": host}, served, api=api)
        else:
            with pytest.raises(Refused, match="is not this server's"):
                server.check_origin({"Host": host}, served, api=api)


def test_pages_of_other_sites_may_not_ask(ask, served, photograph):
    answer = ask("GET", "/", Host="evil.example")
    assert "is not this server's" in sentence(answer, 403)
    refused = "other sites may not use"
    evil = {"Origin": "http://evil.example"}
    assert refused in sentence(ask("POST", "/api/see", photograph, **evil), 403)
    cross = {"Sec_Fetch_Site": "cross-site"}
    assert refused in sentence(ask("GET", "/api/about", **cross), 403)
    assert ask("GET", "/", **cross)[0] == 200  # A link may lead here.
    own = {"Origin": f"http://127.0.0.1:{served.server_port}"}
    assert ask("GET", "/api/about", **own, Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "/api/open?name=..%2Fsecret.png", "not an image of the chosen folder"),
        ("POST", "/api/open?name=%2Fetc%2Fpasswd", "not an image of the chosen folder"),
        (
            "POST",
            "/api/open?name=elsewhere/secret.png",
            "not an image of the chosen fold",
        ),
        ("POST", "/api/open?name=one.png%00", "not an image of the chosen folder"),
        ("POST", "/api/open", "is not an image of the chosen folder"),
        ("GET", "/../server.py", "There is nothing at"),
        ("GET", "/%2e%2e/server.py", "There is nothing at"),
        ("GET", "/page/main.js", "There is nothing at"),
        ("GET", "/api/open?name=one.png", "There is nothing at"),
        ("POST", "/api/row", "There is nothing at"),
    ],
)
def test_nothing_else_is_read_or_served(ask, method, path, reason):
    assert reason in sentence(ask(method, path), 404)


@pytest.mark.parametrize(
    ("line", "headers", "status", "reason"),
    [
        ("PUT /api/see", [], 501, ""),
        ("GET http://[/", [], 400, "'http://[/' is not an address."),
        ("POST //[x/api/see", [], 404, "There is nothing at"),
        ("GET /api/about", ["Origin: http://[x"], 403, "other sites"),
        ("POST /api/see", ["Transfer-Encoding: chunked"], 411, "have a Content-Length"),
        (
            "POST /api/see",
            ["Content-Length: -1"],
            411,
            "does not have a Content-Length",
        ),
        (
            "POST /api/see?name=huge",
            ["Content-Length: 99999999999999"],
            413,
            "huge has 99,999,999,999,999 bytes, more than 33,554,432",
        ),
    ],
)
def test_malformed_and_large_requests_are_refused(
    served, capfd, line, headers, status, reason
):
    answer = raw(served, line, *headers).decode()
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert reason in answer
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("header", ["Content-Length: 46", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("line", ["POST /api/open?name=one.png", "GET /api/about"])
def test_a_body_that_nobody_asked_for_is_no_second_request(served, line, header):
    body = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = raw(served, line, header, body=body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_connection_serves_many_requests(ask):
    for _ in range(2):
        assert "Connection" not in ask("GET", "/api/about")[1]


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
    assert sentence(ask("POST", "/api/open?name=torn.png"), 415).startswith("torn.png")


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"query": "16"}, 404, "Token 16 does not exist."),
        ({"query": "-1"}, 400, "query='-1' is not a whole number."),
        ({"query": "٣"}, 400, "is not a whole number"),
        ({"model": "2"}, 404, "Model 2 does not exist."),
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
    answer = raw(served, "GET /api/about")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"The server failed; see its terminal for the error." in answer
    # Before the connection is closed.
    assert "ZeroDivisionError: of a test" in capfd.readouterr().err


def test_an_interrupt_while_a_request_begins_reports_nothing(
    explored_models, monkeypatch, capfd
):
    closed = threading.Event()

    class Interrupted(server.Server):
        def process_request(self, request, client_address):
            super().process_request(request, client_address)
            raise KeyboardInterrupt

    monkeypatch.setattr(session.Session, "about", lambda _: closed.wait() and {})
    before = set(threading.enumerate())
    with (
        Interrupted(session.Session(explored_models), "127.0.0.1", 0) as running,
        socket.create_connection(running.server_address) as connection,
    ):
        line = f"GET /api/about?token={running.token} HTTP/1.1"
        connection.sendall(f"{line}\r\nHost: localhost\r\n\r\n".encode())
        with pytest.raises(KeyboardInterrupt):
            running.handle_request()
        closed.set()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert capfd.readouterr().err == ""


def test_a_diverged_model_is_told(ask, monkeypatch):
    def nothing(*_):
        return {"logits": np.full((1, 5), np.nan, np.float32)}

    monkeypatch.setattr(LoadedModel, "classify", nothing)
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


def test_a_port_that_is_taken(served, explored_models):
    port = served.server_port
    with pytest.raises(UserError, match=f"--port={port} cannot be served: .*--port=0"):
        server.Server(session.Session(explored_models), "127.0.0.1", port)


def test_limits_of_an_upload(ask, served, monkeypatch):
    monkeypatch.setattr(served.session, "_max_megapixels", 0.002)
    said = sentence(ask("POST", "/api/see?name=x", explored.picture(9)), 413)
    assert said.startswith("x has 61x47 pixels, and the limit is max_megapixels=0.002")


def test_relevance_and_the_page_as_a_file(ask, key, explored_models, photograph):
    output = explored_models[0].run(photograph, "photograph")
    label = output.classes[1].label
    status, _, data = ask("GET", f"/api/relevance?image={key}&model=0&class={label}")
    assert status == 200
    wanted = explored_models[0].relevance(output, label)
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), wanted, rtol=1e-6)
    for model, label in ((0, 5), (1, 0)):
        answer = ask("GET", f"/api/relevance?image={key}&model={model}&class={label}")
        assert "cannot show relevance to a class" in sentence(answer, 404)
    status, _, data = ask("GET", f"/api/page?image={key}&name=a%20cat.png")
    assert status == 200 and data.startswith(b"<!doctype html>")
    assert b'"name": "a cat.png"' in data and b'"relevances": [{"' in data
