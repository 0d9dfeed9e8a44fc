//! Which backend computes what, and where tensors are copied: `ggml_backend_sched_split_graph`, step by step.

use super::cuda;
use super::graph::{Backend, Graph, Id, MAX_SRC, Op};
use super::hints::{self, Kept};

/// What the scheduler is given besides the graph.
#[derive(Debug, Clone, Copy)]
pub struct Backends {
    /// The number of devices; the host is the backend behind the last.
    pub devices: u8,
    /// Large operations on weights in host memory run on a device.
    pub op_offload: bool,
    /// Copies of each tensor that moves between backends: 4 for pipeline parallelism, else 1.
    pub copies: usize,
}

impl Backends {
    /// The host's backend.
    pub fn host(self) -> Backend {
        Backend(self.devices)
    }

    fn count(self) -> usize {
        usize::from(self.devices) + 1
    }

    fn all(self) -> impl Iterator<Item = Backend> {
        (0..=self.devices).map(Backend)
    }
}

/// What the allocator has to place, in order.
#[derive(Debug, Default)]
pub struct Schedule {
    /// Leaves, which are placed first.
    pub leafs: Vec<(Id, Backend)>,
    /// Nodes, copies, and nodes without an operation that only keep their sources alive.
    pub nodes: Vec<(Id, Backend)>,
}

/// Consecutive nodes on one backend.
struct Split {
    backend: Backend,
    nodes: std::ops::Range<usize>,
    /// Tensors that are copied to the backend before it starts.
    inputs: Vec<Id>,
}

/// The backend of each tensor.
struct Assignment<'a> {
    g: &'a Graph,
    on: Backends,
    at: Vec<Option<Backend>>,
}

impl Assignment<'_> {
    fn get(&self, id: Id) -> Option<Backend> {
        self.at[id.index()]
    }

    /// Whether the backend computes the node: it knows the operation, and no source lies on another device.
    fn supports(&self, backend: Backend, id: Id) -> bool {
        if backend == self.on.host() {
            return true;
        }
        let elsewhere = |source: &Id| {
            let home = self.g[*source].home;
            home.is_some_and(|home| home.backend != self.on.host() && home.backend != backend)
        };
        !self.g[id].src().iter().any(elsewhere) && cuda::supports(self.g, id)
    }

    /// The backend whose buffer the tensor lies in, if it can compute `node`.
    fn at_home(&self, tensor: Id, node: Id) -> Option<Backend> {
        let home = self.g[self.g.root(tensor)].home?;
        self.supports(home.backend, node).then_some(home.backend)
    }

    /// Where a tensor has to be by itself: its buffer, the host for inputs, or where its weights are.
    fn by_itself(&self, id: Id) -> Option<Backend> {
        if let Some(backend) = self.at_home(id, id) {
            return Some(backend);
        }
        let tensor = &self.g[id];
        if tensor.input {
            return Some(self.on.host());
        }
        if matches!(tensor.op, Op::Rope | Op::FlashAttnExt { .. }) {
            return None;
        }
        let weight = tensor
            .src()
            .iter()
            .find(|source| self.is_weight(**source))?;
        let backend = self.at_home(*weight, id);
        if self.on.op_offload && backend == Some(self.on.host()) && cuda::offloads(tensor) {
            let device = self
                .on
                .all()
                .find(|b| *b != self.on.host() && self.supports(*b, id));
            return device.or(backend);
        }
        backend
    }

    fn is_weight(&self, id: Id) -> bool {
        self.g[id].home.is_some_and(|home| home.weights)
    }

    /// Spreads backends from assigned nodes over unassigned ones, in the order given.
    fn spread(&mut self, nodes: impl Iterator<Item = Id>, devices_only: bool) {
        let mut current = None;
        for id in nodes {
            match self.get(id) {
                Some(backend) if devices_only && backend == self.on.host() => current = None,
                Some(backend) => current = Some(backend),
                None => {
                    if let Some(backend) = current.filter(|backend| self.supports(*backend, id)) {
                        self.at[id.index()] = Some(backend);
                    }
                }
            }
        }
    }

    /// The backend that has most of the sources of a node, among those that can compute it.
    fn with_most_sources(&self, id: Id) -> Option<Backend> {
        let usable = |backend: Backend| {
            let here = |source: &&Id| self.is_usable(**source, backend);
            self.g[id].src().iter().filter(here).count()
        };
        let mut best = None;
        for backend in self.on.all().filter(|backend| self.supports(*backend, id)) {
            let n = usable(backend);
            if best.is_none_or(|(_, most)| n > most) {
                best = Some((backend, n));
            }
        }
        best.map(|(backend, _)| backend)
    }

    /// Whether the backend can read the tensor where it is.
    fn is_usable(&self, id: Id, backend: Backend) -> bool {
        let root = self.g.root(id);
        let place = match self.g[root].home {
            Some(home) => Some(home.backend),
            None => self.get(id).or(self.get(root)),
        };
        place == Some(backend)
    }
}

/// The backend of every tensor of the order; `pins` are set before (`ggml_backend_sched_set_tensor_backend`).
pub fn assign(g: &Graph, on: Backends, pins: &[(Id, Backend)]) -> Vec<Option<Backend>> {
    let mut a = Assignment {
        g,
        on,
        at: vec![None; g.len()],
    };
    for (id, backend) in pins {
        a.at[id.index()] = Some(*backend);
    }
    for id in g.leafs.iter().chain(&g.nodes) {
        if a.get(*id).is_none() {
            a.at[id.index()] = a.by_itself(*id);
        }
    }
    let computed = || g.nodes.iter().copied().filter(|id| !g[*id].op.is_view());
    for devices_only in [true, false] {
        a.spread(computed(), devices_only);
        a.spread(computed().rev(), devices_only);
    }
    for id in computed() {
        if a.get(id).is_none() {
            a.at[id.index()] = a.with_most_sources(id);
        }
    }
    for id in &g.nodes {
        if a.get(*id).is_none() {
            a.at[id.index()] = g[*id].view.and_then(|view| a.get(view));
        }
        for source in g[*id].src() {
            if a.get(*source).is_none() {
                a.at[source.index()] = match g[*source].view {
                    Some(view) => a.get(view),
                    None => a.get(*id),
                };
            }
        }
    }
    a.at
}

/// The copies of tensors on other backends, by tensor and backend; the first of several is the one that is used.
struct Copies {
    first: Vec<Option<Id>>,
    backends: usize,
}

impl Copies {
    fn get(&self, id: Id, backend: Backend) -> Option<Id> {
        self.first[id.index() * self.backends + backend.index()]
    }

    fn set(&mut self, id: Id, backend: Backend, copy: Id) {
        self.first[id.index() * self.backends + backend.index()] = Some(copy);
    }
}

/// Assigns the nodes of `g` to backends, splits them, and makes sources copies where a split needs them on another backend.
pub fn schedule(g: &mut Graph, on: Backends) -> Schedule {
    let at = assign(g, on, &[]);
    let mut copies = Copies {
        first: vec![None; g.len() * on.count()],
        backends: on.count(),
    };
    let splits = split(g, on, &at, &mut copies);
    let mut kept = vec![Vec::new(); g.len()];
    for split in &splits {
        if split.backend != on.host() {
            hints::keep_alive(g, split.nodes.clone(), &mut kept);
        }
    }
    emit(g, on, &at, &splits, &copies, &kept)
}

/// Cuts the order where the backend changes, and where a weight has to be copied in while others still are.
fn split(g: &mut Graph, on: Backends, at: &[Option<Backend>], copies: &mut Copies) -> Vec<Split> {
    let host = on.host();
    let backend_of = |id: Id| at[id.index()].unwrap_or(host);
    let usable = |g: &Graph, id: Id, backend: Backend| {
        let root = g.root(id);
        g[root]
            .home
            .map_or_else(|| backend_of(id), |home| home.backend)
            == backend
    };
    let first = g.nodes.iter().find(|id| !g[**id].op.is_view());
    let mut current = Split {
        backend: first.map_or(host, |id| backend_of(*id)),
        nodes: 0..0,
        inputs: Vec::new(),
    };
    let mut splits = Vec::new();
    for i in 0..g.nodes.len() {
        let id = g.nodes[i];
        if g[id].op.is_view() {
            continue;
        }
        let backend = backend_of(id);
        let copies_weight = |source: &Id| {
            g[*source]
                .home
                .is_some_and(|home| home.weights && home.backend != backend)
        };
        let crowded = !current.inputs.is_empty() && g[id].src().iter().any(copies_weight);
        if backend != current.backend || crowded {
            current.nodes.end = i;
            let next = Split {
                backend,
                nodes: i..i,
                inputs: Vec::new(),
            };
            splits.push(std::mem::replace(&mut current, next));
        }
        for j in 0..g[id].src().len() {
            let source = g[id].src()[j];
            if backend_of(source) == backend || usable(g, source, backend) {
                continue;
            }
            let copy = copies.get(source, backend).unwrap_or_else(|| {
                let copy = copy_of(g, source, on.copies, on.copies > 1);
                copies.set(source, backend, copy);
                current.inputs.push(source);
                copy
            });
            g.set_source(id, j, copy);
        }
    }
    current.nodes.end = g.nodes.len();
    splits.push(current);
    splits
}

/// `n` copies of a tensor, the first of which is returned and the others follow; `pinned` ones stay for the whole graph.
fn copy_of(g: &mut Graph, id: Id, n: usize, pinned: bool) -> Id {
    let first = Id(g.len() as u32);
    for _ in 0..n {
        let copy = g.copy_of(id);
        g[copy].input = pinned;
        g[copy].output = pinned;
    }
    first
}

/// The `n` tensors from `first` on.
fn several(first: Id, n: usize) -> impl Iterator<Item = Id> {
    (first.0..).take(n).map(Id)
}

/// The order for the allocator: copies where splits begin, and what is kept alive behind the node until which it is.
fn emit(
    g: &mut Graph,
    on: Backends,
    at: &[Option<Backend>],
    splits: &[Split],
    copies: &Copies,
    kept: &Kept,
) -> Schedule {
    let backend_of = |id: Id| at[id.index()].unwrap_or(on.host());
    let mut out = Schedule::default();
    if on.copies > 1 {
        for leaf in g.leafs.clone() {
            if g[leaf].input {
                let backend = backend_of(leaf);
                g[leaf].output = true;
                out.leafs.push((leaf, backend));
                let rest = copy_of(g, leaf, on.copies - 1, true);
                out.leafs
                    .extend(several(rest, on.copies - 1).map(|copy| (copy, backend)));
            }
        }
        for split in splits {
            for input in &split.inputs {
                let first = copies.get(*input, split.backend);
                let all = first
                    .into_iter()
                    .flat_map(|first| several(first, on.copies));
                out.leafs.extend(all.map(|copy| (copy, split.backend)));
            }
        }
    }
    out.leafs
        .extend(g.leafs.iter().map(|leaf| (*leaf, backend_of(*leaf))));
    for split in splits {
        for input in &split.inputs {
            // The source must not be freed before it was copied.
            let keep = keep_node(g, &[*input]);
            out.nodes.push((keep, backend_of(*input)));
            out.nodes.extend(
                copies
                    .get(*input, split.backend)
                    .map(|copy| (copy, split.backend)),
            );
        }
        for i in split.nodes.clone() {
            let id = g.nodes[i];
            out.nodes.push((id, backend_of(id)));
            for some in kept[id.index()].chunks(MAX_SRC) {
                let keep = keep_node(g, some);
                out.nodes.push((keep, split.backend));
            }
        }
    }
    out
}

/// A node without an operation that reads `sources` and takes no memory.
fn keep_node(g: &mut Graph, sources: &[Id]) -> Id {
    let (ne, nb) = (g[sources[0]].ne, g[sources[0]].nb);
    g.node_in(Op::None, sources[0], ne, nb, 0, sources)
}
