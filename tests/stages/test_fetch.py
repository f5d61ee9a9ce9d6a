"""Against a small server on this machine that speaks just enough of the hub's language."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub.constants
import pytest

from ajusta.base.errors import ModelError, UserError
from ajusta.stages import fetch as fetch_module
from ajusta.stages.fetch import fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/name"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 800,  # 200 KiB: cut in the middle below
    "consolidated.safetensors": b"the same weights in another form",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another form",
    "README.md": b"read me",
}


@dataclass
class Hub:
    """What the server has and does, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # part of a path -> status, X-Error-Code
    cut_once_at: int | None = None  # send so many bytes of model.safetensors, then drop the connection
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)  # method, path, range, token
    sizes: dict[str, int] = field(default_factory=dict)  # told instead of the true ones


class Answer(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = unquote(self.path.split("?")[0])
        self.hub.asked.append((self.command, path, self.headers.get("Range"), self.headers.get("Authorization")))
        for part, (status, code) in self.hub.refuse.items():
            if re.search(part, path):
                return self.send(status, b"no", {"X-Error-Code": code}, body)
        if match := re.fullmatch(r"/api/models/org/name(?:/revision/([^/]+))?", path):
            if match[1] not in (None, "main", "v1", COMMIT):
                return self.send(404, b"no", {"X-Error-Code": "RevisionNotFound"}, body)
            return self.send_json(self.info())
        if re.fullmatch(rf"/api/models/org/name/tree/{COMMIT}", path):
            return self.send_json([{"type": "file", "oid": oid(d), "path": n, "size": len(d)} for n, d in self.items()])
        if match := re.fullmatch(rf"/org/name/resolve/{COMMIT}/(.+)", path):
            return self.send_file(match[1], body)
        return self.send(404, b"no", {"X-Error-Code": "RepoNotFound"}, body)

    def items(self):
        return self.hub.files.items()

    def info(self) -> dict:
        siblings = [{"rfilename": n, "size": self.hub.sizes.get(n, len(d)), "blobId": oid(d)} for n, d in self.items()]
        return {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, True)

    def send_file(self, name: str, body: bool) -> None:
        data = self.hub.files[name]
        headers = {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status = 200
        if body and (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        cut = self.hub.cut_once_at if body and name == "model.safetensors" else None
        if cut is not None:
            self.hub.cut_once_at = None
        self.send(status, data, headers, body, cut)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    state = Hub()
    handler = type("HubAnswer", (Answer,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # conftest switches all the rest off
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_hub_name_is_fetched_without_pickle_code_or_twins(hub, tmp_path):
    fetched = fetch(MODEL, offline=False, cache_dir=tmp_path)
    assert (fetched.reference, fetched.revision, fetched.from_cache) == (MODEL, COMMIT, False)
    wanted = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    assert read_all(fetched.path) == {name: FILES[name] for name in wanted}
    downloads = {path for method, path, *_ in hub.asked if method == "GET" and "/resolve/" in path}
    assert not any(path.endswith((".bin", ".py")) for path in downloads)
    assert {token for *_, token in hub.asked} == {"Bearer hf_secret"}


def test_a_revision_is_pinned_and_code_comes_only_with_leave(hub, tmp_path):
    fetched = fetch(MODEL, "v1", offline=False, allow_code=True, cache_dir=tmp_path)
    assert fetched.revision == COMMIT
    assert "modeling_own.py" in read_all(fetched.path)
    assert "pytorch_model.bin" not in read_all(fetched.path)


def test_a_dropped_connection_is_taken_up_where_it_broke(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is written at a time: 10 MB
    hub.cut_once_at = 100_000
    fetched = fetch(MODEL, offline=False, cache_dir=tmp_path)
    assert (fetched.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [ranges for method, path, ranges, _ in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] is None and re.fullmatch(r"bytes=\d+-", ranges[1])
    assert 0 < int(ranges[1][6:-1]) <= 100_000


def test_offline_takes_the_cache_and_asks_nobody(hub, tmp_path):
    online = fetch(MODEL, offline=False, cache_dir=tmp_path)
    asked = len(hub.asked)
    offline = fetch(MODEL, offline=True, cache_dir=tmp_path)
    assert (offline.path, offline.revision, offline.from_cache) == (online.path, COMMIT, True)
    assert len(hub.asked) == asked
    with pytest.raises(ModelError, match=r"switched off \(offline\) and .* no whole copy of org/name at revision v1"):
        fetch(MODEL, "v1", offline=True, cache_dir=tmp_path)
    (online.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no whole copy of org/name; expected a local model; go online once"):
        fetch(MODEL, offline=True, cache_dir=tmp_path)


def test_no_network_falls_back_to_the_cache_and_says_so(hub, tmp_path, monkeypatch):
    fetch(MODEL, offline=False, cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert fetch(MODEL, offline=False, cache_dir=tmp_path).from_cache
    with pytest.raises(ModelError, match=r"http://127.0.0.1:9 cannot be reached .*no whole copy of org/other"):
        fetch("org/other", offline=False, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("part", "status", "code", "message"),
    [
        ("/resolve/", 401, "GatedRepo", r"gated and no valid token was sent \(401\).*accept them at http"),
        ("/resolve/", 403, "GatedRepo", r"gated and this account has no access to it \(403\)"),
        ("/api/models", 404, "RepoNotFound", "has no model 'org/name' that this token may see"),
        ("/api/models", 401, "", r"is refused \(401\); expected a token"),
        ("/api/models", 403, "", r"is refused \(403\); expected a token"),
        ("/api/models", 500, "", "answers 500"),
    ],
)
def test_each_refusal_has_its_own_line(hub, tmp_path, monkeypatch, part, status, code, message):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.refuse[part] = (status, code)
    with pytest.raises(ModelError, match=message) as caught:
        fetch(MODEL, offline=False, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_a_missing_revision_is_named(hub, tmp_path):
    with pytest.raises(ModelError, match="org/name has no revision 'v9'; expected a branch, tag or commit"):
        fetch(MODEL, "v9", offline=False, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"only as pickle \(pytorch_model.bin\).*refs/pr/N"),
        (["config.json", "name.Q4_1.gguf"], "GGUF files and no safetensors.*hf download org/name name.Q4_1.gguf"),
        (["README.md"], "no weights in safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "seems to be a LoRA adapter"),
    ],
)
def test_a_repository_that_cannot_be_used_is_told_before_anything_is_fetched(hub, tmp_path, files, message):
    hub.files = dict.fromkeys(files, b"x")
    with pytest.raises(ModelError, match=message):
        fetch(MODEL, offline=False, cache_dir=tmp_path)
    assert not any("/resolve/" in path for _, path, *_ in hub.asked)


def test_the_disk_is_looked_at_first(hub, tmp_path):
    hub.sizes["model.safetensors"] = 1 << 60
    with pytest.raises(UserError, match=r"org/name needs 1048576 TiB more on disk and .* free; .*HF_HOME"):
        fetch(MODEL, offline=False, cache_dir=tmp_path / "not" / "yet")
    assert not any("/resolve/" in path for _, path, *_ in hub.asked)


def test_what_is_there_already_needs_no_room(hub, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    fetch(MODEL, offline=False, cache_dir=tmp_path)
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda place: usage._replace(free=0))
    assert fetch(MODEL, offline=False, cache_dir=tmp_path).revision == COMMIT


def test_local_models_are_taken_as_they_are(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "m.gguf"):
        fetched = fetch(str(path), offline=True)
        assert (fetched.path, fetched.reference, fetched.revision) == (path, str(path), None)
    with pytest.raises(UserError, match="is a local path and revision 'main' was given"):
        fetch(str(tmp_path), "main", offline=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a file; expected a model folder or a .gguf file"):
        fetch(str(tmp_path / "config.json"), offline=True)


@pytest.mark.parametrize("name", ["./smollm", "models/a/b", "smollm.gguf", "name-without-org", "a/b.gguf", "x y/z"])
def test_a_path_that_does_not_exist_shows_what_is_near(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"does not exist; expected a model folder.*there is: smollm2.gguf$"):
        fetch(name, offline=False)
    with pytest.raises(UserError, match=r"did you mean 'smollm2.gguf'"):
        fetch("./smollm.gguf", offline=False)


def test_a_name_that_the_hub_forbids_is_told(hub, tmp_path):
    with pytest.raises(UserError, match="is no hub name"):
        fetch("org/na..me", offline=False, cache_dir=tmp_path)
