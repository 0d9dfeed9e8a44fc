//! Graph builders against what llama.cpp b11434 measures on simulated devices for tiny models of 132 architectures, and the closed
//! form that stands in for a builder against all that is known.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(clippy::print_stdout, reason = "the worst rows are for people")]

#[path = "common/oracle.rs"]
mod oracle;

use ggufuse::arch::Model;
use ggufuse::fit::compute::setting::Setting;
use ggufuse::fit::compute::{Compute, closed};
use ggufuse::fit::{CacheLayout, Context, Placement, Task, measure};
use oracle::{models, models_in, rows};

/// Architectures without a builder.
const UNKNOWN: [&str; 7] = [
    "cogvlm",
    "grovemoe",
    "kimi-k3",
    "minimax-01",
    "minimax-m3",
    "qwen3tts",
    "talkie",
];

#[test]
fn tiny_models_of_all_architectures_are_exact() {
    let models = models_in("tiny/headers.zst");
    let (mut exact, mut estimated, mut wrong) = (0, 0, Vec::new());
    for row in rows("tiny/memory.jsonl.zst") {
        let named = &models[row.model];
        let Some(truth) = row.truth() else { continue };
        let task = row.task(&named.model).unwrap();
        let measured = measure(&named.model, &task.params, &task.machine).unwrap();
        let terms = |b: &ggufuse::fit::Bytes| [b.model, b.context, b.compute];
        let devices: Vec<_> = measured.breakdown.devices.iter().map(terms).collect();
        let host = terms(&measured.breakdown.host);
        let what = format!("{} {:?} on {}", named.name, row.args, devices.len());
        if measured.estimated.is_none() {
            exact += 1;
            if (&devices, host) != (&truth.devices, truth.host) {
                let (want, want_host) = (&truth.devices, truth.host);
                wrong.push(format!(
                    "{what}: {devices:?} {host:?}, not {want:?} {want_host:?}"
                ));
            }
            continue;
        }
        estimated += 1;
        assert!(UNKNOWN.contains(&named.model.hparams.arch()), "{what}");
        let pairs = devices.iter().zip(&truth.devices);
        for (have, want) in pairs.chain([(&host, &truth.host)]) {
            assert_eq!(have[..2], want[..2], "{what}");
            assert!(have[2] >= want[2], "{what}: {} < {}", have[2], want[2]);
        }
    }
    println!("{exact} rows by graphs, {estimated} in closed form");
    wrong.iter().take(20).for_each(|row| println!("{row}"));
    assert!(wrong.is_empty(), "{} rows differ", wrong.len());
    assert!(exact > 2_500 && estimated > 100);
}

fn closed_form(model: &Model, task: &Task<'_>) -> Option<Compute> {
    let (hp, params) = (&model.hparams, &task.params);
    let context = Context::new(hp, params).ok()?;
    let placement = Placement::new(model, params, &task.machine).ok()?;
    let cache = CacheLayout::new(hp, params, &context, &placement);
    Some(closed::estimate(Setting {
        model,
        params,
        context: &context,
        placement: &placement,
        cache: &cache,
    }))
}

/// As if no architecture were known.
#[test]
fn the_closed_form_errs_on_the_safe_side() {
    let models = models();
    let (mut all, mut short, mut ratios) = (0, 0, Vec::new());
    for row in rows("memory.jsonl.zst") {
        let named = &models[row.model];
        let (Some(truth), Some(task)) = (row.truth(), row.task(&named.model)) else {
            continue;
        };
        let have = closed_form(&named.model, &task).unwrap();
        let devices = have.devices.iter().zip(&truth.devices);
        for (&have, want) in devices.chain([(&have.host, &truth.host)]) {
            all += 1;
            if have < want[2] {
                short += 1;
                println!("{} {:?}: {have} < {}", named.name, row.args, want[2]);
            }
            if want[2] > 0 {
                ratios.push(have as f64 / want[2] as f64);
            }
        }
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    println!(
        "{short} of {all} buffers are estimated too small; half are at most {median:.2} times what they are"
    );
    assert!(short * 50 <= all, "{short} of {all} are too small");
    assert!(median < 2.0, "{median}");
}
