"""Models, caches and executors that live in a worker process: `Model.load(..., isolated=True)`.

What a device does to its process, ggml's RPC client above all, which ends it when a server dies, it
does to the worker. The caller gets WorkerDiedError, and may load the model again.

Every public method and property is forwarded, each with what `Model`, `Cache` and `Executor` say
about it, exceptions included; several threads may call as they may there, and BusyError comes where
it would. What cannot cross is refused with UnsupportedError: `Model.program`, `should_abort`, keys
of published caches.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from ._messages import MODELS, Reference, Reply, plain
from ._owned import Owned, Owner
from ._worker_process import WorkerProcess
from .cache import Cache
from .errors import InvalidArgumentError, UnsupportedError
from .executor import Executor
from .model import Model, Output, OutputName

AnyOwner = TypeVar("AnyOwner", bound=Owner)


class Remote(Owned):
    """A reference to an object of a worker; calls go `inside`.

    What it holds is no address: code that takes it for a C object's is refused.
    """

    def __enter__(self) -> int:
        raise self.refusal()

    def refusal(self) -> InvalidArgumentError:
        """Say that it was brought together with something of elsewhere."""
        return InvalidArgumentError(
            f"this {self._what} lives in a worker process: it goes together with what the same "
            "isolated model has made, and with nothing else"
        )

    @contextlib.contextmanager
    def inside(self) -> Iterator[int]:
        """Hold the object for one call; its number. ClosedError."""
        number = super().__enter__()
        try:
            yield number
        finally:
            super().__exit__(None, None, None)


def forwards(refused: Mapping[str, str]) -> Callable[[type[AnyOwner]], type[AnyOwner]]:
    """Fill a class with its base's public methods and properties, each forwarded, or refused.

    Left alone is what the class has itself, and `close`, which its base does by `_finalizer`.
    """

    def fill(proxy: type[AnyOwner]) -> type[AnyOwner]:
        for name, member in vars(proxy.__base__).items():
            if name.startswith("_") or name == "close" or name in vars(proxy):
                continue
            if name in refused:
                setattr(proxy, name, staticmethod(_refusal(refused[name])))
            else:
                setattr(proxy, name, _forwarded(name, member))
        return proxy

    return fill


def _refusal(why: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise UnsupportedError(why)

    return refuse


def _forwarded(name: str, member: Any) -> Any:
    if isinstance(member, types.FunctionType):

        @functools.wraps(member)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return _ask(self, name, arguments, keywords)

        return call

    def read(self: Any) -> Any:
        return _ask(self, name, None, {})

    if isinstance(member, property) and member.fset is None:
        return property(read, doc=member.__doc__)
    if isinstance(member, functools.cached_property):
        kept = functools.cached_property(read)
        kept.__doc__ = member.__doc__
        kept.attrname = name
        return kept
    raise TypeError(f"{name} cannot be forwarded: refuse it, or write it")


def _ask(
    proxy: Any, name: str, arguments: tuple[Any, ...] | None, keywords: Mapping[str, Any]
) -> Any:
    worker: WorkerProcess = proxy._worker
    with contextlib.ExitStack() as held:

        def sent(value: Any) -> Any:
            if not isinstance(value, Owner):
                return plain(value)
            if getattr(value, "_worker", None) is not worker:
                raise proxy._owned.refusal()
            reference: Any = value._owned
            return Reference(held.enter_context(reference.inside()))

        target = held.enter_context(proxy._owned.inside())
        sent_arguments = None if arguments is None else tuple(sent(one) for one in arguments)
        sent_keywords = {key: sent(value) for key, value in keywords.items()}
        return worker.ask(target, name, sent_arguments, sent_keywords, _received)


def _received(worker: WorkerProcess, reply: Reply) -> Any:
    if reply.made is None:
        return reply.result
    proxies: dict[str, Any] = {
        "Model": IsolatedModel,
        "Cache": IsolatedCache,
        "Executor": IsolatedExecutor,
    }
    proxy = object.__new__(proxies[reply.made])
    proxy._worker = worker
    proxy._owned = Remote(reply.number, worker.drop, reply.made.lower())
    worker.keep(reply.number)
    proxy._finalizer = weakref.finalize(proxy, proxy._owned.close)
    return proxy


_KEYS = "a cache of a worker process has no key in this one, nor this one's keys there"
_MADE = "use Model.load or Model.from_arrays with isolated=True"


@forwards({"publish": _KEYS, "unpublish": _KEYS, "find": _KEYS})
class IsolatedCache(Cache):
    """A Cache in a worker process."""

    _worker: WorkerProcess


@forwards({})
class IsolatedExecutor(Executor):
    """An Executor in a worker process."""

    _worker: WorkerProcess

    cache = Executor.cache
    n_result = Executor.n_result


@forwards(
    {
        "load": _MADE,
        "from_arrays": _MADE,
        "program": "an isolated model's program is an address in its worker process",
    }
)
class IsolatedModel(Model):
    """A Model in a worker process, which ends with the last of what it has made."""

    _worker: WorkerProcess

    tokenizer = Model.tokenizer

    def executor(
        self,
        cache: Cache | None = None,
        *,
        output: Output | OutputName = "logits",
        **options: Any,
    ) -> Executor:
        """Make an executor in the worker. Errors as `Executor`; UnsupportedError."""
        if options.get("should_abort") is not None:
            raise UnsupportedError(
                "should_abort cannot be asked from a worker process: use Executor.abort"
            )
        if options.get("cache_key") is not None:
            raise UnsupportedError(_KEYS)
        options["output"] = output
        executor: IsolatedExecutor = _ask(self, "executor", (cache,), options)
        executor._cache = cache
        executor._n_result = _ask(executor, "n_result", None, {})
        return executor


def make_model(
    maker: str, arguments: tuple[Any, ...], options: Mapping[str, Any], timeout: float | None
) -> Model:
    """Start a worker and have `Model.load` or `Model.from_arrays` called in it."""
    sent_arguments = tuple(plain(argument) for argument in arguments)
    sent_options = {name: plain(value) for name, value in options.items()}
    worker = WorkerProcess(_as_timeout(timeout))
    try:
        model: Model = worker.ask(MODELS, maker, sent_arguments, sent_options, _received)
    except BaseException:
        worker.end()
        raise
    return model


def _as_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {type(timeout).__name__}, a number of seconds is expected")
    if not (0 < timeout < math.inf):
        raise InvalidArgumentError(f"timeout is {timeout}, not a finite number of seconds > 0")
    return float(timeout)
