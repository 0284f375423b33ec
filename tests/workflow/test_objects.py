"""The model block: readers see complete versions only, even if a writer dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from farstep.errors import ConfigError
from farstep.workflow import objects
from farstep.workflow.objects import ModelBlock, SharedObject


@pytest.fixture
def model():
    block = ModelBlock()
    yield block
    block.close()


def test_an_object_is_read_as_it_was_published(model: ModelBlock):
    value = {"w": np.arange(6.0).reshape(2, 3), "parts": (np.float32(2.5), {"n": np.array([1, 2])})}
    assert model.publish("net", value) == 0
    version, read = model.read("net")
    assert version == 0
    np.testing.assert_array_equal(read["w"], value["w"])
    assert read["parts"][0] == 2.5 and read["parts"][1]["n"].tolist() == [1, 2]
    assert model.publish("noise_scale", 3.5) == 0 and model.publish("noise_scale", 4.5) == 1
    assert model.read("noise_scale") == (1, 4.5)


def test_read_returns_a_copy(model: ModelBlock):
    model.publish("net", np.zeros(3))
    model.read("net")[1][:] = 7
    assert model.read("net")[1].tolist() == [0, 0, 0]


def test_another_shape_or_an_unknown_name_is_refused_and_nothing_changes(model: ModelBlock):
    model.publish("net", np.zeros(3))
    with pytest.raises(ConfigError, match=r"other arrays: .* here and .* there\. Publish"):
        model.publish("net", np.zeros(4))
    with pytest.raises(ConfigError, match="other arrays"):
        model.publish("net", {"a": np.zeros(3)})
    assert model.read("net")[0] == 0
    model.publish("nested", {"a": {"b": np.zeros(3)}})
    with pytest.raises(ConfigError, match="other arrays"):
        model.publish("nested", {"a.b": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"no object 'nett'.*net"):
        model.read("nett")


def test_nothing_is_read_before_something_is_published():
    each = SharedObject.create(np.zeros(2))
    with pytest.raises(ConfigError, match="yet"):
        each.read()
    each.close()


def test_readers_never_see_parts_of_two_versions(model: ModelBlock):
    size, versions = 4096, 400
    model.publish("net", np.zeros(size, np.int64))
    torn: list[object] = []

    def look():
        seen = -1
        while seen < versions:
            version, value = model.read("net")
            if len(set(value.tolist())) != 1 or value[0] != version or version < seen:
                torn.append((version, value))
            seen = version

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, versions + 1):
        assert model.publish("net", np.full(size, version)) == version
    for reader in readers:
        reader.join(60)
    assert not torn


READER = """
import sys
from farstep.workflow.objects import SharedObject
each = SharedObject.attach(sys.argv[1])
print("ready", flush=True)
seen = -1
while seen < int(sys.argv[2]):
    version, value = each.read()
    assert (value["a"] == version).all() and value["b"] == version, (version, value)
    assert version >= seen
    seen = version
print("whole", flush=True)
"""


def test_another_process_reads_whole_versions():
    each, versions = SharedObject.create({"a": np.zeros(20_000), "b": 0}), 300
    each.publish({"a": np.zeros(20_000), "b": 0})
    command = [sys.executable, "-c", READER, each.path, str(versions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        for version in range(1, versions + 1):
            each.publish({"a": np.full(20_000, float(version)), "b": version})
        assert reader.stdout.readline() == "whole\n"
        assert reader.wait(60) == 0
    each.close()


@pytest.mark.parametrize("fences", [1, 2])
def test_a_version_that_was_never_finished_is_not_seen(fences: int, monkeypatch: pytest.MonkeyPatch):
    """The writer ends before, or after, it has written the arrays of version 1."""
    each = SharedObject.create(np.zeros(4))
    each.publish(np.ones(4))
    calls = iter([*[None] * (fences - 1), InterruptedError])

    def fence() -> None:
        if (error := next(calls)) is not None:
            raise error

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(objects, "fence", fence)
        each.publish(np.full(4, 9.0))
    assert each.read()[0] == 0 and each.read()[1].tolist() == [1, 1, 1, 1]
    assert each.publish(np.full(4, 2.0)) == 1 and each.read()[1].tolist() == [2, 2, 2, 2]
    each.close()


NESTED_READER = """
import sys
import numpy as np
from farstep.workflow.objects import SharedObject
version, value = SharedObject.attach(sys.argv[1]).read()
print(repr({"version": version, **value}).replace("\\n", ""))
"""


def test_another_process_reads_the_same_nesting_and_names(model: ModelBlock):
    value = {"a.b": np.arange(3), "a": {"b": 1.5, "": (2, {"['x']": 3})}, "a'.\"b": np.float32(4), "none": {}}
    model.publish("odd names", value)
    command = [sys.executable, "-c", NESTED_READER, model.path("odd names")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    read = eval(said, {"np": np, "array": np.array, "float32": np.float32})
    assert read.pop("version") == 0
    assert read.keys() == value.keys() and read["a.b"].tolist() == [0, 1, 2]
    assert (read["a"]["b"], read["a"][""], read["none"]) == (1.5, (2, {"['x']": 3}), {})


def test_a_state_dict_of_torch_is_published(model: ModelBlock):
    torch = pytest.importorskip("torch")
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    assert model.publish("target", network.state_dict()) == 0
    with torch.no_grad():
        network[0].weight.fill_(7)
    assert model.publish("target", network.state_dict()) == 1
    version, read = model.read("target")
    assert version == 1 and list(read) == list(network.state_dict())
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(read[name], tensor.numpy())
    assert model.publish("parameters()", network.parameters()) == 0  # an iterator
    assert model.read("parameters()")[1][0].shape == (8, 4)


def test_any_number_of_arrays_is_published(model: ModelBlock):
    value = {f"layers.{i}.weight with a long name": np.full(3, i) for i in range(2000)}
    model.publish("many", value)
    other = SharedObject.attach(model.path("many"))
    version, read = other.read()
    assert version == 0 and list(read) == list(value)
    assert all((read[name] == i).all() for i, name in enumerate(value))
    other.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": {1: 2.0}}, r"object\['a'\] cannot be published: its key 1 is not a string"),
        ({"a.b": [1.0, "text"]}, r"object\['a.b'\]\[1\] .* got str"),
        ({"a": None}, r"object\['a'\] .* got NoneType"),
    ],
)
def test_unpublishable_values_are_named(model: ModelBlock, value, said):
    with pytest.raises(ConfigError, match=said):
        model.publish("bad", value)


def test_changed_array_in_a_later_version_is_named(model: ModelBlock):
    model.publish("net", {"0.weight": np.zeros(3)})
    with pytest.raises(ConfigError, match=r"object\['0.weight'\] is float64\[3\] here and float64\[4\] there"):
        model.publish("net", {"0.weight": np.zeros(4)})


def test_files_without_an_object_are_refused(tmp_path):
    for content in (b"", b"x" * 10, b"x" * 9000):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ConfigError, match="does not hold an object"):
            SharedObject.attach(tmp_path / "file")


def test_concurrent_first_publishers_of_a_name_share_one_object(model: ModelBlock, monkeypatch: pytest.MonkeyPatch):
    meeting, create = threading.Barrier(2, timeout=0.2), SharedObject.create
    made: list[SharedObject] = []

    def slow(value: object) -> SharedObject:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()  # until the other one makes it, too; it must not
        made.append(create(value))
        return made[-1]

    monkeypatch.setattr(SharedObject, "create", slow)
    versions: list[int] = []
    threads = [threading.Thread(target=lambda: versions.append(model.publish("net", 1.0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1 and sorted(versions) == [0, 1]
