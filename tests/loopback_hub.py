"""A Hub on 127.0.0.1: the few endpoints that uploading and downloading small files need, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

USER, TOKEN = "tester", "hf_loopback"
MOST_BYTES = 10_000_000


@dataclass
class Commit:
    sha: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repo:
    private: bool
    commits: list[Commit] = field(default_factory=list)

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.sha == revision), None)

    def commit(self, message: str, files: dict[str, bytes]) -> Commit:
        kept = {**self.commits[-1].files, **files} if self.commits else files
        sha = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits.append(Commit(sha, message, kept))
        return self.commits[-1]


class LoopbackHub:
    """Serves while the `with` block runs; `repos` is what it holds, `requests` what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(timeout=10)
        self._server.server_close()


class _Refused(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, code: str = "", message: str = "", **also: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.also = status, code, message, also


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET

    def _answer(self, method: Any) -> None:
        self.path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append(f"{self.command} {self.path}")
        try:
            status, headers, body = 200, *method()
        except _Refused as refused:
            status, headers = refused.status, {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            body = json.dumps({"error": refused.message, **refused.also}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _is_the_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, repo_id: str) -> Repo:
        repo = self.server.hub.repos.get(repo_id)
        if repo is None or (repo.private and not self._is_the_user()):
            raise _Refused(404 if self._is_the_user() else 401, "RepoNotFound", "Repository not found")
        return repo

    def _commit(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length", 0))
        if length > MOST_BYTES:
            raise _Refused(413, message="too large for this Hub")
        return self.rfile.read(length)

    def _post(self) -> tuple[dict[str, str], bytes]:
        body = self._body()
        if not self._is_the_user():
            raise _Refused(401, message="Invalid username or password.")
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path == "/api/validate-yaml":
            return _as_json({"errors": [], "warnings": []})
        parts = self.path.removeprefix("/api/models/").split("/")
        if len(parts) == 4 and parts[2] == "preupload":
            files = json.loads(body)["files"]
            return _as_json({"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        if len(parts) == 4 and parts[2] == "commit":
            return self._commit_files("/".join(parts[:2]), parts[3], body)
        raise _Refused(501, message=f"no such endpoint here: {self.path}")

    def _create(self, wanted: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        url = f"{self.server.hub.url}/{repo_id}"
        if repo_id in self.server.hub.repos:
            raise _Refused(409, message="You already created this model repo", url=url)
        # huggingface_hub said `private` before it said `visibility`.
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repo = self.server.hub.repos[repo_id] = Repo(private)
        repo.commit("initial commit", {})
        return _as_json({"url": url, "name": repo_id})

    def _commit_files(self, repo_id: str, revision: str, body: bytes) -> tuple[dict[str, str], bytes]:
        repo = self._repo(repo_id)
        self._commit(repo, revision)
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        summary = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        commit = repo.commit(summary, files)
        url = f"{self.server.hub.url}/{repo_id}/commit/{commit.sha}"
        return _as_json({"success": True, "commitOid": commit.sha, "commitUrl": url, "hookOutput": ""})

    def _get(self) -> tuple[dict[str, str], bytes]:
        if self.path.startswith("/api/models/"):
            return self._describe(self.path.removeprefix("/api/models/").split("/"))
        owner, name, verb, revision, *path = self.path.strip("/").split("/")
        if verb != "resolve":
            raise _Refused(501, message=f"no such endpoint here: {self.path}")
        commit = self._commit(self._repo(f"{owner}/{name}"), revision)
        content = commit.files.get("/".join(path))
        if content is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return {"ETag": etag, "X-Repo-Commit": commit.sha, "Content-Type": "application/octet-stream"}, content

    def _describe(self, parts: list[str]) -> tuple[dict[str, str], bytes]:
        repo_id = "/".join(parts[:2])
        repo = self._repo(repo_id)
        commit = self._commit(repo, parts[3] if len(parts) > 3 else "main")
        if parts[2:3] == ["tree"]:
            return _as_json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in sorted(commit.files.items())
                ]
            )
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return _as_json({"id": repo_id, "sha": commit.sha, "private": repo.private, "siblings": siblings, "tags": []})


def _as_json(value: Any) -> tuple[dict[str, str], bytes]:
    return {"Content-Type": "application/json"}, json.dumps(value).encode()
