"""Reads views with llama.cpp's own Python package, and compares what it sees with the source.

    read_gguf.py SOURCE VIEW...

SOURCE is a whole model. VIEW is its merged view, or all of its shards in order with colons between them. The tensors of
all files, one after the other, must be those of SOURCE: names, types, shapes and bytes. The first file has the keys of
SOURCE, all but split.*, the others have none. A line is printed for each VIEW.
"""

import sys

import numpy as np
from gguf import GGUFReader


def tensors(reader):
    return [(t.name, t.tensor_type, t.shape.tolist(), t.n_bytes) for t in reader.tensors]


def keys(reader):
    return {
        name: (field.types, b"".join(part.tobytes() for part in field.parts))
        for name, field in reader.fields.items()
        if not name.startswith(("split.", "GGUF."))
    }


def numbers(reader):
    return [reader.get_field(f"split.{key}").contents() for key in ("no", "count", "tensors.count")]


def compare(source, wanted, paths):
    views = [GGUFReader(path) for path in paths]
    found = [entry for view in views for entry in tensors(view)]
    assert found == wanted, f"tensors differ: {set(map(str, found)) ^ set(map(str, wanted))}"
    for theirs, ours in zip(source.tensors, (t for view in views for t in view.tensors), strict=True):
        assert np.array_equal(theirs.data.view(np.uint8), ours.data.view(np.uint8)), f"data of {ours.name} differs"
    assert keys(views[0]) == keys(source), "keys differ"
    for no, view in enumerate(views):
        if len(views) > 1:
            assert numbers(view) == [no, len(views), len(wanted)], f"shard {no}: {numbers(view)}"
        if no > 0:
            assert not keys(view), f"shard {no} has keys: {list(keys(view))}"
    print(f"{len(wanted)} tensors in {len(views)} files")


def main():
    source = GGUFReader(sys.argv[1])
    wanted = tensors(source)
    assert wanted, "no tensors"
    for view in sys.argv[2:]:
        compare(source, wanted, view.split(":"))


main()
