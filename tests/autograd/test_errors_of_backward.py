"""Errors of a backward pass keep their type, and are RpcErrors as well."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rpcbench.autograd.engine import error_of_failure, make_failure
from rpcbench.base.errors import RemoteError, RpcError
from rpcbench.base.ids import Id
from rpcbench.serialization.pickler import Codec


class KeywordsOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code: Any = code

    def __str__(self) -> str:
        return f"{self.code}"


class Final(Exception):
    def __init_subclass__(cls) -> None:
        raise ValueError("no subclass, please")


def told(error: Exception) -> Any:
    codec = Codec()
    return error_of_failure(make_failure(error, 1, Id(0, 1, 2), 3, codec), "worker3", codec)


@pytest.mark.parametrize("code", [7, threading.Lock()], ids=["plain", "unsendable"])
def test_an_error_keeps_type_and_attributes(code: Any) -> None:
    error = told(KeywordsOnly(code=code))
    assert isinstance(error, RpcError) and isinstance(error, KeywordsOnly)
    assert str(error) == str(code) and error.args == (f"Error on Node 3: {code}",)
    assert isinstance(error.__cause__, RemoteError) and error.__cause__.worker == "worker3"


def test_an_exception_group_keeps_its_errors() -> None:
    error = told(ExceptionGroup("several", [KeywordsOnly(code=7), KeyError("k")]))
    assert isinstance(error, RpcError) and isinstance(error, ExceptionGroup)
    assert [type(inner) for inner in error.exceptions] == [KeywordsOnly, KeyError]
    assert error.message.startswith("Error on Node 3: several")


def test_an_error_class_that_allows_no_subclass_becomes_a_plain_rpc_error() -> None:
    error = told(Final("x"))
    assert type(error) is RpcError and str(error) == "Error on Node 3: x"
