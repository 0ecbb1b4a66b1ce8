"""Objects below a URL, through fsspec: read in ranges and written whole, with retries within a bound.

Whatever serves bytes by name and range can stand behind `ObjectStore`: fsspec opens it by the scheme of the URL.
Credentials come from the environment or a profile, and from nowhere else: they are never printed or stored.
"""

import errno
import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .errors import GNNScaleError, ObjectStoreError, check_seconds, disk_errors, one_line_of
from .events import held_lock, record

REQUEST_BYTES = 8 << 20  # of one read
TIMEOUT_S = 60.0
_REQUESTS_UNDER_WAY = 4
_MOST_PARTS = 9000  # of an upload; S3 takes 10,000
_LEAST_PART_BYTES = 16 << 20
_LONGEST_PAUSE_S = 5.0
_MOST_UPLOADS = 3  # of a file whose parts could not all be sent
_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(key|sas)$|secret|token|passw|credential|access_?key|account_?key|connection_?string|sas_"
)
_SECRET_VARIABLES = re.compile(r"(?i)secret|token|passw|access_key|account_key|connection_string|sas_")
# Systems of fsspec that run templates or code of what they open, and those that open others by their options.
_RUNS_CODE = ("reference", "dask", "generic", "pyscript", "jupyter", "jlab", "dvc", "zip", "tar", "libarchive", "dir")
_RUNS_CODE += ("filecache", "simplecache", "blockcache", "cached", "asyncwrapper", "async_wrapper", "asynclocal")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
FROM_ENVIRONMENT = "give credentials by the environment or a profile, for example AWS_PROFILE"
_T = TypeVar("_T")


def is_url(path: Any) -> bool:
    """Whether a path is a URL such as s3://bucket/store, and no path of this machine."""
    return isinstance(path, str) and _URL.match(path) is not None


def query_of(path: Any) -> tuple[str, str] | None:
    """Return the database and the SQL of "duckdb:graph.db?select ..."; None of anything else."""
    if not isinstance(path, str) or not path.startswith("duckdb:") or is_url(path):
        return None
    database, _, sql = path.removeprefix("duckdb:").partition("?")
    return os.path.expanduser(database), sql


def graph_name(edges: str | os.PathLike) -> str:
    """Return a name for the graph whose edges lie at a path or URL: the file's, or its folder's for "edges"."""
    query = query_of(edges)
    edges = edges if query is None else query[0]
    path = Path(edges) if is_url(edges) else Path(edges).expanduser().absolute()
    names = (re.sub(r"[^\w-]+", "_", one.name.split(".")[0]).strip("_-") for one in (path, *path.parents))
    return next((name for name in names if name not in ("", "edges")), "graph")


def check_storage_options(options: Mapping | None, name: str = "storage_options") -> dict:
    """Return the options as a dict; ValueError: one is, or holds, a credential; its value is not shown."""
    if not isinstance(options or {}, Mapping):
        raise ValueError(f"{name} must hold names with values each, like {{endpoint_url: ...}}")
    for key, value in (options or {}).items():
        if _SECRET_NAME.search(str(key)) or (is_url(value) and carries_secret(value)):
            raise ValueError(f"{name}.{key} holds a credential, which would be stored: {FROM_ENVIRONMENT}")
        if isinstance(value, Mapping):
            check_storage_options(value, f"{name}.{key}")
    return dict(options or {})


def carries_secret(url: str) -> bool:
    """Whether a URL holds a query, which may be a signature, or a password."""
    parts = urlsplit(url)
    return bool(parts.query) or parts.password is not None


class ObjectStore:
    """The objects below a URL.

    Args:
        url: For example s3://bucket/store; file:///folder and memory://folder do as well.
        storage_options: Options of the fsspec file system, for example endpoint_url or profile; no credentials.
        timeout_s: Seconds that one request may take, with all that is tried again.

    Raises:
        ValueError: the URL or an option holds a credential, or timeout_s is no number above 0.
        ObjectStoreError: the package that opens such URLs is missing.
    """

    def __init__(self, url: str, storage_options: Mapping | None = None, timeout_s: float = TIMEOUT_S):
        if carries_secret(url):
            raise ValueError(f"{_plain_url(url)}: the URL holds a query or a password: {FROM_ENVIRONMENT}")
        if urlsplit(url).scheme.lower() in _RUNS_CODE or "::" in url:
            raise ValueError(f"{_plain_url(url)}: such URLs are not opened: say s3://, gs://, az://, https://, ...")
        check_seconds("storage_timeout_s", timeout_s)
        self.url, self.options, self.timeout_s = url.rstrip("/"), check_storage_options(storage_options), timeout_s
        self._opened: tuple[int, Any] | None = None
        self._system  # noqa: B018  a missing package is reported now

    def __reduce__(self):
        return ObjectStore, (self.url, self.options, self.timeout_s)

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of an object, all of them.

        ObjectStoreError: it is not there, is shorter, which is not tried again, or did not come in time.
        """
        path = self._path(name)

        def read_range() -> bytes:
            try:
                data = self._system.cat_file(path, start=begin, end=end)
            except (OSError, ValueError) as error:
                if _is_outside(error):
                    self._check_holds(path, end)
                raise
            if len(data) != end - begin:
                self._check_holds(path, end)
                raise OSError(f"gave {len(data)} of {end - begin} bytes")
            return data

        return self._tried("read", name, read_range)

    def _check_holds(self, path: str, end: int) -> None:
        """Raise `_Short` where the store knows that an object is shorter than `end` bytes: no retry mends that."""
        self._system.invalidate_cache()
        size = self._system.info(path).get("size")
        if size is not None and size < end:
            raise _Short(f"it holds {size} bytes, and {end} were expected")

    def stream(self, name: str, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of spans of an object in order; a few requests are under way at a time."""
        coming, pending = iter(spans), deque()
        with ThreadPoolExecutor(_REQUESTS_UNDER_WAY, thread_name_prefix="gnnscale-fetch") as pool:
            try:
                while True:
                    while len(pending) < _REQUESTS_UNDER_WAY and (span := next(coming, None)) is not None:
                        pending.append(pool.submit(self.read, name, *span))
                    if not pending:
                        return
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def read_whole(self, name: str) -> bytes | None:
        """Return a small object; None where there is none."""
        try:
            return self._tried("read", name, lambda: self._system.cat_file(self._path(name)))
        except _NotThere:
            return None

    def facts(self, name: str = "") -> dict | None:
        """Return what the store says of an object, `size` among it; None where there is none."""
        try:
            return self._tried("looked at", name, lambda: self._system.info(self._path(name)))
        except _NotThere:
            return None

    def names(self, pattern: str | None = None) -> list[str]:
        """Return the names of all objects below the URL, sorted; with a pattern, such as `*.csv`, those that match."""
        base = self._path("")

        def listed() -> list[str]:
            self._system.invalidate_cache()
            return self._system.glob(f"{base}/{pattern}") if pattern else self._system.find(base)

        with suppress(_NotThere):
            found = self._tried("listed", "", listed)
            return sorted(str(path).lstrip("/").removeprefix(base.lstrip("/")).lstrip("/") for path in found)
        return []

    def write(self, name: str, data: bytes) -> None:
        """Write a small object at once."""
        path = self._path(name)

        def put() -> None:
            if self._is_local:  # no reader sees half of it
                self._system.pipe_file(f"{path}.tmp", data)
                self._system.mv(f"{path}.tmp", path)
            else:
                self._system.pipe_file(path, data)

        self._tried("written", name, put)

    def upload(self, name: str, num_bytes: int, chunks: Callable[[], Iterator[bytes]]) -> None:
        """Write a large object in bounded memory; it appears when it is whole, but for local folders.

        `chunks` begins again to give its bytes; it is called again where an upload failed.
        """
        path, part_bytes = self._path(name), max(_LEAST_PART_BYTES, -(-num_bytes // _MOST_PARTS))

        def send() -> None:
            file = self._within(lambda: self._system.open(path, "wb", block_size=part_bytes), self.timeout_s)
            try:
                for data in chunks():
                    self._within(lambda data=data: file.write(data), self.timeout_s)
                self._within(file.close, self.timeout_s)
            except BaseException:
                with suppress(Exception):
                    file.discard()
                file.closed = True  # else it would write the rest when it is collected
                raise

        self._tried("written", name, send, bounded=False)

    def delete(self, name: str) -> None:
        """Delete an object, where there is one."""
        with suppress(_NotThere):
            self._tried("deleted", name, lambda: self._system.rm_file(self._path(name)))

    @property
    def _is_local(self) -> bool:
        return urlsplit(self.url).scheme in ("file", "local")

    @property
    def _system(self) -> Any:
        """The file system, of this process: one that was forked opens its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), _open_system(self.url, self.options)
        return self._opened[1]

    def _path(self, name: str) -> str:
        path = self._system._strip_protocol(self.url)
        return f"{path}/{name}" if name else path

    def _tried(self, doing: str, name: str, call: Callable[[], _T], bounded: bool = True) -> _T:
        """Call until it succeeds, with growing pauses, for at most `timeout_s`; not bounded: for a few times."""
        began, pause, tries = time.monotonic(), 0.1, 0
        where = f"{self.url}/{name}" if name else self.url
        while True:
            tries += 1
            left = self.timeout_s - (time.monotonic() - began)
            try:
                return self._within(call, left) if bounded else call()
            except FileNotFoundError as error:
                raise _NotThere(f"{where}: cannot be {doing}: {self._told(error, 'not there')}") from None
            except Exception as error:
                told = self._told(error)
                if _is_final(error):
                    raise ObjectStoreError(f"{where}: cannot be {doing}: {told}; {_remedy(error)}") from None
                elapsed = time.monotonic() - began
                if elapsed + pause >= self.timeout_s if bounded else tries >= _MOST_UPLOADS:
                    raise ObjectStoreError(
                        f"{where}: could not be {doing} within {elapsed:.0f} s, {tries} tries ({told}): see whether the"
                        f" store is reachable, or give it longer than storage_timeout_s={self.timeout_s:g}"
                    ) from None
                record("object_store_retry", url=where, doing=doing, error=told, tries=tries)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _within(self, call: Callable[[], _T], seconds: float) -> _T:
        """Call in a thread that is left behind where it does not answer in time."""
        answer: list = []

        def run() -> None:
            try:
                answer.append((call(), None))
            except BaseException as error:
                answer.append((None, error))

        thread = threading.Thread(target=run, name="gnnscale-request", daemon=True)
        thread.start()
        thread.join(max(seconds, 0.01))
        if not answer:
            raise TimeoutError("no answer")
        value, error = answer[0]
        if error is not None:
            raise error
        return value

    def _told(self, error: BaseException, default: str = "") -> str:
        """Return an error on one line, without queries of URLs and without any credential of this process."""
        text = re.sub(r"\?[^\s\"'>)]*", "", one_line_of(error) or default)
        for variable, value in os.environ.items():
            if value and len(value) > 3 and _SECRET_VARIABLES.search(variable):
                text = text.replace(value, "***")
        return text[:300]


class _NotThere(ObjectStoreError):
    """There is no such object."""


class _Short(ObjectStoreError):
    """An object is shorter than expected."""


def _plain_url(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _open_system(url: str, options: dict) -> Any:
    import fsspec

    scheme = urlsplit(url).scheme
    given = {"use_listings_cache": False, **options}
    if scheme in ("s3", "s3a"):  # retries are this module's: theirs know no bound of seconds
        own = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}}
        given["config_kwargs"] = {**own, **dict(options.get("config_kwargs") or {})}
    if scheme in ("file", "local"):
        given["auto_mkdir"] = True
    try:
        return fsspec.filesystem(scheme, **given)
    except ImportError as error:
        raise ObjectStoreError(
            f"{scheme}:// needs a package that is not installed ({one_line_of(error)}): "
            "pip install 'lightning-gnnscale[cloud]'"
        ) from None
    except ValueError as error:
        raise ObjectStoreError(f"{_plain_url(url)}: cannot be opened: {one_line_of(error)}") from None


def _numbers_of(error: BaseException) -> tuple[int | None, int | None]:
    """Return the system's number of an error of any library, and an HTTP server's; None where it has none."""
    return tuple(getattr(error, name, None) for name in ("errno", "status"))


def _is_final(error: BaseException) -> bool:
    """Whether trying again cannot help: who asks is refused, or the store is full."""
    if isinstance(error, GNNScaleError | PermissionError | NotImplementedError | ValueError | TypeError):
        return True
    return _numbers_of(error)[0] in _FULL or "Credentials" in type(error).__name__


def _is_outside(error: BaseException) -> bool:
    """Whether a server refused a range because the object ends before it."""
    number, status = _numbers_of(error)
    return number == errno.EINVAL or status == 416


def _remedy(error: BaseException) -> str:
    if isinstance(error, _Short):
        return "it was cut off or replaced: write or publish it again"
    if _numbers_of(error)[0] in _FULL:
        return "make space there, and run the same command again: it continues from what was written"
    return f"see the rights of who asks, and {FROM_ENVIRONMENT}"


def fetched_folder() -> Path:
    """Return where this machine keeps what it fetches: GNNSCALE_FETCHED, or a folder of the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("GNNSCALE_FETCHED") or cache / "lightning_gnnscale_fetched").absolute()


def local_copy(
    url: str, storage_options: Mapping | None = None, timeout_s: float = TIMEOUT_S, suffix: str = ".parquet"
) -> Path:
    """Return a copy of an object on this machine, fetched in order and in bounded memory; a cut fetch goes on.

    Readers take several passes over a file, so that a copy asks for each byte once. It lies below `fetched_folder`,
    under a name of its content's state: an object that has changed is fetched again. Of a folder or a glob, those
    objects that end in `suffix` are copied, into a folder that is returned.

    Raises:
        ObjectStoreError: it is not there, or could not be fetched in time; the message says how to go on.
    """
    head, _, name = url.rstrip("/").rpartition("/")
    if "*" in url:
        fixed = url[: url.index("*")].rpartition("/")[0]
        store = ObjectStore(fixed, storage_options, timeout_s)
        return _copy_all(store, store.names(url[len(fixed) + 1 :]))
    store = ObjectStore(head, storage_options, timeout_s)
    facts = store.facts(name)
    if facts is not None and facts.get("type") != "directory":
        return _copy(store, name, facts, fetched_folder() / "files" / _state(store, name, facts))
    below = ObjectStore(url, storage_options, timeout_s)
    return _copy_all(below, [one for one in below.names() if one.lower().endswith(suffix)])


def _copy_all(store: ObjectStore, names: list[str]) -> Path:
    if not names:
        raise ObjectStoreError(f"{store.url}: no such object, and no .parquet below it; check the URL")
    facts = {name: store.facts(name) or {} for name in names}
    state = hashlib.blake2b("".join(_state(store, *one) for one in facts.items()).encode(), digest_size=12).hexdigest()
    folder = fetched_folder() / "files" / state
    for name in names:
        _copy(store, name, facts[name], folder)
    return folder


def _state(store: ObjectStore, name: str, facts: dict) -> str:
    """Return what names this content of an object: where it lies, its size, and its tag or time."""
    tags = [str(facts[key]) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created") if key in facts]
    content = [store.url, name, facts.get("size"), tags[:1]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=12).hexdigest()


def _copy(store: ObjectStore, name: str, facts: dict, folder: Path) -> Path:
    if facts.get("size") is None:
        raise ObjectStoreError(f"{store.url}/{name}: the server does not tell its size; copy it to this machine")
    path, size = folder / name, int(facts["size"])
    part, remedy = path.with_name(path.name + ".part"), "make space, or set GNNSCALE_FETCHED to a larger disk"
    with disk_errors(path, "written", remedy, ObjectStoreError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with held_lock(f"{path}.lock", f"is fetching {store.url}/{name}"):
            if path.exists():
                return path
            with open(part, "ab") as file:
                done = file.seek(0, os.SEEK_END)
                if done > size:
                    file.truncate(done := 0)
                spans = ((at, min(at + REQUEST_BYTES, size)) for at in range(done, size, REQUEST_BYTES))
                for data in store.stream(name, spans):
                    file.write(data)
                    file.flush()
                os.fsync(file.fileno())
            now = store.facts(name) or {}
            if _state(store, name, now) != _state(store, name, facts):
                part.unlink()
                raise ObjectStoreError(f"{store.url}/{name}: changed while it was fetched; run the same command again")
            os.utime(part, (0, 0))  # fingerprints tell contents by the name of the folder, not by when they came
            os.replace(part, path)
            record("file_fetched", url=f"{store.url}/{name}", bytes=size)
    return path
