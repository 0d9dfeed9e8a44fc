//! The measurements in tests/oracle: what llama.cpp needs, and what its fitting decides, on simulated devices.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::Read;
use std::path::Path;

use ggufuse::arch::Model;
use ggufuse::fit::{Device, Machine, Request, Task, find_flag};
use ggufuse::gguf;
use serde_json::Value;

/// A model of the oracle.
pub struct Named {
    pub name: String,
    pub model: Model,
}

/// A row of either table.
pub struct Row {
    /// Place in the list of models.
    pub model: usize,
    pub id: u64,
    pub kind: String,
    pub free: Vec<u64>,
    pub args: String,
    pub kv_unified: bool,
    rest: Vec<Value>,
}

/// What was measured: model, context and compute per device and of the host.
pub struct Truth {
    pub devices: Vec<[u64; 3]>,
    pub host: [u64; 3],
    pub n_ctx: u64,
    pub flash_attn: bool,
}

pub fn unpacked(name: &Path) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/oracle")
        .join(name);
    let file = std::fs::File::open(path).unwrap();
    let mut out = Vec::new();
    let mut decoder = ruzstd::decoding::StreamingDecoder::new(file).unwrap();
    decoder.read_to_end(&mut out).unwrap();
    out
}

/// A model file as far as it is kept: its name, header and length.
struct Stored {
    name: String,
    header: Vec<u8>,
    len: u64,
}

/// The files: per model its name's length, file size and header's length, then name and header.
fn stored(path: &str) -> Vec<Stored> {
    let blob = unpacked(path.as_ref());
    let mut rest = blob.as_slice();
    let mut models = Vec::new();
    while let Some((fixed, tail)) = rest.split_first_chunk::<16>() {
        let name_len = u32::from_le_bytes(fixed[..4].try_into().unwrap()) as usize;
        let file_len = u64::from_le_bytes(fixed[4..12].try_into().unwrap());
        let header_len = u32::from_le_bytes(fixed[12..].try_into().unwrap()) as usize;
        let (name, tail) = tail.split_at(name_len);
        let (header, tail) = tail.split_at(header_len);
        models.push(Stored {
            name: String::from_utf8(name.to_vec()).unwrap(),
            header: header.to_vec(),
            len: file_len,
        });
        rest = tail;
    }
    models
}

/// The models.
pub fn models() -> Vec<Named> {
    models_in("headers.zst")
}

/// The models of a file of headers.
pub fn models_in(path: &str) -> Vec<Named> {
    let parsed = |file: Stored| {
        let header = gguf::parse(file.header, file.len).map_err(|(error, _)| error);
        Named {
            name: file.name,
            model: Model::new(&[header.unwrap()]).unwrap(),
        }
    };
    stored(path).into_iter().map(parsed).collect()
}

/// The header and file length of a model.
pub fn header(name: &str) -> (Vec<u8>, u64) {
    let file = stored("headers.zst")
        .into_iter()
        .find(|file| file.name == name)
        .unwrap();
    (file.header, file.len)
}

/// The place of a model in the list.
pub fn place(name: &str) -> usize {
    stored("headers.zst")
        .iter()
        .position(|file| file.name == name)
        .unwrap()
}

/// The rows of a table.
pub fn rows(name: &str) -> Vec<Row> {
    let text = String::from_utf8(unpacked(name.as_ref())).unwrap();
    let row = |line: &str| {
        let Value::Array(mut row) = serde_json::from_str(line).unwrap() else {
            panic!("a row is an array");
        };
        let rest = row.split_off(6);
        Row {
            model: row[0].as_u64().unwrap() as usize,
            id: row[1].as_u64().unwrap(),
            kind: row[2].as_str().unwrap().to_owned(),
            free: numbers(&row[3]),
            args: row[4].as_str().unwrap().to_owned(),
            kv_unified: row[5] == 1,
            rest,
        }
    };
    text.lines().map(row).collect()
}

fn numbers(list: &Value) -> Vec<u64> {
    let list = list.as_array().unwrap().iter();
    list.map(|n| n.as_u64().unwrap()).collect()
}

impl Row {
    /// The row that a recorded graph belongs to, on devices of 24 GiB.
    pub fn recorded(head: &Value) -> Row {
        Row {
            model: 0,
            id: 0,
            kind: "graph".to_owned(),
            free: vec![24 << 30; head["n_devices"].as_u64().unwrap() as usize],
            args: head["args"].as_str().unwrap().to_owned(),
            kv_unified: head["kv_unified"] == true,
            rest: Vec::new(),
        }
    }

    /// The machine: simulated devices with 512 MiB in use, full ones without memory.
    pub fn machine(&self) -> Machine {
        let device = |(i, &free): (usize, &u64)| Device {
            name: format!("CUDA{i}"),
            free,
            total: if free == 0 { 0 } else { free + (512 << 20) },
        };
        Machine {
            devices: self.free.iter().enumerate().map(device).collect(),
            host: None,
        }
    }

    /// The task that the row's arguments describe; `None` for a split mode that is not planned for.
    pub fn task<'a>(&self, model: &'a Model) -> Option<Task<'a>> {
        let mut request = Request::default();
        let mut words = self.args.split_whitespace();
        while let Some(word) = words.next() {
            let flag = find_flag(word.trim_start_matches('-')).unwrap();
            let value = flag.value.map_or("", |_| words.next().unwrap());
            if flag.name == "split-mode" && value == "row" {
                return None;
            }
            request.set(flag, value).unwrap();
        }
        if self.kv_unified {
            request.set(find_flag("kv-unified").unwrap(), "").unwrap();
        }
        Some(Task::new(model, &request, self.machine()).unwrap())
    }

    /// What was measured; `None` where llama.cpp refused the combination.
    pub fn truth(&self) -> Option<Truth> {
        let [devices, host, n_ctx, flash_attn] = self.rest.as_slice() else {
            return None;
        };
        let terms = |v: &Value| <[u64; 3]>::try_from(numbers(v)).unwrap();
        Some(Truth {
            devices: devices.as_array().unwrap().iter().map(terms).collect(),
            host: terms(host),
            n_ctx: n_ctx.as_u64().unwrap(),
            flash_attn: *flash_attn == 1,
        })
    }

    /// The line that was decided; `None` where there was none.
    pub fn line(&self) -> Option<&str> {
        let text = self.rest.first().and_then(Value::as_str).unwrap();
        (!text.starts_with('!')).then_some(text)
    }
}
