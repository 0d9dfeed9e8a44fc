//! Any bytes as the head of a file: `gguf::parse` and `gguf::read` refuse them, or what they return holds.
#![no_main]

use ggufuse::gguf::{self, Header, Problem};
use libfuzzer_sys::fuzz_target;

fn same(a: &Header, b: &Header) -> bool {
    let kvs = |h: &Header| h.kvs().map(|kv| kv.entry.to_vec()).collect::<Vec<_>>();
    a.version() == b.version()
        && a.alignment() == b.alignment()
        && a.data_offset() == b.data_offset()
        && a.tensors() == b.tensors()
        && kvs(a) == kvs(b)
}

fn holds(header: &Header, file_len: u64) {
    assert!(header.alignment().is_power_of_two());
    assert_eq!(header.data_offset() % header.alignment(), 0);
    let mut at = 24;
    for kv in header.kvs() {
        assert_eq!(kv.offset, Some(at));
        at += kv.entry.len() as u64;
        assert!(kv.entry.starts_with(&(kv.key.len() as u64).to_le_bytes()));
        assert!(kv.entry.ends_with(kv.value));
        let _ = (kv.int(), kv.str_bytes(), kv.array());
        assert_eq!(header.get(kv.key).map(|kv| kv.offset), Some(kv.offset));
    }
    let mut spans = Vec::new();
    for tensor in header.tensors() {
        if tensor.len > 0 {
            let end = tensor.offset.checked_add(tensor.len).unwrap();
            assert!(tensor.offset >= header.data_offset() && end <= file_len);
            spans.push((tensor.offset, end));
        }
    }
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
}

fuzz_target!(|data: &[u8]| {
    let len = data.len() as u64;
    let whole = gguf::parse(data.to_vec(), len);
    let read = gguf::read(len, |buf, at| {
        buf.copy_from_slice(&data[at as usize..at as usize + buf.len()]);
        Ok::<(), gguf::Error>(())
    });
    match (&whole, &read) {
        (Ok(a), Ok(b)) => {
            assert!(same(a, b));
            holds(a, len);
        }
        (Err((a, bytes)), Err(b)) => {
            assert_eq!(a, b);
            assert_eq!(bytes, data);
            let _ = a.to_string();
        }
        _ => panic!("parse and read differ: {whole:?} {read:?}"),
    }
    // The head of a longer file.
    for file_len in [len + 1, len + (1 << 20), 1 << 62, u64::MAX] {
        match gguf::parse(data.to_vec(), file_len) {
            Ok(header) => holds(&header, file_len),
            Err((error, bytes)) => {
                assert_eq!(bytes, data);
                let _ = error.to_string();
            }
        }
    }
    // Half of it says that it goes on, or says what the whole says.
    match gguf::parse(data[..data.len() / 2].to_vec(), len) {
        Ok(half) => assert!(whole.is_ok_and(|whole| same(&half, &whole))),
        Err((error, _)) => {
            if !matches!(error.problem, Problem::Truncated { .. } | Problem::Magic(_)) {
                assert_eq!(whole.unwrap_err().0, error);
            }
        }
    }
});
