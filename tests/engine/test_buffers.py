"""Shared arrays and the run's private folders."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from benchmarks.engine import buffers, scratch
from impls.workloads.dtypes import DTYPES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arena():
    arena = buffers.Arena("test")
    yield arena
    arena.close()


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(arena, name):
    storage = DTYPES[name].storage
    raw = np.random.default_rng(0).integers(0, 256, 6 * 7 * storage.itemsize, dtype=np.uint8)
    array = raw.view(storage).reshape(6, 7)
    back = buffers.view(arena.put(array, name))
    assert back.dtype == storage and back.shape == (6, 7)
    assert bits(back) == bits(array)


def test_bf16_and_f8_keep_their_values(arena):
    # What a detour over .npy loses: 1.0 came back as 8.0.
    for name, storage in (("bf16", ml_dtypes.bfloat16), ("f8e4m3", ml_dtypes.float8_e4m3fn)):
        back = buffers.view(arena.put(np.array([1.0, -2.5, 448.0], storage), name))
        assert back.astype(np.float64).tolist() == [1.0, -2.5, 448.0]


def test_a_descriptor_says_what_the_file_holds(arena):
    array, descriptor = arena.array((2, 3, 5), "bf16")
    assert {k: descriptor[k] for k in ("dtype", "shape", "strides", "offset")} == {
        "dtype": "bf16",
        "shape": [2, 3, 5],
        "strides": [30, 10, 2],
        "offset": 0,
    }
    array[1, 2, 4] = 3.0
    stored = Path(descriptor["path"]).read_bytes()
    assert len(stored) == 60
    assert stored[58:] == np.array(3.0, ml_dtypes.bfloat16).tobytes() and not any(stored[:58])


def test_strides_and_offset_choose_from_the_file(arena):
    descriptor = arena.put(np.arange(12, dtype=np.int32).reshape(3, 4), "i32")
    column = {**descriptor, "shape": [3], "strides": [16], "offset": 8}
    assert buffers.view(column).tolist() == [2, 6, 10]


def test_views_share_memory(arena):
    array, descriptor = arena.array((4,), "f32")
    buffers.view(descriptor)[2] = 7
    assert array.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_arrays(arena, shape):
    array, descriptor = arena.array(shape, "f64")
    assert array.shape == buffers.view(descriptor).shape == shape


def test_a_descriptor_beyond_the_file_is_refused(arena):
    _, descriptor = arena.array((4,), "f32")
    with pytest.raises(ValueError, match="size of buffer"):
        buffers.view({**descriptor, "shape": [5]})


def test_nothing_is_converted_in_silence(arena):
    with pytest.raises(ValueError, match="f32 is stored as float32, not as float64"):
        arena.put(np.zeros(3), "f32")


def test_a_freed_array_is_gone_from_the_disk_and_usable_while_held(arena):
    array, descriptor = arena.array((1000,), "f32")
    array[:] = 1
    arena.free(descriptor)
    assert not os.path.exists(descriptor["path"])
    assert array.sum() == 1000
    with pytest.raises(ValueError, match="freed before"):
        arena.free(descriptor)


def test_close_frees_everything(arena):
    paths = [arena.array((8,), "f32")[1]["path"] for _ in range(3)]
    arena.close()
    assert not any(map(os.path.exists, paths))


def test_memory_of_freed_arrays_is_given_back(arena):
    free = lambda: os.statvfs(scratch.places()[0]).f_bavail  # noqa: E731
    before = free()
    for _ in range(8):
        array, descriptor = arena.array((2**24,), "f32")
        arena.free(descriptor)
        del array
    gc.collect()
    # 8 x 64 MiB went through; less than one of them may be missing (others use the file system too).
    assert (before - free()) * os.statvfs(scratch.places()[0]).f_frsize < 2**26


def test_where_shared_memory_is_too_small_the_temporary_folder_serves(arena, tmp_path, monkeypatch):
    small = os.statvfs_result((4096, 4096, 16, 16, 16, 0, 0, 0, 0, 255))
    real = os.statvfs
    shm = scratch.places()[0]
    monkeypatch.setattr(os, "statvfs", lambda path: small if path == shm else real(path))
    monkeypatch.setattr(scratch, "places", lambda: [shm, tmp_path])
    _, small_one = arena.array((16,), "f32")
    large, large_one = arena.array((2**16,), "f32")
    assert Path(small_one["path"]).is_relative_to(shm)
    assert Path(large_one["path"]).is_relative_to(tmp_path)
    large[:] = 2
    assert buffers.view(large_one).sum() == 2**17


def test_where_nothing_has_room_the_error_says_what_to_do(arena):
    with pytest.raises(buffers.NoRoom, match="or set TMPDIR to a folder with room"):
        arena.array((2**50,), "f64")


@pytest.mark.parametrize("label", ["", "a/b", "a b"])
def test_a_label_that_cannot_name_a_file_is_refused(label):
    with pytest.raises(ValueError, match="cannot begin a file's name"):
        buffers.Arena(label)


@pytest.mark.parametrize("shape", [(5, 7), (1,), (100, 100)])
def test_a_workers_own_copy_begins_on_a_page(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    copy = buffers.own_copy(array[::-1])
    assert copy.ctypes.data % 4096 == 0 and copy.flags.c_contiguous
    assert np.array_equal(copy, array[::-1])
    assert not np.shares_memory(copy, array)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "It gave nothing, not C"),
        ({"C": np.zeros((2, 3), np.float32), "D": np.zeros(1)}, "It gave C, D, not C"),
        ({"C": np.zeros((3, 2), np.float32)}, r"float32\[3, 2\], not as float32\[2, 3\]"),
        ({"C": np.zeros((2, 3))}, r"float64\[2, 3\], not as float32\[2, 3\]"),
        ({"C": [[0.0] * 3] * 2}, "as list, not as a NumPy array"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(given, says):
    into = {"C": np.ones((2, 3), np.float32)}
    with pytest.raises(buffers.WrongArrays, match=says):
        buffers.copy_into(into, given)
    assert (into["C"] == 1).all()


# --- folders ---------------------------------------------------------------------------------------------------------

MAKES_AN_ARRAY = """
import os, sys, time
from benchmarks.engine import buffers
_, descriptor = buffers.Arena("left").array((1000,), "f32")
print(descriptor["path"], flush=True)
sys.stdin.readline()
"""


def other_run() -> tuple[subprocess.Popen[str], Path]:
    run = subprocess.Popen(
        [sys.executable, "-c", MAKES_AN_ARRAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert run.stdout is not None
    return run, Path(run.stdout.readline().strip())


def test_a_run_that_ends_leaves_no_folder():
    run, path = other_run()
    assert path.exists()
    run.communicate("\n")
    assert not path.parent.exists()


def test_the_folders_of_a_killed_run_are_swept_and_those_of_a_living_one_are_not():
    living, kept = other_run()
    killed, left = other_run()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.exists()
    gone = scratch.sweep()
    assert left.parent.name in gone and not left.parent.exists()
    assert kept.parent.name not in gone and kept.exists()
    living.communicate("\n")


def test_the_own_folder_is_not_swept(arena):
    _, descriptor = arena.array((4,), "f32")
    assert scratch.RUN not in scratch.sweep()
    assert os.path.exists(descriptor["path"])


def test_no_two_arenas_ever_give_a_file_the_same_name():
    """A worker keeps what it has mapped by name: a later arena at the same address must not take an earlier one's."""
    names = []
    for _ in range(50):
        arena = buffers.Arena("test")
        names.append(arena.place((4,), "f32")["path"])
        arena.close()
        del arena
    assert len(set(names)) == 50


def test_large_arrays_are_copied_by_several_threads_and_end_up_the_same(monkeypatch):
    monkeypatch.setattr(buffers, "_PIECE", 1000)
    source = np.arange(3 * 7 * 501, dtype=np.int32).reshape(3, 7, 501)
    into = {"C": np.zeros_like(source), "D": np.zeros_like(source[:, :, ::2])}
    with ThreadPoolExecutor(3) as copiers:
        buffers.copy_into(into, {"C": source, "D": source[:, :, ::2]}, copiers)
    assert np.array_equal(into["C"], source)
    assert np.array_equal(into["D"], source[:, :, ::2])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 16, 17])
def test_a_written_byte_is_found_wherever_it_is(size):
    given = np.arange(size, dtype=np.float32)
    assert buffers.differing(given, given.copy()) == 0
    for at in range(4 * size):
        after = given.copy()
        after.view(np.uint8)[at] ^= 1
        assert buffers.differing(given, after) == 1


def test_differences_are_of_bits_and_in_large_arrays_too(monkeypatch):
    monkeypatch.setattr(buffers, "_PIECE", 1 << 10)
    given = np.zeros(5000, np.float32)
    given[0] = np.nan
    after = given.copy()
    assert buffers.differing(given, after, buffers.copiers()) == 0
    after[[7, 4999]] = -0.0
    assert buffers.differing(given, after, buffers.copiers()) == buffers.differing(given, after) == 2
