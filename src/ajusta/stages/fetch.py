"""From what the user typed to files on this disk: a folder, a .gguf file, or a name on the Hugging Face hub.

Only safetensors and the small text files beside them are fetched, never pickle, never code. The hub's own client does
the transfer: interrupted downloads resume, the token comes from HF_TOKEN or `hf auth login`, HF_ENDPOINT names another
server, HF_HOME another cache. Nothing else leaves the machine, and offline nothing at all.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, constants, is_offline_mode, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of httpx or httpx2
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ajusta.base.errors import ModelError, UserError, nearest
from ajusta.base.units import MIB, show_bytes

_WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_UNWANTED = ("*/*", "consolidated*", "*.fp16*.safetensors", "*.bin", "*.pt", "*.pth")  # subfolders hold other formats
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SPARE_BYTES = 64 * MIB
_TIMEOUT_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A model that is on this disk."""

    path: Path  # a folder or a .gguf file
    reference: str  # what the user typed
    revision: str | None  # the hub's commit hash; None for a local path
    from_cache: bool = False  # the hub was not asked (offline) or not reachable: this is the last known state


def fetch(
    model: str, revision: str | None = None, *, offline: bool, allow_code: bool = False, cache_dir: Path | None = None
) -> Fetched:
    """Return where the model lies on this disk, downloading it first if it is a hub name.

    Args:
        model: an existing folder or .gguf file, taken as it is; otherwise `org/name` on the hub.
        revision: branch, tag or commit of a hub name; the main branch by default.
        offline: never touch the network; only the cache is searched. HF_HUB_OFFLINE=1 says the same.
        allow_code: also fetch .py files (for a user who trusts the author's code).
        cache_dir: another folder than the hub client's usual cache.

    Raises:
        UserError: the path does not exist, or there is too little room on the disk.
        ModelError: the hub does not have it, does not give it, cannot be reached, or has no safetensors of it.
    """
    path = Path(model).expanduser()
    if path.exists():
        return _local(model, path, revision)
    if not _is_hub_name(model):
        raise UserError(_no_such_path(model, path))
    asked = _Request(
        name=model, revision=revision, wanted=_WANTED + (("*.py",) if allow_code else ()), cache=cache_dir or _cache()
    )
    if offline or is_offline_mode():
        return _from_cache(asked, "the network is switched off (offline)", "go online once to fetch it")
    try:
        return _from_hub(asked)
    except HFValidationError as error:
        raise UserError(f"{model!r} is no hub name ({error}); expected org/name; check the spelling") from error
    except HfHubHTTPError as error:
        raise ModelError(_refused(asked, error)) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError, ConnectionError) as error:
        # The cache may hold a whole copy: better an older state, said so, than no run.
        why = f"{_endpoint()} cannot be reached ({type(error).__name__})"
        return _from_cache(asked, why, "run the same command again when there is a network (the download resumes)")
    except OSError as error:
        raise ModelError(
            f"fetching {model} broke off ({error}); expected all bytes; run the same command again, it resumes"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Request:
    name: str
    revision: str | None
    wanted: tuple[str, ...]
    cache: Path


def _local(model: str, path: Path, revision: str | None) -> Fetched:
    if revision is not None:
        raise UserError(
            f"{model} is a local path and revision {revision!r} was given; expected one of the two; drop revision"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"{model} is a file; expected a model folder or a .gguf file; give the folder {path.parent}")
    return Fetched(path=path, reference=model, revision=None)


def _is_hub_name(model: str) -> bool:
    if model.startswith((".", "/", "~")) or model.endswith((".gguf", ".safetensors", ".bin")):
        return False
    return _HUB_NAME.fullmatch(model) is not None


def _no_such_path(model: str, path: Path) -> str:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    there = sorted(entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf")
    shown = ", ".join(there[:8]) or "no folder and no .gguf file"
    near = nearest(path.name, there)
    return (
        f"{model} does not exist; expected a model folder, a .gguf file or a hub name like org/name{near}; in {parent} "
        f"there is: {shown}"
    )


def _from_hub(asked: _Request) -> Fetched:
    api = HfApi(endpoint=_endpoint())
    info = api.model_info(asked.name, revision=asked.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    sizes = _sizes(info, asked)
    _check_disk(asked, info, sizes)
    folder = snapshot_download(
        asked.name,
        revision=asked.revision,
        cache_dir=asked.cache,
        endpoint=_endpoint(),
        allow_patterns=list(asked.wanted),
        ignore_patterns=list(_UNWANTED),
        max_workers=4,
    )
    return Fetched(path=Path(folder), reference=asked.name, revision=Path(folder).name)


def _sizes(info: ModelInfo, asked: _Request) -> dict[str, int]:
    """Return the files to fetch with their bytes; refuse a repository without safetensors or config."""
    siblings = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    chosen = [file for file in siblings if _matches(file, asked.wanted) and not _matches(file, _UNWANTED)]
    name = asked.name
    if not any(file.endswith(".safetensors") for file in chosen):
        ggufs = sorted(file for file in siblings if file.endswith(".gguf"))
        if ggufs:
            raise ModelError(
                f"{name} holds GGUF files and no safetensors; expected one model; fetch one with `hf download {name} "
                f"{ggufs[0]} --local-dir .` and give its path"
            )
        pickles = sorted(file for file in siblings if file.endswith(_PICKLES))
        if pickles:
            raise ModelError(
                f"{name} has its weights only as pickle ({', '.join(pickles[:3])}), which can run code and is never "
                f"loaded; expected safetensors; look for a pull request with them and give revision refs/pr/N"
            )
        raise ModelError(f"{name} has no weights in safetensors; expected a language model; choose another repository")
    if "config.json" not in chosen:
        kind = "a LoRA adapter" if "adapter_config.json" in chosen else "no transformers model"
        raise ModelError(f"{name} has no config.json and seems to be {kind}; expected a whole model; give its base")
    return {file: siblings[file] for file in chosen}


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def _check_disk(asked: _Request, info: ModelInfo, sizes: dict[str, int]) -> None:
    storage = asked.cache / ("models--" + asked.name.replace("/", "--"))
    here = storage / "snapshots" / (info.sha or "")
    missing = sum(size for file, size in sizes.items() if not (here / file).exists())
    begun = sum(path.stat().st_size for path in storage.glob("blobs/*.incomplete"))
    needed = max(missing - begun, 0)
    place = asked.cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed and needed + _SPARE_BYTES > free:
        raise UserError(
            f"{asked.name} needs {show_bytes(needed)} more on disk and {place} has {show_bytes(free)} free; expected "
            f"room for the whole model; free some, or set HF_HOME to a bigger disk"
        )


def _from_cache(asked: _Request, why: str, advice: str) -> Fetched:
    try:
        folder = snapshot_download(
            asked.name,
            revision=asked.revision,
            cache_dir=asked.cache,
            local_files_only=True,
            allow_patterns=list(asked.wanted),
            ignore_patterns=list(_UNWANTED),
        )
    except LocalEntryNotFoundError as error:
        at = f" at revision {asked.revision}" if asked.revision else ""
        raise ModelError(
            f"{why} and {asked.cache} holds no whole copy of {asked.name}{at}; expected a local model; {advice}, or "
            f"give a local folder or .gguf file"
        ) from error
    return Fetched(path=Path(folder), reference=asked.name, revision=Path(folder).name, from_cache=True)


def _refused(asked: _Request, error: HfHubHTTPError) -> str:
    """Return the line for an answer of the hub that is a refusal; most specific first."""
    status = error.response.status_code
    page = f"{_endpoint()}/{asked.name}"
    if isinstance(error, GatedRepoError) and status == 401:
        return (
            f"{asked.name} is gated and no valid token was sent (401); expected a token of an account that has "
            f"accepted its terms; accept them at {page}, then `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, GatedRepoError):
        return (
            f"{asked.name} is gated and this account has no access to it ({status}); expected its terms to be "
            f"accepted; ask for access at {page}"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{asked.name} has no revision {asked.revision!r}; expected a branch, tag or commit; look at "
            f"{page}/tree/main"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{_endpoint()} has no model {asked.name!r} that this token may see ({status}); expected an existing "
            f"org/name; check the spelling, and for a private model log in with `hf auth login` or set HF_TOKEN"
        )
    if status in (401, 403):
        return f"{page} is refused ({status}); expected a token that may read it; `hf auth login` or set HF_TOKEN"
    return f"{page} answers {status}; expected the model's files; try again later (the download resumes)"


def _endpoint() -> str:
    """Read at call time: the hub client freezes it at import."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _cache() -> Path:
    return Path(constants.HF_HUB_CACHE)
