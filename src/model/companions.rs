//! Projector files (`mmproj-….gguf`) and the models beside them that they belong to.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::naming::{stem, strip_gguf};

/// Whether this is the name of a projector, as llama.cpp tells them.
pub(super) fn is_projector(name: &OsStr) -> bool {
    let word = b"mmproj";
    strip_gguf(name.as_bytes()).is_some_and(|stem| {
        stem.windows(word.len())
            .any(|window| window.eq_ignore_ascii_case(word))
    })
}

/// For each projector the models (by their names, without `.gguf`) in the same directory that it belongs to: those that
/// begin with its own name, where it has one; else all, if all are one model in several quantizations.
pub(super) fn owners(projector: &OsStr, models: &[OsString]) -> Vec<usize> {
    let own = name_of(&stem(projector));
    let names: Vec<Words> = models.iter().map(|model| name_of(model)).collect();
    let named: Vec<usize> = (0..)
        .zip(&names)
        .filter(|(_, name)| !own.is_empty() && name.starts_with(&own))
        .map(|(index, _)| index)
        .collect();
    if !named.is_empty() {
        return named;
    }
    let alike = names.windows(2).all(|pair| pair.first() == pair.last());
    if alike {
        (0..models.len()).collect()
    } else {
        Vec::new()
    }
}

type Words = Vec<Vec<u8>>;

/// The words of a file's name that name the model: without `mmproj` and `model`, up to the quantization.
fn name_of(stem: &OsStr) -> Words {
    let lower = stem.as_bytes().to_ascii_lowercase();
    lower
        .split(|b| matches!(b, b'-' | b'_' | b'.' | b' '))
        .filter(|word| !matches!(*word, b"mmproj" | b"model" | b""))
        .take_while(|word| !is_quantization(word))
        .map(<[u8]>::to_vec)
        .collect()
}

/// `q4`, `iq2`, `tq1`, `f16`, `bf16`, `mxfp4` …
fn is_quantization(word: &[u8]) -> bool {
    let kinds = [
        &b"iq"[..],
        b"tq",
        b"q",
        b"bf",
        b"fp",
        b"f",
        b"mxfp",
        b"nvfp",
    ];
    let numbered = |kind: &&[u8]| {
        word.strip_prefix(*kind)
            .is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_digit))
    };
    word == b"ud" || kinds.iter().any(numbered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(projector: &str, models: &[&str]) -> Vec<usize> {
        let models: Vec<OsString> = models.iter().map(OsString::from).collect();
        owners(OsStr::new(projector), &models)
    }

    #[test]
    fn projectors_find_their_models() {
        assert!(is_projector(OsStr::new("mmproj-x-f16.gguf")));
        assert!(is_projector(OsStr::new("x.MMPROJ-Q8_0.GGUF")));
        assert!(!is_projector(OsStr::new("x.gguf")));
        assert!(!is_projector(OsStr::new("mmproj-x.gguf.part")));
        let gemma = ["gemma-3-4b-it-Q4_K_M", "gemma-3-4b-it-UD-IQ2_XXS"];
        for name in [
            "mmproj-F16.gguf",
            "mmproj-model-f16.gguf",
            "mmproj-gemma-3-4b-it-BF16.gguf",
            "mmproj-other.gguf",
        ] {
            assert_eq!(of(name, &gemma), [0, 1], "{name}");
        }
        let both = ["gemma-3-4b-it-Q4_K_M", "qwen2.5-vl-7b-Q8_0"];
        assert_eq!(of("gemma-3-4b-it-mmproj-f16.gguf", &both), [0]);
        assert_eq!(of("mmproj-Qwen2.5-VL-7B-f16.gguf", &both), [1]);
        assert!(of("mmproj-F16.gguf", &both).is_empty());
        assert!(of("mmproj-F16.gguf", &[]).is_empty());
    }
}
