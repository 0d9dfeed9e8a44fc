//! Any files in a directory: they are refused as a model, or every view of them is valid GGUF with the same tensors, and
//! shards lead back to the merged file.
//!
//! The input is five bytes of options and then the files, each beginning with `GGUF`, so that a byte put in or taken
//! out leaves the rest as it was.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ggufuse::gguf::{self, Header, Tensor};
use ggufuse::layout::{Built, Piece, SplitOptions, VirtualFile};
use ggufuse::model::{self, Model};
use ggufuse::views::{self, Files, Kind, ViewOptions};
use libfuzzer_sys::fuzz_target;

/// Larger files (huge alignments make them) are looked at, not written.
const SMALL: u64 = 1 << 20;

fn scratch() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let parent = if Path::new("/dev/shm").is_dir() {
            "/dev/shm".into()
        } else {
            std::env::temp_dir()
        };
        tempfile::tempdir_in(parent).unwrap().keep()
    })
}

/// An empty folder that goes away at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = scratch().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        // The last one out.
        let _ = fs::remove_dir(scratch());
    }
}

fn files(data: &[u8]) -> Vec<&[u8]> {
    let mut starts: Vec<usize> = (0..data.len())
        .filter(|&i| data[i..].starts_with(b"GGUF"))
        .take(6)
        .collect();
    if starts.is_empty() {
        starts.push(0);
    }
    let ends = starts.iter().skip(1).copied().chain([data.len()]);
    starts
        .iter()
        .zip(ends)
        .map(|(&from, to)| &data[from..to])
        .collect()
}

fn fill(model: &Model, file: &VirtualFile, buf: &mut [u8], at: u64) {
    let mut done = 0;
    for piece in file.resolve(at, buf.len() as u64) {
        let n = piece.len() as usize;
        let part = &mut buf[done..done + n];
        match piece {
            Piece::Inline(bytes) => part.copy_from_slice(bytes),
            Piece::Zeros(_) => part.fill(0),
            Piece::Source { source, offset, .. } => {
                model.sources[source].read_exact_at(part, offset).unwrap()
            }
        }
        done += n;
    }
    assert_eq!(done, buf.len());
}

fn bytes(model: &Model, file: &VirtualFile) -> Vec<u8> {
    let mut all = vec![0; file.len() as usize];
    fill(model, file, &mut all, 0);
    all
}

/// Trailing dimensions of 1 are not written, but for the first.
fn dims(tensor: &Tensor) -> &[u64] {
    let kept = tensor
        .dims
        .iter()
        .rposition(|&d| d != 1)
        .map_or(0, |last| last + 1);
    &tensor.dims[..kept]
}

fn unknown(tensor: &Tensor) -> bool {
    tensor.ty.block().is_none()
}

/// The file is GGUF again; its tensors.
fn check(model: &Model, built: &Built) -> Header {
    let mut end = 0;
    for extent in built.file.extents() {
        assert!(extent.start == end && extent.len > 0);
        end += extent.len;
    }
    assert_eq!(end, built.file.len());
    let header = gguf::read(built.file.len(), |buf, at| {
        fill(model, &built.file, buf, at);
        Ok::<(), gguf::Error>(())
    })
    .expect("a view is valid");
    assert_eq!(header.tensors().len() as u64, built.n_tensors);
    assert_eq!(header.data_offset(), built.header_len);
    header
}

/// The tensors of the files of a view are those of the model, one after the other.
fn same_tensors(model: &Model, view: &Files) {
    let headers: Vec<Header> = view
        .files
        .iter()
        .map(|(_, built)| check(model, built))
        .collect();
    let ours = headers
        .iter()
        .zip(&view.files)
        .flat_map(|(header, (_, built))| header.tensors().iter().map(move |t| (&built.file, t)));
    let theirs = model
        .headers
        .iter()
        .zip(&model.sources)
        .flat_map(|(header, source)| header.tensors().iter().map(move |t| (source, t)));
    assert_eq!(ours.clone().count(), theirs.clone().count());
    for ((file, ours), (source, theirs)) in ours.zip(theirs) {
        assert_eq!(
            (&ours.name, dims(ours), ours.ty),
            (&theirs.name, dims(theirs), theirs.ty)
        );
        // The length of an unknown type is up to what comes next, so it may have become longer by padding.
        assert!(ours.len == theirs.len || unknown(theirs) && ours.len > theirs.len);
        let n = theirs.len as usize;
        let (mut a, mut b) = (vec![0; n], vec![0; n]);
        if n > 0 {
            fill(model, file, &mut a, ours.offset);
            source.read_exact_at(&mut b, theirs.offset).unwrap();
        }
        assert_eq!(a, b);
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((options, data)) = data.split_first_chunk::<5>() else {
        return;
    };
    let [how, limits, tensors, size, file_size] = *options;
    let files = files(data);
    let set = how & 1 != 0 || files.len() > 1;
    let count = files.len() + usize::from(how & 2 != 0);
    let dir = Folder::new("in");
    let mut last = dir.0.clone();
    for (i, bytes) in files.iter().enumerate() {
        let name = match (set, how & 4 != 0) {
            (false, _) => "m.gguf".into(),
            (true, false) => format!("m-{:05}-of-{count:05}.gguf", i + 1),
            (true, true) => format!("m.gguf-{}-of-{count}.GGUF", i + 1),
        };
        last = dir.0.join(name);
        fs::write(&last, bytes).unwrap();
    }
    let source = if how & 8 != 0 { &dir.0 } else { &last };
    let model = match model::load(source) {
        Ok(model) => model,
        Err(error) => return drop(error.to_string()),
    };

    let view = |kind, clean, split| {
        views::build(&model, &ViewOptions { kind, clean, split }).map_err(|error| error.to_string())
    };
    for clean in [false, true] {
        if let Ok(merged) = view(Kind::Merged, clean, SplitOptions::default()) {
            same_tensors(&model, &merged);
        }
    }
    let limit = |bit: u8, value: u64| (limits & bit != 0).then_some(value);
    let split = SplitOptions {
        max_tensors: limit(1, u64::from(tensors).max(1)),
        max_size: limit(2, u64::from(size) * 16),
        max_file_size: limit(4, u64::from(file_size) * 32),
        no_tensor_first: limits & 8 != 0,
    };
    let Ok(shards) = view(Kind::Shards, false, split) else {
        return;
    };
    same_tensors(&model, &shards);
    for (_, built) in &shards.files {
        assert!(
            split
                .max_file_size
                .is_none_or(|max| built.file.len() <= max)
        );
    }

    // The shards as files are a model, and merged it is what the first was.
    let total = shards
        .files
        .iter()
        .try_fold(0u64, |n, (_, built)| n.checked_add(built.file.len()));
    if total.is_none_or(|n| n > SMALL) {
        return;
    }
    let out = Folder::new("out");
    for (name, built) in &shards.files {
        fs::write(out.0.join(name), bytes(&model, &built.file)).unwrap();
    }
    let again = model::load(&out.0).expect("the shards of a view are a set");
    let clean = ViewOptions {
        kind: Kind::Merged,
        clean: true,
        split: SplitOptions::default(),
    };
    let back = views::build(&again, &clean).expect("what was split can be merged");
    same_tensors(&again, &back);
    let merged = view(Kind::Merged, true, SplitOptions::default()).expect("it is small");
    let types = || model.headers.iter().flat_map(Header::tensors);
    let (a, b) = (&merged.files[0].1.file, &back.files[0].1.file);
    if !types().any(unknown) && a.len() <= SMALL {
        assert_eq!(bytes(&model, a), bytes(&again, b));
    }
});
