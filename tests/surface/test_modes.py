"""Which mode runs: fork_init(), the environment, and what a child inherits."""

import errno
import os
import signal
import warnings

import pytest
from conftest import UNTRUSTED, both_modes, child, fork_once, fresh, needs_lazy, run
from memory import PAGE, PLACE, map_at, marked, pages, private_map, protections, read

import rdmafork
from rdmafork import register, register_address, stats

# ---- modes and the environment -------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, "lazy"),
        ("", "lazy"),
        ("auto", "lazy"),
        pytest.param("lazy", "lazy", marks=needs_lazy),
        ("eager", "eager"),
    ],
)
def test_the_environment_chooses_the_mode(value, mode):
    if mode == "lazy" and value != "lazy" and not rdmafork.kernel_info().copy_on_fork_trusted:
        mode = "eager"
    env = {"RDMAFORK_MODE": value}
    assert run("import rdmafork as r\nr.fork_init()\nr.stats().mode", env=env) == mode
    # The program gets the mode that it names.
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    for wish in ("lazy", "eager") if trusted else ("eager",):
        code = "import rdmafork as r\nr.fork_init(args[0])\nr.stats().mode"
        assert run(code, wish, env=env) == wish


@pytest.mark.parametrize("value", ["", "1", None])
@fresh
def test_other_values_of_the_environment_leave_the_kernel_as_it_is(value):
    os.environ.pop("RDMAFORK_TRUST_COPYING", None)
    found = rdmafork.kernel_info()
    if value is not None:
        os.environ["RDMAFORK_TRUST_COPYING"] = value
    rdmafork.fork_init()
    assert rdmafork.kernel_info() == found
    assert found.copy_on_fork_trusted_from != "environment"
    assert stats().mode == ("lazy" if found.copy_on_fork_trusted else "eager")


@pytest.mark.parametrize("name", ["fork_init", "RDMAFORK_MODE"])
@fresh(env=UNTRUSTED)
def test_lazy_is_refused_where_copying_is_not_trusted(name):
    assert not rdmafork.kernel_info().copy_on_fork_trusted
    if name == "RDMAFORK_MODE":
        os.environ[name] = "lazy"
    with pytest.raises(OSError, match="lazy mode needs a kernel") as caught:
        rdmafork.fork_init(*["lazy"] * (name == "fork_init"))
    assert caught.value.errno == errno.ENOTSUP
    by_environment = rdmafork.kernel_info().copy_on_fork_trusted_from == "environment"
    expected = "RDMAFORK_TRUST_COPYING=0" if by_environment else os.uname().release
    assert expected in str(caught.value) and "use eager" in str(caught.value)
    assert stats().mode is None
    os.environ.pop("RDMAFORK_MODE", None)
    rdmafork.fork_init()
    assert stats().mode == "eager"
    memory, address = private_map(4 * PAGE)
    with register(memory):
        assert marked(address, 4 * PAGE) == pages(address, 4)
    with pytest.raises(OSError, match="loses no pinned pages") as caught:
        register(memory, on_fork="keep")
    assert caught.value.errno == errno.ENOTSUP and expected in str(caught.value)


@needs_lazy
@fresh
def test_the_mode_stays_when_the_environment_changes():
    rdmafork.fork_init()
    os.environ["RDMAFORK_TRUST_COPYING"] = "0"
    rdmafork.fork_init()
    rdmafork.fork_init("lazy")
    assert rdmafork.kernel_info().copy_on_fork_trusted
    assert stats().mode == "lazy"


@pytest.mark.parametrize("name", ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE"])
@pytest.mark.parametrize("value", ["1", "0", "", "no"])
@both_modes
@fresh
def test_fork_safe_in_the_environment(name, value, mode):
    """It is read at first use: the program may set it after the import."""
    assert stats().mode is None
    os.environ[name] = value
    os.environ["RDMAFORK_MODE"] = mode
    memory, address = private_map(4 * PAGE)
    registration = register(memory)
    assert registration.protected
    assert stats().mode == mode
    assert rdmafork.is_fork_initialized() is rdmafork.ForkStatus.ENABLED
    assert child(read, address) == signal.SIGSEGV
    rdmafork.fork_init()
    rdmafork.fork_init(mode)
    registration.close()


@pytest.mark.parametrize("name", ["RDMAFORK_MODE", "RDMAFORK_TRUST_COPYING"])
@fresh(env={"RDMAV_FORK_SAFE": "0"})
def test_a_failure_of_the_environment_s_wish_is_raised_each_time(name):
    os.environ[name] = "nonsense"
    buffer = bytearray(10)
    for _ in range(3):
        with pytest.raises(OSError, match=f"{name}=nonsense") as caught:
            register(buffer)
        assert caught.value.errno == errno.EINVAL
        buffer.append(1)  # it is not held
    assert stats().registrations == 0
    del os.environ[name]
    os.environ["RDMAFORK_MODE"] = "eager"
    memory, address = private_map(4 * PAGE)
    with register(memory):
        assert marked(address, 4 * PAGE) == pages(address, 4)


@both_modes
@pytest.mark.parametrize("value", ["1", "0", ""])
def test_hugepages_safe_costs_nothing(mode, value):
    run(hugepages_safe, mode, env={"RDMAV_HUGEPAGES_SAFE": value})


def hugepages_safe(mode):
    rdmafork.fork_init(mode)
    memory, _ = private_map(4 * PAGE)
    before = stats()
    for _ in range(10):
        register(memory).close()
    after = stats()
    assert after.query_calls == before.query_calls
    assert after.madvise_calls - before.madvise_calls == (20 if mode == "eager" else 0)


@fresh
def test_unprotected_registrations_warn_once():
    memory, address = private_map(4 * PAGE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registrations = [register(memory), register(memory), register_address(address, 5)]
    assert [w.category for w in caught] == [rdmafork.UnprotectedWarning]
    assert caught[0].filename == __file__
    assert "fork_init() first" in str(caught[0].message)
    assert not any(r.protected for r in registrations)
    assert "not protected" in repr(registrations[0])
    assert protections() == [
        (address, address + PAGE, 3, None),
        (address + PAGE, address + 4 * PAGE, 2, None),
    ]
    fork_once()
    assert marked(address, 4 * PAGE) == []
    assert child(read, address) == b"\0"
    assert stats().madvise_calls == 0


@fresh
def test_where_warnings_are_errors_none_is_registered_unprotected():
    buffer = bytearray(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(rdmafork.UnprotectedWarning):
                register(buffer)
        assert stats().registrations == 0
        buffer.append(1)
        rdmafork.fork_init()
        with register(buffer) as registration:
            assert registration.protected


@pytest.mark.parametrize("how", ["buffer", "address", "empty", "closed"])
@fresh
def test_fork_init_after_a_registration_is_refused(how):
    memory, address = private_map(4 * PAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "address":
            registration = register_address(address, PAGE)
        else:
            registration = register(b"" if how == "empty" else memory)
    if how == "closed":
        registration.close()
    for mode in ("auto", "lazy", "eager"):
        with pytest.raises(OSError) as caught:
            rdmafork.fork_init(mode)
        assert caught.value.errno == errno.EINVAL
        assert "too late" in str(caught.value) and "RDMAV_FORK_SAFE=1" in str(caught.value)
    assert stats().mode is None
    assert rdmafork.is_fork_initialized() is not rdmafork.ForkStatus.ENABLED
    # The child is another process, where nothing was registered yet.
    assert child(lambda: (rdmafork.fork_init("eager"), stats().mode)[1]) == "eager"


@both_modes
@fresh
def test_a_refused_registration_is_none(mode):
    """A refused registration does not make fork_init() late."""
    map_at(PLACE, PAGE)
    for arguments in ((PLACE, 2**64 - 1), (-1, 5)):
        with pytest.raises((OverflowError, ValueError)):
            register_address(*arguments)
    with pytest.raises(TypeError):
        register(5)
    with pytest.raises(BufferError):
        register(memoryview(bytearray(9))[::2])
    rdmafork.fork_init(mode)
    with pytest.raises(OSError):
        register_address(PLACE, 3 * PAGE)
    assert child(lambda: rdmafork.fork_init("eager" if mode == "lazy" else "auto")) is None


@both_modes
@fresh
def test_a_second_fork_init(mode):
    other = "eager" if mode == "lazy" else "lazy"
    rdmafork.fork_init(mode)
    for registered in (False, True):
        registration = register(bytearray(10)) if registered else None
        rdmafork.fork_init(mode)
        rdmafork.fork_init()
        with pytest.raises(OSError) as caught:
            rdmafork.fork_init(other)
        assert caught.value.errno == errno.EINVAL
        assert repr(mode) in str(caught.value)
        assert repr(other) in str(caught.value) and "already" in str(caught.value)
        assert stats().mode == mode
        assert (registration is not None) == registered
