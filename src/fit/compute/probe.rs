//! Whether a fused operation is used: only if every layer's backend has it (`llama_context::resolve_fused_ops`).
//!
//! llama.cpp builds a graph of one token per sequence for it, assigns its nodes to backends, and looks where those of the
//! operation are. That graph is built here only where the graph that is measured anyway does not tell.

use super::build::{self, Error};
use super::graph::{Backend, Fused, Graph, Id, Op};
use super::setting::{Batch, Setting};
use super::{cuda, sched};

/// Batches from this size on have large operations on weights in host memory run on a device.
const SMALL_BATCH: u64 = 32;

/// Whether attention is one fused node, if that is left open. `graph` is the model's graph with it.
pub fn flash_attention(setting: Setting<'_>, graph: &Graph) -> Result<bool, Error> {
    if is_settled(setting, graph) {
        return Ok(true);
    }
    let tokens = setting.batch().sequences;
    let batch = Batch {
        tokens,
        sequences: tokens,
        outputs: tokens,
    };
    let graph = build::graph(setting, batch, true)?;
    let pinned = tokens < SMALL_BATCH || setting.is_all_offloaded();
    let norms = graph.norms.iter().filter(|_| pinned);
    let pins: Vec<(Id, Backend)> = norms.map(|(id, il)| (*id, setting.layer(*il))).collect();
    let at = sched::assign(&graph, setting.backends(), &pins);
    let mut nodes = attentions(&graph);
    Ok(nodes.all(|(id, il)| at[id.index()] == Some(setting.layer(il))))
}

/// The fused attentions, and their layers.
fn attentions(graph: &Graph) -> impl Iterator<Item = (Id, usize)> {
    let of_kind = graph
        .fused
        .iter()
        .filter(|(kind, ..)| *kind == Fused::FlashAttention);
    of_kind.map(|(_, id, il)| (*id, *il))
}

/// Whether every fused attention stands between the store of its values in its layer's cache and a matrix of its layer, so
/// that it runs where they are, whatever the size of the batch. The scheduler spreads a device from the store before it;
/// the host only if no device comes up from the matrix behind it.
fn is_settled(setting: Setting<'_>, graph: &Graph) -> bool {
    let host = setting.backends().host();
    let small = setting.batch().sequences < SMALL_BATCH;
    let mut attentions = attentions(graph).peekable();
    let mut stored = None;
    let mut host_needs_matrix = false;
    for id in graph.nodes.iter().filter(|id| !graph[**id].op.is_view()) {
        let node = &graph[*id];
        if host_needs_matrix {
            let weight = node
                .src()
                .iter()
                .find_map(|id| graph[*id].home.filter(|h| h.weights));
            match weight {
                Some(home) if node.op == Op::MulMat && home.backend == host => {
                    host_needs_matrix = false;
                }
                Some(_) => return false,
                None if graph[graph.root(*id)].home.is_some() => return false,
                None => {}
            }
        }
        if let Some((_, il)) = attentions.next_if(|(attention, _)| attention == id) {
            let layer = setting.layer(il);
            let here = |id: &Id| graph[*id].home.is_none_or(|home| home.backend == layer);
            let on_host = layer == host;
            let runs = on_host && small || !on_host && cuda::supports(graph, *id);
            if stored != Some(layer) || !runs || !node.src().iter().all(here) {
                return false;
            }
            host_needs_matrix = on_host;
        }
        let home = graph[graph.root(*id)]
            .home
            .filter(|_| node.op == Op::SetRows);
        stored = home.map(|home| home.backend);
        if stored.is_some_and(|backend| backend != host) && !cuda::supports(graph, *id) {
            return false;
        }
    }
    attentions.next().is_none() && !host_needs_matrix
}
