//! The models of a library in folders, each under a name of its own.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::item::Item;

/// A directory of a library as it is shown.
#[derive(Debug)]
pub enum Node {
    /// Folders and models by name.
    Folder(BTreeMap<OsString, Node>),
    /// A model.
    Model(Item),
}

/// Puts models into folders. Where a folder or an earlier model has a model's name already, it gets that of its first
/// file, and a number if that is taken too.
pub fn tree(items: Vec<Item>) -> BTreeMap<OsString, Node> {
    let mut root = BTreeMap::new();
    // All folders first: their names are those of directories, and stay.
    for item in &items {
        folder(&mut root, &item.folder);
    }
    for item in items {
        let Some(folder) = folder(&mut root, &item.folder) else {
            continue;
        };
        let mut name = item.name.clone();
        if folder.contains_key(&name) {
            name = item.other_name();
        }
        let mut no = 2u64;
        while folder.contains_key(&name) {
            name = item.other_name();
            name.push(format!("~{no}"));
            no = no.saturating_add(1);
        }
        folder.insert(name, Node::Model(item));
    }
    root
}

/// The entries of a folder, which is made where it is missing.
fn folder<'a>(
    root: &'a mut BTreeMap<OsString, Node>,
    path: &[OsString],
) -> Option<&'a mut BTreeMap<OsString, Node>> {
    let mut at = root;
    for name in path {
        let node = at
            .entry(name.clone())
            .or_insert_with(|| Node::Folder(BTreeMap::new()));
        at = match node {
            Node::Folder(entries) => entries,
            Node::Model(_) => return None,
        };
    }
    Some(at)
}
