//! The graph allocator, replayed on sizes: `ggml-alloc.c`. Its highest end of a tensor is the size of the compute buffer.

use super::cuda;
use super::graph::{Backend, Graph, Id, Op};
use super::sched::Schedule;

/// Alignment of device buffers.
const DEVICE_ALIGNMENT: u64 = 128;
/// Alignment of host buffers.
const HOST_ALIGNMENT: u64 = 32;
/// The last free block has no end; what llama.cpp gives it.
const ENDLESS: u64 = u64::MAX / 2;

/// One buffer without end: free blocks by offset (`ggml_dyn_tallocr`).
#[derive(Debug)]
struct Arena {
    alignment: u64,
    /// (offset, size)
    free: Vec<(u64, u64)>,
    end: u64,
}

impl Arena {
    fn new(alignment: u64) -> Arena {
        Arena {
            alignment,
            free: vec![(0, ENDLESS)],
            end: 0,
        }
    }

    fn pad(&self, size: u64) -> u64 {
        size.next_multiple_of(self.alignment)
    }

    /// The smallest block that fits, the later of equal ones; else the endless one.
    fn alloc(&mut self, size: u64) -> u64 {
        let size = self.pad(size);
        let last = self.free.len() - 1;
        let mut best = (last, u64::MAX);
        for (i, (_, free)) in self.free[..last].iter().enumerate() {
            if *free >= size && *free <= best.1 {
                best = (i, *free);
            }
        }
        let block = &mut self.free[best.0];
        let offset = block.0;
        *block = (offset + size, block.1.saturating_sub(size));
        if block.1 == 0 {
            self.free.remove(best.0);
        }
        self.end = self.end.max(offset + size);
        offset
    }

    /// Gives a range back: to the first block that it adjoins, which may join its other neighbour; else as a block of its own.
    /// Empty ranges (there are tensors without elements) become empty blocks that later ranges join, so the order of looking is
    /// ggml's.
    fn release(&mut self, offset: u64, size: u64) {
        let (size, free) = (self.pad(size), &mut self.free);
        let end = offset + size;
        let adjoins = free
            .iter()
            .position(|block| block.0 + block.1 == offset || block.0 == end);
        let Some(i) = adjoins else {
            // Past an empty block the list need not be sorted.
            let at = free
                .iter()
                .position(|block| block.0 >= offset)
                .unwrap_or(free.len());
            return free.insert(at, (offset, size));
        };
        let below = free[i].0 + free[i].1 == offset;
        free[i] = (if below { free[i].0 } else { offset }, free[i].1 + size);
        let first = if below { Some(i) } else { i.checked_sub(1) };
        if let Some(first) = first
            && let Some(second) = free.get(first + 1)
            && free[first].0 + free[first].1 == second.0
        {
            free[first].1 += second.1;
            free.remove(first + 1);
        }
    }
}

/// What the allocator knows of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    /// Nodes that have yet to read it.
    readers: u32,
    /// Views of it that have yet to be read.
    views: u32,
    /// Memory of its own that it holds: buffer and offset.
    place: Option<(Backend, u64)>,
}

struct Replay<'a> {
    g: &'a Graph,
    host: Backend,
    arenas: Vec<Arena>,
    uses: Vec<Use>,
}

/// Bytes that the buffer of a backend holds for a tensor, before alignment.
pub fn size(g: &Graph, id: Id, backend: Backend, host: Backend) -> u64 {
    if backend == host {
        g[id].bytes()
    } else {
        cuda::alloc_size(g, id)
    }
}

/// Bytes of the compute buffer of each device, and of the host behind them.
pub fn replay(g: &Graph, host: Backend, schedule: &Schedule) -> Vec<u64> {
    let mut arenas: Vec<Arena> = (0..host.0).map(|_| Arena::new(DEVICE_ALIGNMENT)).collect();
    arenas.push(Arena::new(HOST_ALIGNMENT));
    let mut replay = Replay {
        g,
        host,
        arenas,
        uses: vec![Use::default(); g.len()],
    };
    for (leaf, backend) in &schedule.leafs {
        replay.place(*leaf, *backend);
    }
    for (id, backend) in &schedule.nodes {
        replay.count(*id, *backend);
    }
    for (id, backend) in &schedule.nodes {
        replay.step(*id, *backend);
    }
    replay.arenas.iter().map(|arena| arena.end).collect()
}

impl Replay<'_> {
    fn size(&self, id: Id, backend: Backend) -> u64 {
        size(self.g, id, backend, self.host)
    }

    /// Counts the readers and views that a node adds, and places inputs.
    fn count(&mut self, id: Id, backend: Backend) {
        let t = &self.g[id];
        if let Some(view) = t.view
            && t.op != Op::None
        {
            self.uses[view.index()].views += 1;
        }
        if t.input {
            self.place(id, backend);
        }
        for source in t.src() {
            self.uses[source.index()].readers += 1;
            if self.g[*source].input {
                self.place(*source, backend);
            }
        }
    }

    /// Computes a node: places what it needs and itself, then frees what nobody reads any more.
    fn step(&mut self, id: Id, backend: Backend) {
        let t = &self.g[id];
        for source in t.src() {
            self.place(*source, backend);
        }
        self.place(id, backend);
        for source in t.src() {
            let used = &mut self.uses[source.index()];
            used.readers -= 1;
            if used.readers > 0 || used.views > 0 {
                continue;
            }
            match self.g[*source].view {
                Some(view) => {
                    let base = &mut self.uses[view.index()];
                    base.views -= 1;
                    if base.views == 0 && base.readers == 0 {
                        self.free(view);
                    }
                }
                None => self.free(*source),
            }
        }
    }

    /// Gives a tensor memory: that of a source that it alone still reads, if the operation can work in place, else new.
    fn place(&mut self, id: Id, backend: Backend) {
        let t = &self.g[id];
        if self.uses[id.index()].place.is_some() || t.home.is_some() || t.view.is_some() {
            return;
        }
        if t.op.can_inplace()
            && let Some(parent) = t
                .src()
                .iter()
                .find(|parent| self.can_take_over(id, **parent))
        {
            let place = self.uses[parent.index()].place.take();
            self.uses[id.index()].place = place;
            if let Some((backend, offset)) = place {
                let arena = &self.arenas[backend.index()];
                let old = arena.pad(self.size(*parent, backend));
                let new = arena.pad(self.size(id, backend));
                if old > new {
                    self.arenas[backend.index()].release(offset + new, old - new);
                }
            }
            return;
        }
        let size = self.size(id, backend);
        let offset = self.arenas[backend.index()].alloc(size);
        self.uses[id.index()].place = Some((backend, offset));
    }

    fn can_take_over(&self, id: Id, parent: Id) -> bool {
        let used = self.uses[parent.index()];
        used.place.is_some()
            && used.readers == 1
            && used.views == 0
            && !self.g[parent].output
            && self.g[id].same_layout(&self.g[parent])
    }

    fn free(&mut self, id: Id) {
        if self.g[id].output {
            return;
        }
        if let Some((backend, offset)) = self.uses[id.index()].place.take() {
            let size = self.size(id, backend);
            self.arenas[backend.index()].release(offset, size);
        }
    }
}
