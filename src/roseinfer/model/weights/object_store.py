"""Fetches what serving needs of a model in S3, from where an earlier fetch broke off, and checks its digests.

`s3://BUCKET/FOLDER`, from any store that speaks S3's protocol, through boto3, which reads AWS's variables: keys or a
web identity, AWS_ENDPOINT_URL, AWS_REGION, AWS_CA_BUNDLE. `gs://BUCKET/FOLDER` is the same at Google, which speaks
that protocol with HMAC keys. The files go beside those from Hugging Face, into a folder of HF_HOME for each address.
"""

import base64
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from roseinfer.errors import ConfigError
from roseinfer.model.weights.downloads import (
    CHUNK_BYTES,
    INDEX_FILE,
    Fetch,
    File,
    Interrupted,
    digest_of,
    first_line,
    small_files,
    weights,
)

_ADDRESS = re.compile(r"(s3|gs)://([^/]+)/(.*[^/])/*")
_GOOGLE = "https://storage.googleapis.com"
_TIMEOUT_S = 30  # of silence, as of Hugging Face's client
_CHECKSUMS = ("ChecksumSHA256", "ChecksumCRC32")
_MAY_PASS = frozenset({408, 429, 500, 502, 503, 504})

_log = logging.getLogger(__name__)


def fetch(address: str, *, has_weights: bool) -> Path:
    """The directory with a model's files. Without `has_weights`, only with the small ones.

    Raises ConfigError, in one sentence, about `model.path`.
    """
    folder = Path(constants.HF_HOME) / "roseinfer" / hashlib.sha256(address.encode()).hexdigest()[:16]
    is_whole = folder / "whole"  # written when all files are here, so that they serve without the store
    if constants.HF_HUB_OFFLINE:
        if not is_whole.exists():
            _refuse(f"{address} cannot be fetched: HF_HUB_OFFLINE is set, and no copy is in {folder}.")
        return folder / "model"
    try:
        import botocore.exceptions as boto_errors
    except ImportError:
        _refuse(f"{address} needs the extra s3: pip install 'roseinfer[s3]'.")
    try:
        store = _Store(address)
        listed = store.files()
        if not listed:
            _refuse(f"There is nothing at {address}.")
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder / "lock"), _Fetch(store, folder) as fetching:
            wanted = [listed[name] for name in small_files(listed)]
            fetching.fetch_files(wanted)
            if has_weights:
                index = listed.get(INDEX_FILE)
                content = (folder / "blobs" / index.tag).read_bytes() if index else None
                of_weights = [listed[name] for name in weights(address, listed, content)]
                fetching.fetch_files(of_weights)
                wanted += of_weights
            _link(folder, wanted)
            if has_weights:
                is_whole.write_text(json.dumps(sorted(file.name for file in wanted)))
        return folder / "model"
    except (boto_errors.BotoCoreError, boto_errors.ClientError, OSError) as error:
        message = f"{address} could not be fetched: {first_line(error)}"
        if is_whole.exists() and not isinstance(error, boto_errors.ClientError):
            _log.warning("%s; the copy that is here serves", message)
            return folder / "model"
        raise ConfigError(message, param="model.path") from error


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message, param="model.path")


def _link(folder: Path, files: Iterable[File]) -> None:
    """Give each file its name in `model`; the bytes lie in `blobs`. Names that are no longer wanted go."""
    directory = folder / "model"
    names = {directory / file.name: file.tag for file in files}
    for path, tag in names.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(*[".."] * len(path.relative_to(folder).parts[:-1]), "blobs", tag)
        if not (path.is_symlink() and path.readlink() == target):
            path.unlink(missing_ok=True)
            path.symlink_to(target)
    for path in directory.rglob("*"):
        if path.is_symlink() and path not in names:
            path.unlink()


class _Store:
    """One address, asked through boto3."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError if the address has no bucket or no folder."""
        from boto3.session import Session
        from botocore.config import Config

        found = _ADDRESS.fullmatch(address)
        if not found:
            _refuse(f"{address} is no address such as s3://BUCKET/FOLDER.")
        scheme, self.bucket, self._prefix = found.groups()
        self.address = address
        config = Config(
            connect_timeout=_TIMEOUT_S,
            read_timeout=_TIMEOUT_S,
            retries={"mode": "standard", "max_attempts": 3},
            response_checksum_validation="when_required",  # else of whole objects, and not where they are resumed
        )
        self.client = Session().client("s3", config=config, endpoint_url=_GOOGLE if scheme == "gs" else None)

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def files(self) -> dict[str, File]:
        """What lies in the folder, by name."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self._prefix}/")
        found = {}
        for item in (item for page in pages for item in page.get("Contents", ())):
            name = item["Key"].removeprefix(f"{self._prefix}/")
            if name and not name.endswith("/"):
                tag = hashlib.sha256(f"{name} {item['ETag']}".encode()).hexdigest()
                found[name] = File(name, item["ETag"], item["Size"], tag, has_digest=True)
        return found


class _Fetch(Fetch):
    """Fetches objects of one address into its folder's `blobs`."""

    def __init__(self, store: _Store, folder: Path) -> None:
        super().__init__(store.address, folder / "blobs", folder / "locks")
        self._store = store

    def _append(self, file: File, partial: Path, length: int) -> None:
        from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError

        try:
            answer = self._store.client.get_object(
                Bucket=self._store.bucket,
                Key=self._store.key(file.name),
                IfMatch=file.version,
                **({"Range": f"bytes={length}-"} if length else {}),
            )
            is_rest = not length or answer["ResponseMetadata"]["HTTPStatusCode"] == 206
            self._write(file, partial, answer["Body"].iter_chunks(CHUNK_BYTES), is_rest=is_rest)
        except (HTTPClientError, IncompleteReadError) as error:
            raise Interrupted(first_line(error)) from error
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 412:
                raise OSError(f"{file.name} was changed meanwhile; fetch again") from error
            if status not in _MAY_PASS:
                raise
            raise Interrupted(first_line(error)) from error

    def _digest_differs(self, path: Path, file: File) -> str:
        """Compares the SHA-256 that was stored with the object, or else the tag, or else, as with KMS, the CRC32.

        The tag is the MD5; of an object of several parts the MD5 of their MD5s, and the first one tells their length.
        At a store that does not say how long a part is the size is all that is compared.
        """
        about = {"Bucket": self._store.bucket, "Key": self._store.key(file.name)}
        head = self._store.client.head_object(**about, ChecksumMode="ENABLED")
        sha256, crc32 = (base64.b64decode(head.get(name, "").partition("-")[0]) for name in _CHECKSUMS)
        expected = file.version.strip('"')
        if sha256 and head.get("ChecksumType") != "COMPOSITE":
            found, expected = _sha256_of(path), sha256.hex()
        elif re.fullmatch(r"[0-9a-f]{32}(-\d+)?", expected) and "kms" not in head.get("ServerSideEncryption", ""):
            part_bytes = self._part_bytes(about, file) if "-" in expected else file.size
            if part_bytes is None:
                return ""
            found = _md5_of_parts(path, part_bytes, is_one="-" not in expected)
        elif crc32 and head.get("ChecksumType") != "COMPOSITE":
            found, expected = _crc32_of(path), crc32.hex()
        else:
            return ""
        return "" if found == expected else f"its digest is {found} instead of {expected}"

    def _part_bytes(self, about: Mapping[str, Any], file: File) -> int | None:
        """How long each part of the object is; None at a store, such as R2, that tells nothing of single parts."""
        from botocore.exceptions import ClientError

        num_parts = int(file.version.strip('"').partition("-")[2])
        try:
            length: int = self._store.client.head_object(**about, PartNumber=1)["ContentLength"]
        except ClientError:
            return None
        return length if length and -(-file.size // length) == num_parts else None


def _sha256_of(path: Path) -> str:
    sha256 = hashlib.sha256()
    digest_of(path, sha256.update)
    return sha256.hexdigest()


def _crc32_of(path: Path) -> str:
    with path.open("rb") as content:
        crc32 = 0
        while chunk := content.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return f"{crc32:08x}"


def _md5_of_parts(path: Path, part_bytes: int, *, is_one: bool) -> str:
    """The tag of a file of one part, or of parts of this length, as S3 writes it."""
    digests, left = [hashlib.md5(usedforsecurity=False)], part_bytes
    with path.open("rb") as content:
        while chunk := content.read(min(CHUNK_BYTES, CHUNK_BYTES if is_one else left)):
            digests[-1].update(chunk)
            left -= len(chunk)
            if not is_one and not left:
                digests.append(hashlib.md5(usedforsecurity=False))
                left = part_bytes
    if is_one:
        return digests[0].hexdigest()
    parts = digests if path.stat().st_size % part_bytes else digests[:-1]
    together = hashlib.md5(b"".join(part.digest() for part in parts), usedforsecurity=False)
    return f"{together.hexdigest()}-{len(parts)}"
