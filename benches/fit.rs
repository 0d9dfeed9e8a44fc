//! How long a fit takes once the header is parsed: a mixture of experts with 94 layers, made from one of the oracle's
//! models, on devices that it does not fit into.
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]
#![allow(clippy::print_stdout, reason = "that is what it is for")]
#![allow(missing_docs, reason = "no library")]

#[path = "../tests/common/oracle.rs"]
mod oracle;

use std::time::{Duration, Instant};

use ggufuse::arch::Model;
use ggufuse::fit::{Device, Machine, Request, Task};
use ggufuse::gguf::{self, Header, HeaderSize, tensor_info};

const LAYERS: usize = 94;
const RUNS: usize = 15;

/// The header of a model with as many layers as `LAYERS`, each like the first.
fn stretched(name: &str) -> Header {
    let (bytes, len) = oracle::header(name);
    let header = gguf::parse(bytes, len).map_err(|(error, _)| error).unwrap();
    let mut body = Vec::<u8>::new();
    for kv in header.kvs() {
        if kv.key.ends_with(b".block_count") {
            let value = kv.value.len();
            body.extend(&kv.entry[..kv.entry.len() - value]);
            body.extend(&(LAYERS as u64).to_le_bytes()[..value]);
        } else {
            body.extend(kv.entry);
        }
    }
    let n_kv = header.kvs().len() as u64;
    let (mut infos, mut n_tensors, mut at) = (Vec::new(), 0, 0u64);
    let mut put = |name: &str, t: &gguf::Tensor| {
        infos.extend(tensor_info(name.as_bytes(), &t.dims, t.ty.0, at));
        at += t.len.next_multiple_of(header.alignment());
        n_tensors += 1;
    };
    for t in header.tensors() {
        let name = String::from_utf8(t.name.clone()).unwrap();
        match name.strip_prefix("blk.0.") {
            Some(part) => (0..LAYERS).for_each(|il| put(&format!("blk.{il}.{part}"), t)),
            None if name.starts_with("blk.") => {}
            None => put(&name, t),
        }
    }
    let mut out = HeaderSize::fixed(n_tensors, n_kv);
    out.extend(body);
    out.extend(infos);
    out.resize(out.len().next_multiple_of(header.alignment() as usize), 0);
    let len = out.len() as u64 + at;
    gguf::parse(out, len).map_err(|(error, _)| error).unwrap()
}

fn machine(devices: usize, free: u64) -> Machine {
    let device = |i| Device {
        name: format!("CUDA{i}"),
        free,
        total: free,
    };
    Machine {
        devices: (0..devices).map(device).collect(),
        host: None,
    }
}

fn main() {
    let header = stretched("qwen3-coder-480b-a35b-instruct.Q4_K_M");
    let weights: u64 = header.tensors().iter().map(|t| t.len).sum();
    let model = Model::new(std::slice::from_ref(&header)).unwrap();
    println!(
        "{LAYERS} layers, {} tensors, {} GiB of weights",
        model.tensors().len(),
        weights >> 30
    );
    for (devices, share) in [(1, 20), (2, 30), (4, 30), (4, 60), (4, 200)] {
        let free = weights / 100 * share / devices as u64;
        let task = Task::new(&model, &Request::default(), machine(devices, free)).unwrap();
        let once = || {
            let start = Instant::now();
            let fit = task.fit().unwrap();
            (start.elapsed(), fit.line.n_gpu_layers)
        };
        let mut runs: Vec<(Duration, i32)> = (0..RUNS).map(|_| once()).collect();
        runs.sort_unstable();
        let (median, ngl) = runs[RUNS / 2];
        println!(
            "{devices} devices of {:3} GiB: {median:8.1?}, -ngl {ngl}",
            free >> 30
        );
    }
}
