"""A stand-in for the API of the Hugging Face Hub on the loopback address: users, repositories, commits, large files."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

JANE = {"name": "jane", "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]}
WRITE, READ = ({"auth": {"accessToken": {"displayName": role, "role": role}}} for role in ("write", "read"))


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        users: token -> the answer to whoami.
        repos: OWNER/NAME -> path -> content.
        requests: method and path of every request.
        failing: part of "METHOD path" -> status of the answer.
        large: files are sent as large files (git LFS), otherwise within the commit.
    """

    url: str = ""
    users: dict[str, dict] = field(default_factory=lambda: {"hf_write": JANE | WRITE, "hf_read": JANE | READ})
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    large: bool = True
    stored: dict[str, bytes] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: Hub

    def answer(self, status: int, content: object, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        request = f"{self.command} {self.path.partition('?')[0]}"
        self.hub.requests.append(request)
        for part, status in self.hub.failing.items():
            if part in request:
                return self.answer(status, {"error": "the stand-in fails"}, **{"X-Error-Message": "the stand-in fails"})
        if request.startswith("PUT /stored/"):  # no token: the address is the permission
            self.hub.stored[request.rpartition("/")[2]] = body
            return self.answer(200, {})
        user = self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            return self.answer(401, {"error": "Invalid credentials in Authorization header"})
        for pattern, action in ACTIONS.items():
            if found := re.fullmatch(pattern, request):
                return self.answer(*action(self.hub, user, body, *found.groups()))
        return self.answer(404, {"error": f"no such page: {request}"}, **{"X-Error-Code": "RepoNotFound"})

    do_GET = do_POST = do_PUT = handle_any

    def log_message(self, *_arguments) -> None:
        """Prints nothing."""


def create(hub: Hub, user: dict, body: bytes) -> tuple[int, object]:
    asked = json.loads(body)
    name = f"{asked.get('organization') or user['name']}/{asked['name']}"
    answer = {"url": f"{hub.url}/{name}"}
    if name in hub.repos:
        return 409, answer
    hub.repos[name] = {".gitattributes": b""}
    return 200, answer


def tree(hub: Hub, _user: dict, _body: bytes, repo: str) -> tuple[int, object]:
    files = hub.repos[repo].items()
    return 200, [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files]


def preupload(hub: Hub, _user: dict, body: bytes, _repo: str) -> tuple[int, object]:
    mode = {True: "lfs", False: "regular"}
    return 200, {
        "files": [
            {"path": file["path"], "uploadMode": mode[hub.large and ".safetensors" in file["path"]]}
            | {"shouldIgnore": False, "oid": None}
            for file in json.loads(body)["files"]
        ]
    }


def batch(hub: Hub, _user: dict, body: bytes, _repo: str) -> tuple[int, object]:
    objects = [
        one | {"actions": {"upload": {"href": f"{hub.url}/stored/{one['oid']}"}}} for one in json.loads(body)["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}


def commit(hub: Hub, _user: dict, body: bytes, repo: str) -> tuple[int, object]:
    files = dict(hub.repos[repo])
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        match line["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = hub.stored[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
    hub.repos[repo] = files
    return 200, {"commitUrl": f"{hub.url}/{repo}/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}


ACTIONS = {
    "GET /api/whoami-v2": lambda _hub, user, _body: (200, user),
    "POST /api/repos/create": create,
    "POST /api/validate-yaml": lambda *_: (200, {"errors": [], "warnings": []}),
    "GET /api/models/([^/]+/[^/]+)/tree/main": tree,
    "POST /api/models/([^/]+/[^/]+)/preupload/main": preupload,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": batch,
    "POST /api/models/([^/]+/[^/]+)/commit/main": commit,
}


@contextmanager
def served() -> Iterator[Hub]:
    """The state of a server that runs within the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfThisHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
