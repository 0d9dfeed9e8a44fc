#!/usr/bin/env python3
"""Writes the seed corpora, a folder in fuzz/seeds for each target."""

import shutil
import struct
from pathlib import Path

U32, I32, BOOL, STR, ARR, U16, F64 = 4, 5, 7, 8, 9, 2, 12
F32, F16, Q4_0, Q8_0, PRIVATE = 0, 1, 2, 8, 4711


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def kv(key, ty, value):
    return text(key) + struct.pack("<I", ty) + value


def arch(name="llama"):
    return kv("general.architecture", STR, text(name))


def split(no, count, tensors):
    return [
        kv("split.no", U16, struct.pack("<H", no)),
        kv("split.tensors.count", I32, struct.pack("<i", tensors)),
        kv("split.count", U16, struct.pack("<H", count)),
    ]


def gguf(kvs, tensors, align=32, version=3):
    """`tensors` are name, dimensions, type and the number of bytes."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(kvs)) + b"".join(kvs)
    at = 0
    for name, dims, ty, size in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ty, at)
        at += -(-size // align) * align
    out += bytes(-len(out) % align)
    for i, (_, _, _, size) in enumerate(tensors):
        out += bytes((7 * j + i) % 251 for j in range(size)) + bytes(-size % align)
    return out


def main():
    align = lambda n: kv("general.alignment", U32, struct.pack("<I", n))
    strings = kv("tokenizer.ggml.tokens", ARR, struct.pack("<IQ", STR, 3) + text("a") + text("") + text("\u00e9"))
    numbers = kv("numbers", ARR, struct.pack("<IQ4I", U32, 4, 1, 2, 3, 4))
    scalars = [kv("b", BOOL, b"\1"), kv("d", F64, struct.pack("<d", 0.5)), kv("i", I32, struct.pack("<i", -1))]
    f32 = [(f"blk.{i}.w", [3 + i, 2], F32, 8 * (3 + i)) for i in range(5)]
    mixed = [
        ("q4", [64, 2], Q4_0, 72),
        ("q8", [32], Q8_0, 34),
        ("none", [0, 4], F32, 0),
        ("scalar", [], F16, 2),
        ("four", [2, 1, 3, 1], F16, 12),
        ("private", [5], PRIVATE, 40),
    ]
    header = {
        "empty": gguf([], []),
        "keys": gguf([arch(), strings, numbers, *scalars], []),
        "tensors": gguf([arch()], f32),
        "mixed": gguf([arch("gpt2"), align(64), strings], mixed, 64),
        "version2": gguf([arch()], f32[:2], version=2),
        "shard": gguf(split(1, 2, 7), f32[:2]),
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    }
    two = gguf([arch(), *split(0, 2, 5)], f32[:3]) + gguf(split(1, 2, 5), f32[3:])
    bare = gguf([arch(), strings, *split(0, 3, 6)], []) + gguf(split(1, 3, 6), mixed[:3]) + gguf(split(2, 3, 6), mixed[3:])
    wide = gguf([arch(), align(128), *split(0, 2, 5)], f32[:1], 128) + gguf(split(1, 2, 5), f32[1:])
    model = {
        "single": bytes([0, 1, 2, 0, 0]) + header["tensors"],
        "single-size": bytes([0, 2, 0, 4, 0]) + header["tensors"],
        "single-file-size": bytes([8, 4, 0, 0, 12]) + header["tensors"],
        "single-bare": bytes([0, 9, 2, 0, 0]) + header["mixed"],
        "narrow": bytes([0, 1, 1, 0, 0]) + gguf([arch(), align(8)], f32, 8),
        "one-of-one": bytes([1, 1, 3, 0, 0]) + gguf([arch(), *split(0, 1, 5)], f32),
        "two": bytes([1, 1, 1, 0, 0]) + two,
        "two-directory": bytes([9, 3, 4, 6, 0]) + two,
        "two-other-names": bytes([5, 0, 0, 0, 0]) + two,
        "two-of-three": bytes([3, 0, 0, 0, 0]) + two,
        "three": bytes([1, 1, 2, 0, 0]) + bare,
        "wide": bytes([1, 9, 2, 0, 0]) + wide,
    }
    lines = lambda *names: "\n".join(names).encode()
    discovery = {
        "set": lines("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n.gguf"),
        "widths": lines("m-1-of-2.gguf", "m-00002-of-00002.gguf", "m.gguf-00001-of-00200.gguf"),
        "pieces": lines("m.gguf.part1of2", "m.gguf.part2of2", "m.gguf.001", "m.gguf.002", "n.gguf.aa", "n.gguf.ab"),
        "projectors": lines("mmproj-m-f16.gguf", "m-Q4_0.gguf", "mmproj.gguf"),
        "large": lines("m-00001-of-4294967295.gguf", "m.gguf.part4000000000", "m.gguf.part0"),
    }
    options = {
        "fstab": b"rw,noauto,nofail,_netdev,x-systemd.automount,allow_other,view=merged",
        "sizes": b"split-max-size=2G,max-file-size=fat32,no-tensor-first-split",
        "owners": b"uid=1000,gid=1000,umask=022,fsname=a\\,b,subtype=ggufuse",
        "limits": b"split-max-tensors=7,cache=page,log-file=/dev/null,metrics=9464,setuid=1:2",
        "overrides": b"override-kv=a=int:1,remove-kv=b,set-kv-file=c=/x,overlay=/y",
    }
    overrides = {
        "plain": b"a=int:1,b=bool:true,c=float:1.5,e=str:x",
        "arrays": b'd=arr[str]:["a","b,c"],f=arr[u32]:[1,2],g=u64:18446744073709551615',
        "quoted": b'"h=str:a,""b""",a=int:2',
        "kept": b"general.alignment=u32:128,general.architecture=str:gpt2",
    }
    all_seeds = {"header": header, "model": model, "discovery": discovery, "options": options, "overrides": overrides}
    for target, seeds in all_seeds.items():
        folder = Path(__file__).parent / "seeds" / target
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, data in seeds.items():
            (folder / name).write_bytes(data)


main()
