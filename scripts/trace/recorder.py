"""Record the product's functions that this process executes, on all of its threads, while recording is switched on.

A call is recorded with its root: the outermost product function of its asyncio task or thread. The root tells a
request's work from a background task that happens to run at the same time. A recorder in another process is switched
on and off over a socket in a shared folder.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("coordinator", "workers", "tinkerpool")
GENERATED = ("tinkerpool/v1/", "tinkerpool/compat/")
_ASYNCIO = str(Path(asyncio.__file__).parent)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the product."""

    file: str
    """From the project's root."""
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function below a root."""

    root: Function
    function: Function
    at_ns: int
    """On the monotonic clock, which all processes of the machine share."""


class Recorder:
    """Records this process. Only one per process can be on at a time."""

    def __init__(self) -> None:
        self._first: dict[tuple[CodeType, CodeType], int] = {}
        self._functions: dict[CodeType, Function | None] = {}

    def start(self) -> None:
        """Begin a new recording."""
        self._first.clear()
        _profile_all_threads(self._note)

    def stop(self) -> list[Call]:
        """End the recording and return its calls, in no order."""
        _profile_all_threads(None)
        calls = []
        for (root, code), at_ns in list(self._first.items()):
            top, function = self._function(root), self._function(code)
            assert top is not None
            assert function is not None
            calls.append(Call(top, function, at_ns))
        return calls

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        """Profile function: note the frame's function. Events of C functions tell of a loop that began before."""
        code = frame.f_code
        if self._function(code) is not None:
            self._first.setdefault((self._root(frame), code), time.monotonic_ns())

    def _root(self, frame: FrameType) -> CodeType:
        """Return the outermost product function above the frame, within its asyncio callback or thread."""
        root, above = frame.f_code, frame.f_back
        while above is not None:
            code = above.f_code
            if code.co_name == "_run" and code.co_filename.startswith(_ASYNCIO):
                break
            if self._function(code) is not None:
                root = code
            above = above.f_back
        return root

    def _function(self, code: CodeType) -> Function | None:
        """Return the product's function that has this code, None for any other code."""
        if code not in self._functions:
            self._functions[code] = _function_of(code)
        return self._functions[code]


def _function_of(code: CodeType) -> Function | None:
    try:
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
    except ValueError:
        return None
    if not file.startswith(tuple(f"{package}/" for package in PRODUCT)) or file.startswith(GENERATED):
        return None
    return Function(file, code.co_qualname)


Profile = Callable[[FrameType, str, object], None]


def _profile_all_threads(function: Profile | None) -> None:
    """Set the profile function of threads that run and of threads that begin later, None: remove it."""
    if sys.version_info >= (3, 12):
        threading.setprofile_all_threads(function)
    else:
        threading.setprofile(function)
        _set_for_running_threads(function)


_C_PROFILE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
_c_function: Any = None
"""The C function of the profile that is set: kept alive as long as threads call it."""


def _set_for_running_threads(function: Profile | None) -> None:
    """Do what `threading.setprofile_all_threads` does from Python 3.12 on: Ray's own threads are not Python's."""
    global _c_function  # noqa: PLW0603
    previous = _c_function  # alive until no thread has it
    if function is not None:
        _c_function = _C_PROFILE(_as_c_function(function))
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_ThreadHead.restype = api.PyThreadState_Next.restype = ctypes.c_void_p
    set_profile = api["_PyEval_SetProfile"]
    set_profile.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    pointer = None if function is None else ctypes.cast(_c_function, ctypes.c_void_p)
    state = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while state:
        set_profile(state, pointer, None)
        state = api.PyThreadState_Next(ctypes.c_void_p(state))
    del previous


def _as_c_function(function: Profile) -> Callable[[int | None, FrameType, int, int | None], int]:
    def c_function(_: int | None, frame: FrameType, event: int, argument: int | None) -> int:
        function(frame, "", None)
        return 0

    return c_function


class RemoteRecorder:
    """The recorder of another process."""

    def __init__(self, path: Path) -> None:
        self._connection = Client(str(path), family="AF_UNIX")

    def start(self) -> None:
        """Begin a new recording; it is on when this returns."""
        self._connection.send("start")
        self._connection.recv()

    def stop(self) -> list[Call]:
        """End the recording and return its calls, in no order."""
        self._connection.send("stop")
        calls: list[Call] = self._connection.recv()
        return calls


def answer_in(folder: Path, process: str) -> None:
    """Let a `RemoteRecorder` record this process: answer at `PROCESS-PID.sock` in the folder, on a thread."""
    listener = Listener(str(folder / f"{process}-{os.getpid()}.sock"), family="AF_UNIX")
    threading.Thread(target=_answer, args=(listener,), name="recorder", daemon=True).start()


def _answer(listener: Listener) -> None:
    recorder = Recorder()
    connection = listener.accept()
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        if command == "start":
            recorder.start()
            connection.send(None)
        else:
            connection.send(recorder.stop())
