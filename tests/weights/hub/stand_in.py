"""A real HTTP server that stands in for the hub, for buckets and for other servers."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(http.server.ThreadingHTTPServer):
    """Serves files and repositories, and fails as it is told.

    Attributes:
      files: path to content, for plain downloads.
      repositories: owner/name to (file name to content), all at `COMMIT`.
      large: names of files that are stored as LFS, on another host.
      status: path to the status that is answered instead.
      break_after: path to the bytes of a body after which the connection closes, in
        turn for each request; the last counts for all that follow.
      pause: path to the seconds before the second half of a body.
      log: method, path and range of each request.
      tokens: path to the authorization that came last.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.repositories = {}, {}
        self.large, self.status, self.break_after, self.pause = set(), {}, {}, {}
        self.log, self.tokens = [], {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def bodies(self) -> list[tuple[str, str]]:
        """Path and range of the requests for content."""
        return [
            (path, span)
            for method, path, span in self.log
            if method == "GET" and not path.startswith("/api/")
        ]


@contextlib.contextmanager
def serve():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Else each answer takes 40 ms.

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        server, path = self.server, unquote(urlsplit(self.path).path)
        server.log.append((self.command, path, self.headers.get("Range", "")))
        server.tokens[path] = self.headers.get("Authorization", "")
        if path in server.status:
            self._send(server.status[path], b"no")
        elif path.startswith("/api/models/"):
            repository, _, rest = re.sub(
                "^/api/models/(.+?/[^/]+)/?", r"\1 ", path
            ).partition(" ")
            what, _, revision = rest.partition("/")
            self._api(repository, what or "revision", revision or "main")
        elif found := re.fullmatch(r"/(.+?/.+?)/resolve/(.+?)/(.+)", path):
            self._resolve(*found.groups())
        elif path in server.files:
            self._content(path, server.files[path])
        else:
            self._send(404, b"not here")

    def _api(self, repository, what, revision):
        files = self.server.repositories.get(repository)
        if files is None:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if what == "revision":
            return self._json({"id": repository, "sha": COMMIT})
        entries = []
        for name, content in files.items():
            entry = {"type": "file", "path": name, "size": len(content)}
            entry["oid"] = _git_hash(content)
            if name in self.server.large:
                oid = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return self._json(entries)

    def _resolve(self, repository, revision, name):
        content = self.server.repositories.get(repository, {}).get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": COMMIT}
        if name not in self.server.large:
            return self._content(
                f"/{repository}/{name}", content, headers, _git_hash(content)
            )
        oid = hashlib.sha256(content).hexdigest()
        self.server.files[f"/store/{oid}"] = content
        headers |= {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        # By another name of this machine: another host, which must not see the token.
        where = f"http://localhost:{self.server.server_port}/store/{oid}"
        return self._send(302, b"", headers | {"Location": where})

    def _content(self, path, content, headers=None, etag=""):
        mark = f'"{etag or hashlib.md5(content).hexdigest()}"'
        headers = {"ETag": mark, "Accept-Ranges": "bytes", **(headers or {})}
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not found:
            return self._send(200, content, headers, self._limit(path))
        start, size = int(found[1]), len(content)
        if start >= size:
            return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        return self._send(206, content[start:], headers, self._limit(path))

    def _limit(self, path):
        limits = self.server.break_after.get(path, [None])
        return limits.pop(0) if len(limits) > 1 else limits[0]

    def _json(self, value):
        self._send(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

    def _send(self, status, body, headers=None, limit=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if pause := self.server.pause.get(self.path):
            self.wfile.write(body[: len(body) // 2])
            time.sleep(pause)
            body = body[len(body) // 2 :]
        self.wfile.write(body if limit is None else body[:limit])
        if limit is not None and limit < len(body):
            self.wfile.flush()
            self.close_connection = True


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
