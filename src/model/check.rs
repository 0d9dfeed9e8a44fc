//! What the files of a model say of themselves, against their names and each other.

use std::collections::HashMap;
use std::path::Path;

use crate::gguf::Header;

/// Checks the headers of a model. `files` are all of its files by their first paths, `parsed` the places there of those
/// that could be read; the others are problems already.
pub(super) fn check(
    files: &[&Path],
    parsed: &[usize],
    headers: &[Header],
    is_set: bool,
    problems: &mut Vec<(usize, String)>,
) {
    let total: usize = headers.iter().map(|h| h.tensors().len()).sum();
    let count = files.len();
    let mut owner: HashMap<&[u8], &Path> = HashMap::new();
    for (&no, header) in parsed.iter().zip(headers) {
        let Some(&path) = files.get(no) else { continue };
        let mut bad = |why: String| problems.push((no, why));
        let int = |key: &str| header.get(key.as_bytes()).map(|kv| kv.int());
        if is_set && (count > 1 || header.get(b"split.count").is_some()) {
            // The number of tensors is known only when all shards are there.
            let all = (headers.len() == count).then_some(total);
            let wanted = [
                ("split.no", Some(no)),
                ("split.count", Some(count)),
                ("split.tensors.count", all),
            ];
            for (key, wanted) in wanted {
                match (int(key), wanted) {
                    (None, _) => bad(format!(
                        "{key} is missing, so this file was not written as a shard"
                    )),
                    (Some(None), _) => bad(format!("{key} is not an integer")),
                    (Some(Some(_)), None) => {}
                    (Some(Some(have)), Some(wanted)) if have == wanted as i128 => {}
                    (Some(Some(have)), Some(wanted)) => bad(format!(
                        "{key} is {have}, but the set's names and tensors say {wanted}"
                    )),
                }
            }
        } else if let (Some(Some(n)), Some(Some(all))) =
            (int("split.count"), int("split.tensors.count"))
        {
            // A stale split.count is harmless; a shard under another name is not the whole model.
            if n > 1 && all > total as i128 {
                bad(format!(
                    "one shard of {n} ({total} of {all} tensors) under a name that does not say so; give it back its -0000N-of-0000M.gguf name"
                ));
            }
        }
        if headers
            .first()
            .is_some_and(|first| first.version() != header.version())
        {
            bad(format!(
                "GGUF version {}, unlike the first shard",
                header.version()
            ));
        }
        for tensor in header.tensors() {
            if let Some(other) = owner.insert(&tensor.name, path) {
                bad(format!(
                    "tensor {:?} is also in {}",
                    String::from_utf8_lossy(&tensor.name),
                    other.display()
                ));
            }
        }
    }
}
