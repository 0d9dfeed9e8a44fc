//! Shard names: `model-00001-of-00003.gguf`, `model.gguf-00001-of-00200.gguf`, any number of digits.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A file name that says which shard of which set it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShardName {
    /// What stands before `-00001-of-…`; the same for all members.
    pub prefix: OsString,
    /// 1-based number.
    pub no: u32,
    /// Number of shards.
    pub count: u32,
    /// Digits of `no` and of `count`; a set does not mix them.
    pub widths: (usize, usize),
}

impl ShardName {
    /// Reads a file name. `None` for a name that is not a shard's.
    pub fn parse(name: &OsStr) -> Option<ShardName> {
        let rest = strip_gguf(name.as_bytes())?;
        let (rest, count) = trailing_number(rest)?;
        let (rest, no) = trailing_number(rest.strip_suffix(b"-of-")?)?;
        let prefix = rest.strip_suffix(b"-")?;
        let number = |digits: &[u8]| std::str::from_utf8(digits).ok()?.parse::<u32>().ok();
        let name = ShardName {
            prefix: OsString::from_vec(prefix.to_vec()),
            no: number(no)?,
            count: number(count)?,
            widths: (no.len(), count.len()),
        };
        (!prefix.is_empty() && (1..=name.count).contains(&name.no)).then_some(name)
    }

    /// The name of another member of the set.
    pub fn sibling(&self, no: u32) -> OsString {
        let mut name = self.prefix.clone();
        name.push(format!(
            "-{no:0w$}-of-{count:0v$}.gguf",
            count = self.count,
            w = self.widths.0,
            v = self.widths.1
        ));
        name
    }

    /// The model's name, without `.gguf`.
    pub fn stem(&self) -> OsString {
        stem(&self.prefix)
    }
}

/// A file name without `.gguf`, where it ends so.
pub(super) fn stem(name: &OsStr) -> OsString {
    OsString::from_vec(
        strip_gguf(name.as_bytes())
            .filter(|s| !s.is_empty())
            .unwrap_or(name.as_bytes())
            .to_vec(),
    )
}

/// The name that `llama-gguf-split` gives to shard `no` (1-based) of `count`.
pub fn shard_file_name(stem: &OsStr, no: usize, count: usize) -> OsString {
    let mut name = stem.to_owned();
    name.push(format!("-{no:05}-of-{count:05}.gguf"));
    name
}

/// The name without `.gguf` in any case.
pub(super) fn strip_gguf(name: &[u8]) -> Option<&[u8]> {
    let cut = name.len().checked_sub(5)?;
    let (rest, end) = name.split_at_checked(cut)?;
    end.eq_ignore_ascii_case(b".gguf").then_some(rest)
}

/// The digits at the end of a text, and what stands before them.
pub(super) fn trailing_number(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let digits = text.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    (digits > 0)
        .then(|| text.split_at_checked(text.len().saturating_sub(digits)))
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_in_the_wild() {
        let parse = |s: &str| ShardName::parse(OsStr::new(s));
        let name = parse("a b-00002-of-00003.gguf").unwrap();
        assert_eq!((name.no, name.count, name.stem()), (2, 3, "a b".into()));
        assert_eq!(name.sibling(1), "a b-00001-of-00003.gguf");
        assert_eq!(parse("x.gguf-00001-of-00200.gguf").unwrap().stem(), "x");
        assert_eq!(
            parse("m-1-of-12.GGUF").unwrap().sibling(12),
            "m-12-of-12.gguf"
        );
        for no in [
            "m.gguf",
            "m-00000-of-00003.gguf",
            "m-4-of-3.gguf",
            "-1-of-2.gguf",
            "m-1-of-2.bin",
            "m-of-2.gguf",
            "m-99999999999-of-2.gguf",
        ] {
            assert_eq!(parse(no), None, "{no}");
        }
        let raw = OsStr::from_bytes(b"\xff-1-of-2.gguf");
        assert_eq!(
            ShardName::parse(raw).unwrap().sibling(1).as_bytes(),
            raw.as_bytes()
        );
    }
}
