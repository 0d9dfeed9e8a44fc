//! Laws of the memory model that hold in what llama.cpp measures, for random models, parameters and machines.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/oracle.rs"]
mod oracle;

use std::sync::LazyLock;

use ggufuse::arch::{Model, Role};
use ggufuse::fit::{
    CacheLayout, Context, Device, Machine, Params, Placement, Request, Task, cache_bytes,
    find_flag, weight_bytes,
};
use ggufuse::gguf::GgmlType;
use oracle::{Named, models};
use proptest::prelude::*;

static MODELS: LazyLock<Vec<Named>> = LazyLock::new(models);

fn any_model() -> impl Strategy<Value = &'static Model> {
    (0..MODELS.len()).prop_map(|i| &MODELS[i].model)
}

fn machine(free: &[u64]) -> Machine {
    let device = |(i, &free): (usize, &u64)| Device {
        name: format!("CUDA{i}"),
        free,
        total: free,
    };
    Machine {
        devices: free.iter().enumerate().map(device).collect(),
        host: None,
    }
}

/// Bytes of all caches, wherever they are.
fn caches(model: &Model, params: &Params) -> Option<u64> {
    let machine = machine(&[8 << 30]);
    let context = Context::new(&model.hparams, params).ok()?;
    let placement = Placement::new(model, params, &machine).unwrap();
    let layout = CacheLayout::new(&model.hparams, params, &context, &placement);
    let (devices, host) = cache_bytes(&layout, 1);
    Some(devices.iter().sum::<u64>() + host)
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(256))]

    /// Whatever the split, the devices hold the same weights, if no table has to be on several of them.
    #[test]
    fn weights_are_conserved_over_devices(
        model in any_model(),
        split in prop::collection::vec(0u32..20, 1..6),
        n_gpu_layers in -1i32..120,
    ) {
        let shared = |t: &ggufuse::arch::Tensor| t.role == Role::Rope;
        prop_assume!(!model.tensors().iter().any(shared));
        let machine = machine(&vec![1 << 30; split.len()]);
        let params = Params { n_gpu_layers, ..Params::default() };
        let sum = |params: &Params| {
            let placement = Placement::new(model, params, &machine).unwrap();
            let (devices, host) = weight_bytes(model, &placement);
            (devices.iter().sum::<u64>(), host)
        };
        let tensor_split = split.iter().map(|&n| n as f32).collect();
        let even = sum(&params);
        prop_assert_eq!(sum(&Params { tensor_split, ..params }), even);
    }

    /// More context is never a smaller cache.
    #[test]
    fn more_context_is_no_smaller_cache(
        model in any_model(),
        n_ctx in 1u32..200_000,
        more in 0u32..100_000,
        n_seq in 1u32..9,
        kv_unified: bool,
        swa_full: bool,
        n_ubatch in 1u32..4096,
    ) {
        let params = Params { n_ctx, n_seq, kv_unified, swa_full, n_ubatch, ..Params::default() };
        let longer = Params { n_ctx: n_ctx + more, ..params.clone() };
        prop_assert!(caches(model, &params) <= caches(model, &longer));
    }

    /// A quantized cache is smaller, where there is one of keys and values.
    #[test]
    fn a_quantized_cache_is_smaller(
        model in any_model(),
        n_ctx in 4096u32..100_000,
        name in prop::sample::select(&["q8_0", "q5_1", "q4_0"][..]),
    ) {
        let quantized = GgmlType::from_name(name).unwrap();
        let params = Params { n_ctx, ..Params::default() };
        let smaller = Params { type_k: quantized, type_v: quantized, ..params.clone() };
        let plain = caches(model, &params).unwrap();
        // Some head sizes are no multiple of a block: refused.
        let Some(small) = caches(model, &smaller) else { return Ok(()); };
        let floor = caches(model, &Params { n_ctx: 256, ..params }).unwrap();
        prop_assert!(small < plain || plain == floor, "{small} {plain}");
    }

    /// Whatever is asked for, placement and caches end, and count every loaded tensor once or more.
    #[test]
    fn no_weight_is_lost(
        model in any_model(),
        free in prop::collection::vec(0u64..100 << 30, 0..5),
        n_gpu_layers in -2i32..200,
    ) {
        let machine = machine(&free);
        let params = Params { n_gpu_layers, ..Params::default() };
        // Devices of unknown memory cannot be split by it.
        let Ok(placement) = Placement::new(model, &params, &machine) else { return Ok(()); };
        let (devices, host) = weight_bytes(model, &placement);
        let loaded = |(i, t): (usize, &ggufuse::arch::Tensor)| placement.tensor(i).map_or(0, |_| t.bytes);
        let bytes: u64 = model.tensors().iter().enumerate().map(loaded).sum();
        prop_assert!(devices.iter().sum::<u64>() + host >= bytes);
    }
}

proptest! {
    #![proptest_config(config(24))]

    /// The chosen line, measured again, respects the margin: on one device if it offloads a layer, on several if
    /// nothing had to be changed. Elsewhere the peer does not look at the last state, and the line can miss it.
    #[test]
    fn the_chosen_line_respects_the_margin(
        model in any_model(),
        share in 5u64..160,
        n_devices in 1usize..4,
        n_ctx in prop::sample::select(&["", "4096", "16384"][..]),
        margin in prop::sample::select(&["256", "1024"][..]),
    ) {
        let weights: u64 = model.tensors().iter().map(|t| t.bytes).sum();
        let free = weights / 100 * share / n_devices as u64 + (1 << 30);
        let mut request = Request::default();
        request.set(find_flag("fitt").unwrap(), margin).unwrap();
        if !n_ctx.is_empty() {
            request.set(find_flag("c").unwrap(), n_ctx).unwrap();
        }
        let task = Task::new(model, &request, machine(&vec![free; n_devices])).unwrap();
        let fit = task.fit().unwrap();
        let again = task.measure(&fit.line.apply(&task.params)).unwrap();
        prop_assert_eq!(&again, &fit.measured);
        let ngl = fit.line.n_gpu_layers;
        if (n_devices == 1 && ngl > 0) || (n_devices > 1 && ngl == -1) {
            for (d, bytes) in again.breakdown.devices.iter().enumerate() {
                prop_assert!(bytes.total() + task.margin[d] <= free, "{}", fit.line.text(&task.machine));
            }
        }
    }
}
