#!/usr/bin/env python3
"""pack.py FOLDER: packs a folder of measurements (models.jsonl, headers/, memory.jsonl.zst, decisions.jsonl.zst, graphs/) into the
files of this one. README.md describes them."""
import json, struct, subprocess, sys
from pathlib import Path

src, dst = Path(sys.argv[1]), Path(__file__).parent


def write(name, data):
    subprocess.run(["zstd", "-q", "-f", "--ultra", "-22", "-o", dst / name], input=data, check=True)


def rows_of_text(name):
    out = subprocess.run(["zstd", "-dcq", "--long=27", src / name], stdout=subprocess.PIPE, check=True)
    return out.stdout.decode().splitlines()


def rows(name):
    return map(json.loads, rows_of_text(name))


def lines(list_of_rows):
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in list_of_rows)


models = [json.loads(line) for line in open(src / "models.jsonl")]
number = {m["name"]: i for i, m in enumerate(models)}
blob = b""
for m in models:
    header = (src / "headers" / (m["name"] + ".gguf-header")).read_bytes()
    name = m["name"].encode()
    blob += struct.pack("<IQI", len(name), m["file_bytes"], len(header)) + name + header
write("headers.zst", blob)

memory = []
for r in rows("memory.jsonl.zst"):
    res = r["result"]
    row = [number[r["model"]], r["id"], r["kind"], r["free"], r["args"], int(r["kv_unified"])]
    if res.get("ok"):
        terms = lambda b: [b["model"], b["context"], b["compute"]]
        row += [[terms(d) for d in res["devices"]], terms(res["host"]), res["n_ctx"], int(res["flash_attn"])]
    memory.append(row)
write("memory.jsonl.zst", lines(memory))

decisions = []
for r in rows("decisions.jsonl.zst"):
    res = r["result"]
    row = [number[r["model"]], r["id"], r["kind"], r["free"], r["args"], int(r["kv_unified"])]
    decisions.append(row + [res["stdout"] if res.get("exit") == 0 else "!" + res.get("message", "")])
write("decisions.jsonl.zst", lines(decisions))

# Graphs of few models: what the allocator had to place. Names matter for leaves only.
GRAPHS = ["llama-3.2-1b-instruct.Q4_K_M", "gemma-3-270m-it.Q8_0", "olmoe-1b-7b-0924-instruct.Q4_K_M"]
graphs = []
for name in GRAPHS:
    for line in rows_of_text(f"graphs/{name}.graphs.zst"):
        word = line.split(" ")
        if word[0] == "#":
            head = json.loads(line[2:])
            head = {key: head[key] for key in ("model", "args", "n_devices", "kv_unified")}
            line = "# " + json.dumps(head, separators=(",", ":"))
        elif word[0] == "T" and word[8] != "NONE":
            line = " ".join([*word[:2], "-", *word[3:]])
        elif word[0] in "GB":
            continue
        graphs.append(line)
write("graphs.zst", ("\n".join(graphs) + "\n").encode())
