//! Graphs, tensor by tensor, against those that llama.cpp b11434 handed to its allocator: the same nodes in the same order on the
//! same backends, with the same sources and sizes. `GGUFUSE_GRAPHS=FOLDER` compares all recordings of a folder instead.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/oracle.rs"]
mod oracle;

use std::collections::HashMap;
use std::fmt::Write as _;

use ggufuse::fit::compute::graph::{Backend, Id, Op};
use ggufuse::fit::compute::{Plan, plan, setting::Setting};
use ggufuse::fit::{CacheLayout, Context, Placement};
use oracle::{Named, Row, models, unpacked};
use serde_json::Value;

/// A tensor as it was recorded.
struct Tensor<'a> {
    name: &'a str,
    ty: &'a str,
    ne: [u64; 4],
    op: &'a str,
    external: bool,
    view: Option<usize>,
    sizes: Vec<u64>,
}

/// What the allocator was given, and what it came to.
struct Recording<'a> {
    row: Value,
    tensors: Vec<Tensor<'a>>,
    /// (tensor, buffer), in order.
    leafs: Vec<(usize, u8)>,
    /// (tensor, buffer, sources), in order.
    nodes: Vec<(usize, u8, Vec<usize>)>,
    sizes: Vec<u64>,
}

fn recordings(text: &str) -> Vec<Recording<'_>> {
    let mut all: Vec<Recording<'_>> = Vec::new();
    for line in text.lines() {
        let (kind, rest) = line.split_once(' ').unwrap();
        let word: Vec<&str> = rest.split(' ').collect();
        let n = |i: usize| word[i].parse::<usize>().unwrap();
        let numbers = |from: usize| word[from..].iter().map(|w| w.parse().unwrap()).collect();
        match (kind, all.last_mut()) {
            ("#", _) => all.push(Recording {
                row: serde_json::from_str(rest).unwrap(),
                tensors: Vec::new(),
                leafs: Vec::new(),
                nodes: Vec::new(),
                sizes: Vec::new(),
            }),
            ("T", Some(r)) => r.tensors.push(Tensor {
                name: word[1],
                ty: word[2],
                ne: [n(3) as u64, n(4) as u64, n(5) as u64, n(6) as u64],
                op: word[7],
                external: word[9] == "1",
                view: word[11].parse().ok(),
                sizes: numbers(12),
            }),
            ("L", Some(r)) => r.leafs.push((n(0), n(1) as u8)),
            ("N", Some(r)) => {
                let sources = word[3].split(',').filter(|w| !w.is_empty());
                let sources = sources.map(|w| w.parse().unwrap()).collect();
                r.nodes.push((n(0), n(1) as u8, sources));
            }
            ("S", Some(r)) => r.sizes = numbers(0),
            _ => {}
        }
    }
    all
}

/// `RmsNorm` as ggml spells it: `RMS_NORM`. Activations go by their own names.
fn spelled(op: Op) -> String {
    let name = format!("{op:?}");
    let name = name.split(' ').next().unwrap();
    let name = name.trim_start_matches("Unary(").trim_start_matches("Glu(");
    let mut out = String::new();
    for c in name.trim_end_matches(')').chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_uppercase());
    }
    out
}

/// Compares tensor by tensor; a tensor of ours stands for the recorded one that it was first met with.
struct Comparison<'a> {
    plan: &'a Plan,
    recording: &'a Recording<'a>,
    ours: HashMap<usize, Id>,
}

impl Comparison<'_> {
    fn same(&mut self, theirs: usize, ours: Id) -> Result<(), String> {
        let known = *self.ours.entry(theirs).or_insert(ours);
        let name = |id| {
            self.recording
                .tensors
                .get(id)
                .map_or("", |t: &Tensor<'_>| t.name)
        };
        if known == ours {
            return Ok(());
        }
        Err(format!(
            "{ours:?} stands for {}, which is {known:?}",
            name(theirs)
        ))
    }

    fn tensor(&mut self, theirs: usize, ours: Id, at: [u8; 2]) -> Result<(), String> {
        let (t, g) = (&self.recording.tensors[theirs], &self.plan.graph[ours]);
        let mut wrong = String::new();
        let mut check = |what: &str, theirs: String, ours: String| {
            if theirs != ours {
                let _ = write!(wrong, " {what} {ours}, not {theirs};");
            }
        };
        check("op", t.op.to_owned(), spelled(g.op));
        check("type", t.ty.to_uppercase(), g.ty.name().to_uppercase());
        check("shape", format!("{:?}", t.ne), format!("{:?}", g.ne));
        check("buffer", at[0].to_string(), at[1].to_string());
        check(
            "view",
            t.view.is_some().to_string(),
            g.view.is_some().to_string(),
        );
        // Views of recurrent states, which are allocated even in a dry load, count as external there.
        if t.view.is_none() {
            let home = g.home.is_some();
            check("external", t.external.to_string(), home.to_string());
        }
        if !t.external && t.view.is_none() {
            let size = self.plan.size(ours, Backend(at[1]));
            let theirs = t.sizes[usize::from(at[0])];
            check("size", theirs.to_string(), size.to_string());
        }
        if let (Some(theirs), Some(ours)) = (t.view, g.view)
            && let Err(why) = self.same(theirs, ours)
        {
            let _ = write!(wrong, " view: {why};");
        }
        if let Err(why) = self.same(theirs, ours) {
            let _ = write!(wrong, " {why};");
        }
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(format!("{}:{wrong}", t.name))
        }
    }

    fn all(&mut self) -> Result<(), String> {
        let (schedule, r) = (&self.plan.schedule, self.recording);
        for (&(theirs, buffer), &(ours, backend)) in r.leafs.iter().zip(&schedule.leafs) {
            self.tensor(theirs, ours, [buffer, backend.0])
                .map_err(|e| format!("leaf {e}"))?;
        }
        if r.leafs.len() != schedule.leafs.len() {
            return Err(format!(
                "{} leaves, not {}",
                schedule.leafs.len(),
                r.leafs.len()
            ));
        }
        for (i, ((theirs, buffer, sources), &(ours, backend))) in
            r.nodes.iter().zip(&schedule.nodes).enumerate()
        {
            self.tensor(*theirs, ours, [*buffer, backend.0])
                .map_err(|e| format!("node {i} {e}"))?;
            let g = &self.plan.graph[ours];
            if g.src().len() != sources.len() {
                let (is, should) = (g.src().len(), sources.len());
                return Err(format!("node {i}: {is} sources, not {should}"));
            }
            for (&theirs, &ours) in sources.iter().zip(g.src()) {
                self.same(theirs, ours)
                    .map_err(|e| format!("source of node {i}: {e}"))?;
            }
        }
        if r.nodes.len() != schedule.nodes.len() {
            return Err(format!(
                "{} nodes, not {}",
                schedule.nodes.len(),
                r.nodes.len()
            ));
        }
        let sizes = self.plan.buffer_sizes();
        if sizes == r.sizes {
            Ok(())
        } else {
            Err(format!("buffers {sizes:?}, not {:?}", r.sizes))
        }
    }
}

fn compare(named: &Named, recording: &Recording<'_>) -> Result<(), String> {
    let row = Row::recorded(&recording.row);
    let task = row.task(&named.model).unwrap();
    let context = Context::new(&named.model.hparams, &task.params).unwrap();
    let placement = Placement::new(&named.model, &task.params, &task.machine).unwrap();
    let cache = CacheLayout::new(&named.model.hparams, &task.params, &context, &placement);
    let setting = Setting {
        model: &named.model,
        params: &task.params,
        context: &context,
        placement: &placement,
        cache: &cache,
    };
    let plan = plan(setting).map_err(|e| e.to_string())?;
    Comparison {
        plan: &plan,
        recording,
        ours: HashMap::new(),
    }
    .all()
}

#[test]
fn graphs_are_those_of_llama_cpp() {
    let models = models();
    let texts: Vec<Vec<u8>> = match std::env::var_os("GGUFUSE_GRAPHS") {
        Some(folder) => {
            let mut paths: Vec<_> = std::fs::read_dir(folder)
                .unwrap()
                .map(|e| e.unwrap().path())
                .collect();
            paths.sort();
            paths.iter().map(|path| unpacked(path)).collect()
        }
        None => vec![unpacked("graphs.zst".as_ref())],
    };
    let (mut compared, mut wrong) = (0, Vec::new());
    for text in &texts {
        for recording in recordings(std::str::from_utf8(text).unwrap()) {
            let name = recording.row["model"].as_str().unwrap().to_owned();
            let named = models.iter().find(|m| m.name == name).unwrap();
            compared += 1;
            if let Err(why) = compare(named, &recording) {
                wrong.push(format!("{name} {}: {why}", recording.row["args"]));
            }
        }
    }
    assert!(compared > 0);
    assert!(
        wrong.is_empty(),
        "{} of {compared} graphs differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
