//! Deepstack: embeddings of images for deeper layers (Qwen 3 VL, Granite).

use super::{Build, Error};
use crate::fit::compute::graph::Id;

/// Embeddings of images for deeper layers, which come in behind those for the first one.
#[derive(Debug)]
pub struct Deepstack {
    /// Layers after which the next part is added.
    layers: usize,
    /// The part that is added before each layer, if any.
    mapping: Vec<i128>,
}

impl Deepstack {
    /// What the header says of it.
    pub fn of(b: &Build<'_>) -> Result<Deepstack, Error> {
        let layers = b.hp.keys.opt("n_deepstack_layers")?.unwrap_or(0);
        let mapping = b.hp.keys.ints("deepstack_mapping");
        Ok(Deepstack {
            layers: usize::try_from(layers).unwrap_or(usize::MAX),
            mapping: mapping.unwrap_or_default().to_vec(),
        })
    }

    /// Added before a layer.
    pub fn before(&self, b: &mut Build<'_>, il: usize, x: Id, embedded: Id) -> Id {
        let part = self
            .mapping
            .get(il)
            .and_then(|&part| u64::try_from(part).ok());
        match part {
            Some(part) if il > 0 => add_part(b, x, embedded, part),
            _ => x,
        }
    }

    /// Added behind a layer.
    pub fn after(&self, b: &mut Build<'_>, il: usize, x: Id, embedded: Id) -> Id {
        if il < self.layers {
            add_part(b, x, embedded, il as u64 + 1)
        } else {
            x
        }
    }
}

fn add_part(b: &mut Build<'_>, x: Id, embedded: Id, part: u64) -> Id {
    let ([width, n, ..], nb) = (b.g[embedded].ne, b.g[embedded].nb);
    let part = b.g.view(
        embedded,
        &[width, n],
        &nb[1..2],
        part.saturating_mul(width * nb[0]),
    );
    b.g.add(x, part)
}
