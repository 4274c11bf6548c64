"""Who is answered by the explorer's server: tokens, slow senders, many connections."""

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse

import pytest

from vit_jax.tools.explorer import server, session

NO_TOKEN = "This address lacks the server's token: open the whole address that"


@pytest.fixture(scope="module")
def place(served):
    """Host and port."""
    return "127.0.0.1", served.server_port


def ask(place, path, cookie="", method="GET"):
    """Sends a request by a connection of its own: (status, headers, content)."""
    with contextlib.closing(http.client.HTTPConnection(*place, timeout=20)) as sender:
        sender.request(method, path, headers={"Cookie": cookie} if cookie else {})
        answer = sender.getresponse()
        return answer.status, answer.headers, answer.read()


def assert_refused(answer):
    assert answer[0] == 403
    assert json.loads(answer[2])["error"].startswith(NO_TOKEN)
    assert "Set-Cookie" not in answer[1]


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
def test_without_the_token_nothing_is_answered(served, place, method, path):
    assert_refused(ask(place, path, method=method))
    more = "&" if "?" in path else "?"
    for wrong in ("", "x", served.token[:-1], served.token + "0", "%C3%A4"):
        assert_refused(ask(place, f"{path}{more}token={wrong}", method=method))
    name = f"vit_jax_{served.server_port}"
    assert_refused(ask(place, path, f"{name}={served.token[:-1]}x", method))
    # A stale address is not helped by a cookie, nor the cookie of another port.
    assert_refused(ask(place, f"{path}{more}token=x", f"{name}={served.token}", method))
    assert_refused(ask(place, path, f"vit_jax_1={served.token}", method))


def test_the_printed_address_brings_a_cookie_for_all_others(served, place):
    address = urllib.parse.urlsplit(served.address)
    status, headers, content = ask(place, f"{address.path}?{address.query}")
    assert status == 200
    assert served.token not in content.decode()
    pair, *rest = headers["Set-Cookie"].split("; ")
    assert rest == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert pair == f"vit_jax_{served.server_port}={served.token}"
    # Beside one of another server that no parser of cookies would take.
    for path in ("/", "/main.js", "/api/about"):
        status, headers, _ = ask(place, path, f'a={{"b": [;{pair}; c=d')
        assert status == 200
        assert "Set-Cookie" not in headers


def test_each_start_has_another_token(explored_models):
    held = session.Session(explored_models)
    with (
        server.Server(held, "127.0.0.1", 0) as one,
        server.Server(held, "127.0.0.1", 0) as two,
    ):
        assert one.token != two.token


def closed_after(place, begin, drip=b""):
    """Returns after how many seconds the server closes, and what it has answered.

    Args:
      place: of the server.
      begin: what is sent at once.
      drip: what is sent then, again and again.
    """
    with socket.create_connection(place, timeout=20) as sender:
        start, answer = time.monotonic(), b""
        sender.sendall(begin)
        sender.settimeout(0.05)
        while time.monotonic() < start + 15:
            with contextlib.suppress(TimeoutError):
                try:
                    part = sender.recv(1 << 16)
                    answer += part
                    if not part:
                        break
                    sender.sendall(drip)
                    continue
                except ConnectionError:
                    break
            with contextlib.suppress(ConnectionError):
                sender.sendall(drip)
        return time.monotonic() - start, answer


def test_slow_senders_are_dropped(served, place, monkeypatch, capfd):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    head = f"POST /api/see?name=x&token={served.token} HTTP/1.1\r\nHost: localhost\r\n"
    known = f"{head}Content-Length: 500000\r\n\r\n".encode()
    unknown = (
        b"POST /api/see HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n"
    )
    found = {}

    def measure(name, *words):
        found[name] = closed_after(place, *words)

    ways = {
        "silent": (b"",),
        "a drip of headers": (b"GET / HTTP/1.1\r\nX: ", b"x"),
        "a drip of lines": (head.encode(), b"a: b\r\n"),
        "a body that stops": (known + b"x",),
        "a drip of a body": (known, b"x"),
    }
    threads = [
        threading.Thread(target=measure, args=(name, *words))
        for name, words in ways.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (seconds, answer) in found.items():
        assert 0.4 < seconds < 5, name
        assert answer == b"", name
    # Refused at once; its body is read for as long, and no longer.
    seconds, answer = closed_after(place, unknown, b"x")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert seconds < 5
    assert capfd.readouterr().err == ""


def test_an_honest_upload_may_be_slow(served, place, monkeypatch):
    """The time begins anew with each part of a body."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.8)
    monkeypatch.setattr(server, "_CHUNK", 10)
    body = b"not an image" * 5
    head = f"POST /api/see?name=x&token={served.token} HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection(place, timeout=20) as sender:
        sender.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        start = time.monotonic()
        for i in range(0, len(body), 10):
            time.sleep(0.25)
            sender.sendall(body[i : i + 10])
        assert time.monotonic() - start > 0.8
        assert sender.recv(1 << 16).startswith(b"HTTP/1.1 415 ")


def test_many_connections_keep_nobody_out(served, place):
    """Whoever waits longest gives way, and threads stay few."""
    path = f"/api/about?token={served.token}"
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        idle = []
        for number in range(200):
            sender = stack.enter_context(socket.create_connection(place, timeout=20))
            if number % 2:  # Every second one has begun a request.
                sender.sendall(b"GET / HTTP/1.1\r\nHost: loc")
            idle.append(sender)
        start = time.monotonic()
        assert ask(place, path)[0] == 200
        assert time.monotonic() - start < 2
        # Of the longest waiting ones nothing is left, the others are still there.
        assert idle[0].recv(1) == b""
        idle[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            idle[-1].recv(1)
        assert threading.active_count() - before <= server.MAX_CONNECTIONS
        assert len(served.connections._waits) <= server.MAX_CONNECTIONS
    assert ask(place, path)[0] == 200


def test_those_that_are_answered_do_not_give_way(served, place, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    time.sleep(0.7)  # The connections of other tests end.
    go, answers = threading.Event(), []
    about = session.Session.about

    def wait(held):
        go.wait(20)
        return about(held)

    monkeypatch.setattr(session.Session, "about", wait)
    path = f"/api/about?token={served.token}"
    threads = [
        threading.Thread(target=lambda: answers.append(ask(place, path)[0]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 10
    while list(served.connections._waits.values()) != [False, False]:
        assert time.monotonic() < end
        time.sleep(0.01)
    with socket.create_connection(place, timeout=5) as third:
        assert third.recv(1) == b""  # There is no room.
    go.set()
    for thread in threads:
        thread.join()
    assert answers == [200, 200]
