//! Any text as a list of overrides: it is refused, or what it says stands in the header that it is applied to, which is a
//! valid one.
#![no_main]

use ggufuse::gguf::{self, Header};
use ggufuse::layout::{Overlay, parse_overrides};
use libfuzzer_sys::fuzz_target;

/// A header with a key of each kind that has rules of its own.
fn header() -> Header {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let kv = |key: &str, ty: u32, value: &[u8]| [&text(key)[..], &ty.to_le_bytes(), value].concat();
    let keys = [
        kv("general.architecture", 8, &text("llama")),
        kv("general.alignment", 4, &64u32.to_le_bytes()),
        kv("a", 10, &7u64.to_le_bytes()),
        kv("b", 7, &[1]),
        kv("c", 6, &1f32.to_le_bytes()),
        kv("d", 9, &[&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &text("x")].concat()),
    ];
    let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes(), &6u64.to_le_bytes()].concat();
    bytes.extend(keys.concat());
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    gguf::parse(&bytes, bytes.len() as u64).unwrap()
}

fuzz_target!(|text: &str| {
    let Ok(changes) = parse_overrides(text) else {
        return;
    };
    assert!(!changes.is_empty());
    let mut overlay = Overlay::default();
    for (key, setting) in &changes {
        if overlay.set(key, setting.clone()).is_err() {
            return;
        }
    }
    let mut headers = [header()];
    if overlay.apply(&mut headers).is_err() {
        return;
    }
    let [after] = headers;
    let before = header();
    for (key, _) in &changes {
        assert!(after.get(key).is_some(), "a key that was set is not there");
    }
    for kv in before.kvs() {
        let now = after.get(kv.key).expect("no key goes");
        if !changes.iter().any(|(key, _)| key == kv.key) {
            assert_eq!(now.entry, kv.entry, "a key that was not named has changed");
        }
    }
    assert!(after.alignment().is_power_of_two());
});
