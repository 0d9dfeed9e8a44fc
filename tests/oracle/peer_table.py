#!/usr/bin/env python3
"""peer_table.py FOLDER GGUFUSE: a table in Markdown, our line against the one of llama-fit-params, and what the peer projects for
it, for every model of a folder of measurements on one and on two devices of 24 GiB."""
import json, os, re, subprocess, sys, tempfile
from pathlib import Path

src, ggufuse = Path(sys.argv[1]), sys.argv[2]
MIB = 1 << 20
out = subprocess.run(["zstd", "-dcq", "--long=27", src / "decisions.jsonl.zst"], stdout=subprocess.PIPE, check=True)
rows = [json.loads(line) for line in out.stdout.splitlines()]
wanted = [r for r in rows if r["kind"] == "grid" and r["args"] == "" and set(r["free"]) == {24 << 30} and r["n_devices"] < 3]
sizes = {m["name"]: m["file_bytes"] for m in map(json.loads, open(src / "models.jsonl"))}
short = lambda line: re.sub(r' -ot ".*"', lambda m: f" -ot … ({m[0].count('=')})", line or "none")
print("| model | devices | ours | the peer's | margin the peer projects, MiB |\n|---|---|---|---|---|")
same = 0
with tempfile.TemporaryDirectory() as folder:
    for r in wanted:
        path = Path(folder) / "model.gguf"
        path.write_bytes((src / "headers" / (r["model"] + ".gguf-header")).read_bytes())
        os.truncate(path, sizes[r["model"]])
        devices = [f"--device=CUDA{i}={f}/{t}" for i, (f, t) in enumerate(zip(r["free"], r["total"]))]
        ours = subprocess.run([ggufuse, "fit", path, *devices], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        ours, peers, res = ours.stdout.strip(), r["result"].get("stdout"), r["result"]
        same += ours == (peers or "")
        left = [f - sum(d.values()) for f, d in zip(r["free"], res.get("proj_devices", []))]
        says = "the same" if ours == (peers or "") else f"`{short(ours)}`"
        print(f"| {r['model']} | {r['n_devices']} | {says} | `{short(peers)}` | {', '.join(str(x // MIB) for x in left)} |")
print(f"\n{same} of {len(wanted)} lines are the same.")
