use super::{ArchError, Keys};

/// Architectures whose layers are all recurrent (`llm_arch_is_recurrent`).
pub(super) fn is_recurrent(arch: &str) -> bool {
    matches!(
        arch,
        "mamba" | "mamba2" | "rwkv6" | "rwkv6qwen2" | "rwkv7" | "arwkv7"
    )
}

/// Which layers keep a recurrent state. `n` is the number of layers, `n_all` that with NextN layers.
pub(super) fn recurrent_layers(
    keys: &Keys,
    n: usize,
    n_all: usize,
    n_head_kv: &[u64],
    n_ff: &[u64],
) -> Result<Vec<bool>, ArchError> {
    let zero = |list: &[u64], i: usize| list.get(i) == Some(&0);
    let layers = |rule: &dyn Fn(usize) -> bool| (0..n_all).map(|i| i < n && rule(i)).collect();
    Ok(match keys.arch() {
        arch if is_recurrent(arch) => vec![true; n_all],
        "falcon-h1" => vec![true; n_all],
        "jamba" | "granitehybrid" | "lfm2" | "lfm2moe" | "plamo2" | "kimi-linear" | "kimi-k3"
        | "bailingmoe3" | "glm5-next" => layers(&|i| zero(n_head_kv, i)),
        "nemotron_h" | "nemotron_h_moe" => layers(&|i| zero(n_head_kv, i) && zero(n_ff, i)),
        arch @ ("qwen3next" | "qwen35" | "qwen35moe" | "qwen4exp" | "clef" | "minimax-01") => {
            if let Some(list) = keys.per_layer("attention.recurrent_layers", n_all)? {
                return Ok(list.iter().map(|&x| x != 0).collect());
            }
            let default = if arch == "minimax-01" { 8 } else { 4 };
            let interval = keys.opt("full_attention_interval")?.unwrap_or(default);
            if interval == 0 {
                return Err(ArchError::Range {
                    key: keys.full("full_attention_interval"),
                    value: "0".to_owned(),
                });
            }
            layers(&|i| !(i as u64 + 1).is_multiple_of(interval))
        }
        _ => vec![false; n_all],
    })
}
