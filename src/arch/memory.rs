/// What an architecture keeps of past tokens (`llama_model::create_memory`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Nothing: encoders and diffusion models.
    None,
    /// A KV cache for full layers and, with a window, one for the layers that use it.
    Attention,
    /// A KV cache, and one for the keys of an indexer that selects what is attended to.
    Indexed,
    /// A state per sequence.
    Recurrent,
    /// A KV cache and a state, each for its layers; and one for indexer keys where there is an indexer.
    Hybrid,
    /// DeepSeek-V4's compressed caches.
    Compressed,
}

impl MemoryKind {
    pub(super) fn of(arch: &str, has_indexer: bool) -> MemoryKind {
        match arch {
            "bert" | "jina-bert-v2" | "jina-bert-v3" | "nomic-bert" | "nomic-bert-moe"
            | "neo-bert" | "eurobert" | "modern-bert" | "gemma-embedding" | "dream" | "llada"
            | "llada-moe" | "rnd1" | "clef" | "wavtokenizer-dec" => MemoryKind::None,
            "deepseek32" | "glm-dsa" | "dots3note" | "minimax-m3" => MemoryKind::Indexed,
            "hy_v4" if has_indexer => MemoryKind::Indexed,
            "deepseek4" => MemoryKind::Compressed,
            "jamba" | "falcon-h1" | "plamo2" | "granitehybrid" | "lfm2" | "lfm2moe"
            | "nemotron_h" | "nemotron_h_moe" | "qwen3next" | "kimi-linear" | "bailingmoe3"
            | "kimi-k3" | "glm5-next" | "qwen35" | "qwen35moe" | "qwen4exp" | "minimax-01" => {
                MemoryKind::Hybrid
            }
            arch if super::recurrent::is_recurrent(arch) => MemoryKind::Recurrent,
            _ => MemoryKind::Attention,
        }
    }
}
