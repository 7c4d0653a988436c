"""The part of pytest that tests use while they run, for fresh interpreters.

Marks and fixtures mean nothing there, and importing pytest takes longer than most tests: seconds
of a guest. Other names are the real one's.
"""

import contextlib
import importlib
import re
import sys


class Mark:
    """Any mark; as a decorator it gives the function back."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **options):
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self


mark = param = fixture = Mark()


class Skipped(BaseException):
    @property
    def msg(self):
        return self.args[0]


def skip(reason, allow_module_level=False):
    raise Skipped(reason)


def fail(reason):
    raise AssertionError(reason)


skip.Exception = Skipped
fail.Exception = AssertionError


class Later:
    """A module that is imported at its first use: numpy takes longer than most tests."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name), attribute)


def importorskip(name, reason=None):
    from importlib.util import find_spec

    if not find_spec(name.partition(".")[0]):
        skip(reason or f"no module {name!r}")
    return Later(name)


class Caught:
    @property
    def type(self):
        return type(self.value)


@contextlib.contextmanager
def raises(expected, *, match=None):
    caught = Caught()
    try:
        yield caught
    except expected as error:
        caught.value = error
        assert match is None or re.search(match, str(error)), f"{error!r} does not match {match!r}"
    else:
        raise AssertionError(f"{expected} was not raised")


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    light = sys.modules.pop("pytest")
    try:
        return getattr(importlib.import_module("pytest"), name)
    finally:
        sys.modules["pytest"] = light


class Explanations:
    """pytest's words for a failed assertion, wanted when there is one."""

    def __getattr__(self, name):
        return getattr(importlib.import_module("_pytest.assertion.rewrite"), name)


explanations = Explanations()
