//! The memory model and the search against what llama.cpp b11434 measures and decides on simulated devices: 91 models of 58 architectures.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stdout, reason = "the worst rows are for people")]

#[path = "common/oracle.rs"]
mod oracle;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ggufuse::fit::{Measured, NoFit, Task};
use oracle::{Named, Row, Truth, models, rows};

/// Rows that one thread takes at a time.
const CHUNK: usize = 32;

/// All rows, or in a build without optimization, which takes ten times as long, one of `every`.
fn sample(name: &str, every: usize) -> Vec<Row> {
    let step = if cfg!(debug_assertions) { every } else { 1 };
    rows(name).into_iter().step_by(step).collect()
}

/// Calls `check` for every row, on all cores.
fn for_all(rows: &[Row], check: impl Fn(&Row) + Sync) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let work = || {
        loop {
            let at = next.fetch_add(CHUNK, Ordering::Relaxed);
            if at >= rows.len() {
                break;
            }
            rows[at..rows.len().min(at + CHUNK)].iter().for_each(&check);
        }
    };
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
}

/// What a table comes to, per model.
#[derive(Default)]
struct Tally {
    rows: usize,
    exact: usize,
    worst: Vec<(u64, String)>,
}

#[derive(Default)]
struct Book(Mutex<BTreeMap<String, Tally>>);

impl Book {
    fn note(&self, model: &str, error: u64, what: impl FnOnce() -> String) {
        let mut book = self.0.lock().unwrap();
        let tally = book.entry(model.to_owned()).or_default();
        tally.rows += 1;
        if error == 0 {
            tally.exact += 1;
        } else {
            tally.worst.push((error, what()));
        }
    }

    /// Prints the models with wrong rows and the worst of them; returns models that are exact, and all.
    fn print(&self, title: &str) -> (usize, usize) {
        let book = self.0.lock().unwrap();
        let exact = book.values().filter(|t| t.exact == t.rows).count();
        let rows: usize = book.values().map(|t| t.rows).sum();
        let right: usize = book.values().map(|t| t.exact).sum();
        println!(
            "{title}: {right} of {rows} rows, {exact} of {} models whole",
            book.len()
        );
        for (model, tally) in book.iter().filter(|(_, t)| t.exact < t.rows) {
            println!("  {model}: {} of {}", tally.exact, tally.rows);
            let mut worst: Vec<_> = tally.worst.iter().collect();
            worst.sort_by_key(|(error, _)| std::cmp::Reverse(*error));
            worst
                .iter()
                .take(3)
                .for_each(|(_, what)| println!("    {what}"));
        }
        (exact, book.len())
    }
}

fn terms(measured: &Measured, term: usize) -> (Vec<u64>, u64) {
    let of = |b: &ggufuse::fit::Bytes| [b.model, b.context, b.compute][term];
    let breakdown = &measured.breakdown;
    (
        breakdown.devices.iter().map(of).collect(),
        of(&breakdown.host),
    )
}

fn true_terms(truth: &Truth, term: usize) -> (Vec<u64>, u64) {
    (
        truth.devices.iter().map(|d| d[term]).collect(),
        truth.host[term],
    )
}

fn distance(a: &(Vec<u64>, u64), b: &(Vec<u64>, u64)) -> u64 {
    let devices = a.0.iter().zip(&b.0).map(|(a, b)| a.abs_diff(*b));
    let lengths = u64::from(a.0.len() != b.0.len());
    devices
        .max()
        .unwrap_or(0)
        .max(a.1.abs_diff(b.1))
        .max(lengths)
}

/// Rows that abort inside ggml, on an assertion of the graph: no combination that llama.cpp refuses.
fn aborts(named: &Named) -> bool {
    matches!(named.model.hparams.arch(), "t5" | "kimi-linear")
}

#[test]
fn memory_is_what_llama_cpp_measures() {
    let (models, rows) = (models(), sample("memory.jsonl.zst", 7));
    let [weights, contexts, computes] = [(); 3].map(|()| Book::default());
    let within = AtomicUsize::new(0);
    let all = AtomicUsize::new(0);
    let problems = Mutex::new(Vec::new());
    for_all(&rows, |row| {
        let named = &models[row.model];
        let what = || {
            format!(
                "{} #{} {:?} on {:?}",
                named.name, row.id, row.args, row.free
            )
        };
        let task = row.task(&named.model).unwrap();
        let measured = task.measure(&task.params);
        let (truth, measured) = match (row.truth(), measured) {
            (Some(truth), Ok(measured)) => (truth, measured),
            (None, Err(_)) => return,
            (None, Ok(_)) if aborts(named) => return,
            (None, Ok(_)) => {
                return problems
                    .lock()
                    .unwrap()
                    .push(format!("{}: not refused", what()));
            }
            (Some(_), Err(why)) => {
                return problems.lock().unwrap().push(format!("{}: {why}", what()));
            }
        };
        for (term, book) in [&weights, &contexts, &computes].into_iter().enumerate() {
            let (is, should) = (terms(&measured, term), true_terms(&truth, term));
            let error = distance(&is, &should);
            book.note(&named.name, error, || {
                format!(
                    "#{} {:?} {}: {is:?}, not {should:?}",
                    row.id, row.args, row.kv_unified
                )
            });
        }
        for (is, should) in measured.breakdown.devices.iter().zip(&truth.devices) {
            let (is, should) = (is.total(), should.iter().sum::<u64>());
            all.fetch_add(1, Ordering::Relaxed);
            if is.abs_diff(should) <= (should / 100).max(32 << 20) {
                within.fetch_add(1, Ordering::Relaxed);
            }
            if is + (64 << 20) < should {
                let short = should - is;
                problems
                    .lock()
                    .unwrap()
                    .push(format!("{}: {short} bytes below", what()));
            }
        }
        if u64::from(measured.context.n_ctx) != truth.n_ctx
            || measured.flash_attn != truth.flash_attn
        {
            problems
                .lock()
                .unwrap()
                .push(format!("{}: {:?}", what(), measured.context));
        }
    });
    let weights = weights.print("weights");
    let contexts = contexts.print("contexts");
    let computes = computes.print("compute buffers");
    let (within, all) = (within.into_inner(), all.into_inner());
    println!("within max(1 %, 32 MiB): {within} of {all} devices");
    let problems = problems.into_inner().unwrap();
    problems.iter().take(40).for_each(|p| println!("{p}"));
    assert_eq!(weights.0, weights.1, "weights are exact on every row");
    assert_eq!(contexts.0, contexts.1, "caches are exact on every row");
    assert!(
        computes.0 * 10 >= computes.1 * 9,
        "compute buffers are exact for 90 % of the models"
    );
    assert!(within * 100 >= all * 99, "99 % of the totals are near");
    assert!(problems.is_empty(), "{} problems", problems.len());
}

/// What a row's search ends in: a line, or the reason there is none.
fn decide(task: &Task<'_>) -> Result<String, NoFit> {
    task.fit().map(|fit| fit.line.text(&task.machine))
}

#[test]
fn decisions_are_those_of_llama_fit_params() {
    let (models, rows) = (models(), sample("decisions.jsonl.zst", 37));
    let book = Book::default();
    for_all(&rows, |row| {
        let named = &models[row.model];
        let Some(task) = row.task(&named.model) else {
            assert_eq!(row.line(), None, "row split is refused");
            return;
        };
        let decided = decide(&task);
        let same = match (&decided, row.line()) {
            (Ok(is), Some(should)) => is == should,
            (Err(_), None) => true,
            (Ok(_), None) => aborts(named),
            (Err(_), Some(_)) => false,
        };
        book.note(&named.name, u64::from(!same), || {
            format!(
                "#{} {:?} on {:?} {}: {decided:?}, not {:?}",
                row.id,
                row.args,
                row.free,
                row.kv_unified,
                row.line()
            )
        });
    });
    let (exact, all) = book.print("decisions");
    assert_eq!(exact, all, "every decision is the peer's");
}
