//! Parsing a header with a vocabulary of 250,000 tokens, against copying its bytes: `cargo bench --bench header`.

#![allow(clippy::print_stdout, reason = "it is a program that prints")]

use std::hint::black_box;
use std::time::{Duration, Instant};

fn entry(key: &str, ty: u32, value: &[u8]) -> Vec<u8> {
    let key_len = key.len() as u64;
    [
        &key_len.to_le_bytes()[..],
        key.as_bytes(),
        &ty.to_le_bytes(),
        value,
    ]
    .concat()
}

/// 250,000 tokens of 48 bytes on average, with scores and types: some 16 MB.
fn header() -> Vec<u8> {
    const N: u64 = 250_000;
    let array =
        |ty: u32, items: Vec<u8>| [&ty.to_le_bytes()[..], &N.to_le_bytes(), &items].concat();
    let tokens = (0..N).flat_map(|i| {
        let len = 24 + i * 7919 % 49;
        [
            &len.to_le_bytes()[..],
            &vec![b'a'; usize::try_from(len).unwrap_or(0)],
        ]
        .concat()
    });
    let kvs = [
        entry("tokenizer.ggml.tokens", 9, &array(8, tokens.collect())),
        entry("tokenizer.ggml.scores", 9, &array(6, vec![0; 1_000_000])),
        entry(
            "tokenizer.ggml.token_type",
            9,
            &array(5, vec![1; 1_000_000]),
        ),
    ];
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(0u64.to_le_bytes());
    out.extend((kvs.len() as u64).to_le_bytes());
    out.extend(kvs.concat());
    out
}

fn best(mut work: impl FnMut()) -> Duration {
    let once = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..15).map(|_| once(&mut work)).min().unwrap_or_default()
}

fn main() {
    let bytes = header();
    let len = bytes.len() as u64;
    let copy = best(|| drop(black_box(black_box(&bytes).clone())));
    let mut given: Vec<_> = (0..15).map(|_| bytes.clone()).collect();
    let parse = best(|| {
        let bytes = given.pop().unwrap_or_default();
        drop(black_box(
            ggufuse::gguf::parse(bytes, len).map_err(|(error, _)| error),
        ));
    });
    let rate = |time: Duration| len as f64 / time.as_secs_f64() / f64::from(1 << 30);
    println!("header of {:.1} MB, 250,000 tokens", len as f64 / 1e6);
    println!("copy   {copy:>10.2?}  {:.2} GiB/s", rate(copy));
    println!(
        "parse  {parse:>10.2?}  {:.2} GiB/s  {:.2} of the copy's time",
        rate(parse),
        parse.as_secs_f64() / copy.as_secs_f64()
    );
}
