"""Ray's actors and tasks, run in this process: the GPU has to hold what all of them put on it.

A call runs at once; where its caller runs an event loop, in a thread of its actor; a coroutine runs in a loop of its
actor. Arguments and results are copied by pickling them, as between processes. The cluster is one node with the GPUs
that the program sees.

Source: Ray 2.60, `python/ray/actor.py`, `remote_function.py`, `util/placement_group.py`. Known limits: an actor of
another rank than this process's is refused; resources are not waited for; an error is the task's own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait as first_of
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import torch

from memsize.processes.patches import LatePatches, Patch, wrapping
from memsize.torch_internals.meta import is_meta

NOTE: Final = "Ray's actors and tasks run in this process, one after the other: all of them share the GPU"
_NODE: Final = "0" * 56
_ADDRESS: Final = "127.0.0.1"
_RANK: Final = "RANK"
_OTHER_RANK: Final = (
    "an actor of Ray is rank {} of {}, but memsize runs Ray's actors in one process, for one GPU: let the job have a "
    "single GPU (verl: trainer.n_gpus_per_node=1)"
)


class ObjectRef:
    """The result of a call, which may be awaited."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        """The future that holds the result."""
        return self._future

    def hex(self) -> str:
        """A name of its own."""
        return f"{id(self):056x}"

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._future).__await__()

    def __reduce__(self) -> Any:
        return _ref_of, (_remembered(self),)


_SHARED: Final[dict[int, Any]] = {}
"""Handles and results by the numbers under which pickles have them."""
_NUMBERS: Final = count()


def _remembered(value: Any) -> int:
    number = next(_NUMBERS)
    _SHARED[number] = value
    return number


def _ref_of(number: int) -> Any:
    return _SHARED[number]


def _result(value: Any) -> ObjectRef:
    future: Future[Any] = Future()
    future.set_result(value)
    return ObjectRef(future)


def _copied(value: Any) -> Any:
    """A copy, as another process gets it; what cannot be pickled, such as a tensor on the GPU, is shared."""
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    try:
        return cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:
        return value


def _handle_of(original: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    """How another process gets at memory of the GPU, by CUDA's handle: here it is in this one."""
    if not is_meta(tensor):
        return original(tensor)
    about = (type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.nbytes)
    return _tensor_of, (*about, tensor.device.index, _remembered(tensor.detach()))


def _tensor_of(*about: Any) -> torch.Tensor:
    tensor: torch.Tensor = _SHARED.pop(about[-1])
    return tensor


def _received(args: Any, kwargs: Any) -> Any:
    """Arguments as a task gets them: results in place of their references."""

    def resolve(value: Any) -> Any:
        return value._future.result() if isinstance(value, ObjectRef) else value

    return _copied(([resolve(value) for value in args], {name: resolve(value) for name, value in kwargs.items()}))


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_LOOPS: Final[list[tuple[asyncio.AbstractEventLoop, threading.Thread]]] = []
_JOIN_SECONDS: Final = 5


_VARIABLES: Final[dict[str, str | None]] = {}
"""The variables of the environment that actors have set, as they were before."""


def close() -> None:
    """End the loops of all actors, and forget them."""
    while _VARIABLES:
        name, value = _VARIABLES.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    while _LOOPS:
        loop, thread = _LOOPS.pop()
        loop.call_soon_threadsafe(_end, loop)
        thread.join(_JOIN_SECONDS)
    _NAMED.clear()
    _SHARED.clear()


class _Executor:
    """Runs the calls of an actor."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> ObjectRef:
        args, kwargs = _received(args, kwargs)
        if inspect.iscoroutinefunction(function):
            return ObjectRef(asyncio.run_coroutine_threadsafe(_awaited(function, args, kwargs), self.loop))
        if _runs_a_loop():
            return ObjectRef(self._threads.submit(lambda: _copied(function(*args, **kwargs))))
        future: Future[Any] = Future()
        try:
            future.set_result(_copied(function(*args, **kwargs)))
        except Exception as error:
            future.set_exception(error)
        return ObjectRef(future)

    @contextmanager
    def as_current_loop(self, cls: type[Any]) -> Iterator[None]:
        """While open, an actor with coroutines is made, which may ask for its loop."""
        if _runs_a_loop() or not any(map(inspect.iscoroutinefunction, vars(cls).values())):
            yield
            return
        asyncio.set_event_loop(self.loop)
        try:
            yield
        finally:
            asyncio.set_event_loop(None)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(self._loop,), daemon=True)
            thread.start()
            _LOOPS.append((self._loop, thread))
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)


async def _awaited(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return _copied(await function(*args, **kwargs))


class _Handle:
    """An actor, whose methods have `remote`."""

    def __init__(self, actor: Any, executor: _Executor) -> None:
        self._actor = actor
        self._executor = executor
        self._actor_id = SimpleNamespace(hex=lambda: f"{id(self):032x}")
        self._number = _remembered(self)

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return _Callable(lambda args, kwargs: self._executor.call(partial(args[0], self._actor), args[1:], kwargs))
        if name in ("__ray_ready__", "__ray_terminate__"):
            return _Callable(lambda args, kwargs: _result(None))
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(self._actor, name)
        return _Callable(lambda args, kwargs: self._executor.call(method, args, kwargs))

    def __reduce__(self) -> Any:
        return _ref_of, (self._number,)


class _Callable:
    """A method or a task: it has `remote`, and `options` that change nothing here."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        self._call = call

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a call."""
        return self._call(args, kwargs)

    def options(self, **_: Any) -> _Callable:
        """The same, elsewhere in the cluster."""
        return self


class _ActorClass:
    """A class whose objects are actors; it has the attributes of the class itself."""

    _options: dict[str, Any]
    __ray_actor_class__: type[Any]

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.options().remote(*args, **kwargs)

    def options(self, **options: Any) -> Any:
        chosen = {**self._options, **options}
        return _Callable(lambda args, kwargs: _started(self.__ray_actor_class__, chosen, args, kwargs))


_NAMED: Final[dict[str, _Handle]] = {}


def _started(cls: type[Any], options: dict[str, Any], args: Any, kwargs: Any) -> _Handle:
    name = options.get("name")
    if name in _NAMED and options.get("get_if_exists"):
        return _NAMED[name]
    of_process = (options.get("runtime_env") or {}).get("env_vars") or {}
    variables = {name: str(value) for name, value in of_process.items()}
    rank, ranks = variables.get(_RANK, "0"), variables.get("WORLD_SIZE", "1")
    if rank != os.environ.get(_RANK, "0") and ranks != "1":
        raise RuntimeError(_OTHER_RANK.format(rank, ranks))
    for variable in variables:
        _VARIABLES.setdefault(variable, os.environ.get(variable))
    os.environ.update(variables)
    args, kwargs = _received(args, kwargs)
    executor = _Executor()
    with executor.as_current_loop(cls):
        handle = _Handle(cls(*args, **kwargs), executor)
    if name is not None:
        _NAMED[name] = handle
    return handle


def _remote(*args: Any, **options: Any) -> Any:
    """Make an actor or a task of a class or a function; with options alone, a decorator."""
    if not args:
        return lambda value: _made_remote(value, options)
    return _made_remote(args[0], options)


def _made_remote(value: Any, options: dict[str, Any]) -> Any:
    if not isinstance(value, type):
        executor = _Executor()
        task = _Callable(lambda args, kwargs: executor.call(value, args, kwargs))
        task._function = value  # type: ignore[attr-defined]
        return task
    derived = type(f"ActorClass({value.__name__})", (_ActorClass, value), {})
    actor_class: Any = object.__new__(derived)
    vars(actor_class).update(_options=options, __ray_actor_class__=value)
    return actor_class


def _get(refs: Any, *, timeout: float | None = None, **_: Any) -> Any:
    if isinstance(refs, (list, tuple)):
        return [_get(ref, timeout=timeout) for ref in refs]
    return refs._future.result(timeout) if isinstance(refs, ObjectRef) else refs


def _wait(refs: list[ObjectRef], *, num_returns: int = 1, timeout: float | None = None, **_: Any) -> Any:
    ready: list[ObjectRef] = []
    while len(ready) < num_returns:
        open_futures = [ref._future for ref in refs if not ref._future.done()]
        ready = [ref for ref in refs if ref._future.done()]
        if len(ready) < num_returns and not first_of(open_futures, timeout, FIRST_COMPLETED).done:
            break
    ready = ready[:num_returns]
    return ready, [ref for ref in refs if ref not in ready]


def _actor_named(name: str, namespace: str | None = None) -> _Handle:
    if name not in _NAMED:
        raise ValueError(f"Failed to look up actor with name {name!r}")
    return _NAMED[name]


class _PlacementGroup:
    def __init__(self, bundles: list[dict[str, float]], *_: Any, **__: Any) -> None:
        self.bundle_specs = bundles
        self.bundle_count = len(bundles)
        self.id = self

    def hex(self) -> str:
        return f"{id(self):036x}"

    def ready(self) -> ObjectRef:
        return _result(self)

    def wait(self, timeout_seconds: float = 30) -> bool:
        return True

    def __reduce__(self) -> Any:
        return _ref_of, (_remembered(self),)


def _table(group: Any = None) -> dict[str, Any]:
    return {"bundles_to_node_id": dict.fromkeys(range(getattr(group, "bundle_count", 1)), _NODE), "state": "CREATED"}


def _resources() -> dict[str, float]:
    return {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count()), f"node:{_ADDRESS}": 1.0}


def _node() -> dict[str, Any]:
    where = {"NodeID": _NODE, "NodeManagerAddress": _ADDRESS, "NodeManagerHostname": "localhost"}
    return {**where, "Alive": True, "alive": True, "Resources": _resources()}


def _context() -> SimpleNamespace:
    gpus = [str(index) for index in range(torch.cuda.device_count())]
    answers = {"get_node_id": _NODE, "get_job_id": "01000000", "get_actor_id": _NODE, "get_worker_id": _NODE}
    functions: dict[str, Any] = {name: lambda value=value: value for name, value in answers.items()}
    accelerators = lambda: {"GPU": gpus, "NPU": []}  # noqa: E731
    return SimpleNamespace(**functions, get_accelerator_ids=accelerators, namespace="default", gcs_address=_ADDRESS)


def later(note: Callable[[str], None]) -> dict[str, LatePatches]:
    """Return the patches of Ray by module; `note` is called when a program starts it."""
    started: list[bool] = []

    def init(*_: Any, **__: Any) -> SimpleNamespace:
        note(NOTE)
        started.append(True)
        return SimpleNamespace(address_info={"address": _ADDRESS}, dashboard_url="")

    def shutdown(*_: Any, **__: Any) -> None:
        started.clear()
        close()

    names: dict[str, Any] = {
        "init": init,
        "shutdown": shutdown,
        "is_initialized": lambda: bool(started),
        "remote": _remote,
        "get": _get,
        "put": lambda value, **_: _result(_copied(value)),
        "wait": _wait,
        "kill": lambda actor, **_: None,
        "cancel": lambda ref, **_: None,
        "nodes": lambda: [_node()],
        "cluster_resources": _resources,
        "available_resources": _resources,
        "get_actor": _actor_named,
        "get_runtime_context": _context,
        "get_gpu_ids": lambda: [*range(torch.cuda.device_count())],
        "timeline": lambda filename=None: [],
        "ObjectRef": ObjectRef,
    }
    parts: dict[str, dict[str, Any]] = {
        "ray.util": {
            "get_node_ip_address": lambda *_: _ADDRESS,
            "list_named_actors": lambda *_, **__: [*_NAMED],
            "placement_group_table": _table,
        },
        "ray.util.placement_group": {"placement_group": _PlacementGroup, "placement_group_table": _table},
        "ray._private.state": {"available_resources_per_node": lambda: {_NODE: _resources()}},
    }

    def of_ray(module: Any) -> Iterator[Patch]:
        yield from ((module, name, value) for name, value in names.items())
        for part, replaced in parts.items():
            if part in sys.modules:
                yield from ((sys.modules[part], name, value) for name, value in replaced.items())
        if (state := getattr(sys.modules.get("ray._private.state"), "state", None)) is not None:
            yield type(state), "placement_group_table", lambda _, group=None: _table(group)

    def of_states(module: Any) -> Iterator[Patch]:
        yield module, "get_actor", lambda *_, **__: {"state": "ALIVE"}

    def of_memory(module: Any) -> Iterator[Patch]:
        yield wrapping(module, "reduce_tensor", _handle_of)

    return {
        "ray": of_ray,
        "torch.multiprocessing.reductions": of_memory,
        "ray.experimental.state.api": of_states,
        "ray.util.state.api": of_states,
    }
