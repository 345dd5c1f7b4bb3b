"""Fetches what serving needs of a Hugging Face model, from where an earlier fetch broke off, and checks its digests.

The files go into huggingface_hub's own cache, so that its other tools find them, and are not fetched where those were
first. That library resolves names and lays out the snapshot; the bytes are fetched here, since it begins a file anew in
each process and compares no digest. It also reads the environment: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE,
HF_HUB_DOWNLOAD_TIMEOUT and the others.
"""

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, errors, hf_hub_url, snapshot_download
from huggingface_hub.file_download import get_hf_file_metadata, repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm

from roseinfer.errors import ConfigError
from roseinfer.model.weights.downloads import (
    CHUNK_BYTES,
    INDEX_FILE,
    Fetch,
    File,
    Interrupted,
    digest_of,
    first_line,
    size_of,
    small_files,
    weights,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(rf"[0-9a-f]{{40}}|{_SHA256.pattern}")
_TAG = re.compile(r"\w[\w.=+-]{0,127}")  # what can be the name of a file

_log = logging.getLogger(__name__)


def fetch(repo_id: str, revision: str | None, *, has_weights: bool) -> Path:
    """The directory of a model's snapshot. Without `has_weights`, only of its small files.

    Raises ConfigError, in one sentence, about `model.path` or `model.revision`.
    """
    try:
        try:
            files = _list_files(repo_id, revision)
        except (httpx2.TransportError, OSError) as error:  # HfHubHTTPError and OfflineModeIsEnabled are OSErrors
            return _cached(repo_id, revision, error)
        with _Fetch(repo_id, revision, files) as fetching:
            names = small_files(files)
            fetching.fetch(names)
            if has_weights:
                of_weights = weights(repo_id, files, fetching.content(INDEX_FILE))
                fetching.fetch(of_weights)
                names += of_weights
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=names, tqdm_class=_NoBar))
    except errors.GatedRepoError as error:
        message, param = f"{repo_id} needs permission of its owner; set HF_TOKEN to a token that has it.", "model.path"
        raise ConfigError(message, param=param) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        message = f"There is no directory {repo_id} here and no model of this name on Hugging Face"
        message += "; one that is private needs HF_TOKEN."
        raise ConfigError(message, param="model.path") from error
    except errors.RevisionNotFoundError as error:
        message = f"{repo_id} has no revision {revision} on Hugging Face."
        raise ConfigError(message, param="model.revision") from error
    except errors.LocalEntryNotFoundError as error:
        message = (
            f"There is no directory {repo_id} here, and the model cannot be fetched: Hugging Face is out of reach or "
            "switched off (HF_HUB_OFFLINE), and its cache has no copy."
        )
        raise ConfigError(message, param="model.path") from error
    except (httpx2.TransportError, OSError) as error:
        message = f"{repo_id} could not be fetched from Hugging Face: {first_line(error)}"
        raise ConfigError(message, param="model.path") from error


def _list_files(repo_id: str, revision: str | None) -> dict[str, File | None]:
    """By name; None of a file whose size or digest the list does not tell, as on some mirrors."""
    info = HfApi().model_info(
        repo_id, revision=revision, files_metadata=True, timeout=float(constants.HF_HUB_ETAG_TIMEOUT)
    )
    files = dict[str, File | None]()
    for listed in info.siblings or ():
        digest = listed.lfs.sha256 if listed.lfs else listed.blob_id or ""
        is_known = info.sha is not None and listed.size is not None and _DIGEST.fullmatch(digest)
        file = File(listed.rfilename, info.sha or "", listed.size or 0, digest, has_digest=True)
        files[listed.rfilename] = file if is_known else None
    return files


def _cached(repo_id: str, revision: str | None, error: Exception) -> Path:
    """The snapshot that is here when the hub gave none. Raises what the hub said if there is no copy."""
    if isinstance(error, errors.RevisionNotFoundError | errors.HFValidationError):
        raise error
    try:
        directory = Path(
            snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns="config.json")
        )
    except errors.LocalEntryNotFoundError as missing:
        if isinstance(error, errors.HfHubHTTPError):
            raise error from None
        raise missing from error
    if not isinstance(error, errors.OfflineModeIsEnabled):
        _log.warning("%s is taken from the cache, since Hugging Face says: %s", repo_id, first_line(error))
    return directory


class _Fetch(Fetch):
    """Fetches files of one repository into the cache's `blobs`."""

    def __init__(self, repo_id: str, revision: str | None, files: dict[str, File | None]) -> None:
        cache, folder = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=repo_id, repo_type="model")
        super().__init__(repo_id, cache / folder / "blobs", cache / ".locks" / folder)
        self._repo_id = repo_id
        self._revision = revision
        self._files = files

    def content(self, name: str) -> bytes | None:
        """A file that was fetched; None if there is none, and empty if its tag is not known."""
        file = self._files.get(name)
        return (self._blobs / file.tag).read_bytes() if file else b"" if name in self._files else None

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch what is not in the cache. A file that no answer tells enough of is left to huggingface_hub."""
        unknown = [name for name in names if self._files[name] is None]
        self._files.update(zip(unknown, self._threads.map(self._ask, unknown), strict=True))
        self.fetch_files([file for name in names if (file := self._files[name])])

    def _ask(self, name: str) -> File | None:
        """What the server tells of one file: its tag may be no digest, and then its size is all that is compared."""
        url = hf_hub_url(self._repo_id, name, revision=self._revision)
        found = get_hf_file_metadata(url, timeout=float(constants.HF_HUB_ETAG_TIMEOUT))
        if not (found.commit_hash and found.size is not None and found.etag and _TAG.fullmatch(found.etag)):
            return None
        has_digest = _SHA256.fullmatch(found.etag) is not None
        return File(name, found.commit_hash, found.size, found.etag, has_digest)

    def _append(self, file: File, partial: Path, length: int) -> None:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if length:
            headers["Range"] = f"bytes={length}-"
        url = hf_hub_url(self._repo_id, file.name, revision=file.version)
        try:
            with get_session().stream(
                "GET", url, headers=headers, follow_redirects=True, timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
            ) as answer:
                hf_raise_for_status(answer)
                is_rest = answer.status_code == httpx2.codes.PARTIAL_CONTENT  # else a server sends all of it again
                self._write(file, partial, answer.iter_bytes(CHUNK_BYTES), is_rest=is_rest)
        except httpx2.TransportError as error:
            raise Interrupted(first_line(error)) from error
        except errors.HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code not in {408, 429}:
                raise
            raise Interrupted(first_line(error)) from error

    def _digest_differs(self, path: Path, file: File) -> str:
        """Of a large file the digest is SHA-256, of a small one git's SHA-1."""
        is_large = _SHA256.fullmatch(file.tag) is not None
        digest = (
            hashlib.sha256() if is_large else hashlib.sha1(f"blob {size_of(path)}\0".encode(), usedforsecurity=False)
        )
        digest_of(path, digest.update)
        return "" if digest.hexdigest() == file.tag else f"its digest is {digest.hexdigest()} instead of {file.tag}"


class _NoBar(tqdm):  # type: ignore[misc]
    """Shows nothing: the files that huggingface_hub counts are here already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})
