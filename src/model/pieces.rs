//! Names of raw pieces of one file: `x.gguf.part1of3`, `x.gguf.part00`, `x.gguf-split-a`, `x.gguf.a`, `x.gguf.001`,
//! `x-chunk-001-of-018.gguf`, and what `split` makes of `x.gguf.` and `x.gguf.part`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::naming::{strip_gguf, trailing_number};

/// More pieces than this, no name can claim.
const MAX_PIECES: u32 = 65_535;

/// A file name that says which piece of which file it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceName {
    /// The name of the whole file.
    pub whole: OsString,
    /// 0-based for letters; digits as they are.
    pub no: u32,
    /// What all pieces have in common.
    pub series: Series,
    /// Characters of the number.
    width: usize,
}

/// What the names of all pieces of a file have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Series {
    before: Vec<u8>,
    after: Vec<u8>,
    /// Numbered by this many letters; 0: by digits.
    letters: usize,
    /// How many there are, where the names say so.
    pub count: Option<u32>,
    /// The names alone do not tell: `x.gguf.md` is no piece, unless there is `x.gguf.aa`.
    pub needs_first: bool,
}

impl Series {
    /// Whether letters number the pieces, and not digits.
    pub(super) fn is_lettered(&self) -> bool {
        self.letters > 0
    }
}

impl PieceName {
    /// Reads a file name. `None` for a name that is not a piece's.
    pub fn parse(name: &OsStr) -> Option<PieceName> {
        let name = name.as_bytes();
        match strip_gguf(name) {
            Some(stem) => chunk(stem, name),
            None => after_gguf(name),
        }
    }

    /// The name of another piece.
    pub fn sibling(&self, no: u32) -> OsString {
        let mut name = self.series.before.clone();
        if self.series.letters == 0 {
            name.extend(format!("{no:0w$}", w = self.width).bytes());
        } else {
            let mut letters = Vec::new();
            let mut rest = no;
            for _ in 0..self.series.letters {
                letters.push(u8::try_from(rest % 26).map_or(b'a', |r| b'a'.saturating_add(r)));
                rest /= 26;
            }
            name.extend(letters.iter().rev());
        }
        name.extend_from_slice(&self.series.after);
        OsString::from_vec(name)
    }
}

/// `x-chunk-001-of-018.gguf`.
fn chunk(stem: &[u8], name: &[u8]) -> Option<PieceName> {
    let (rest, count) = trailing_number(stem)?;
    let (before, no) = trailing_number(rest.strip_suffix(b"-of-")?)?;
    let whole = before.strip_suffix(b"-chunk-")?;
    let end = before.len().checked_add(no.len())?;
    let mut file = whole.to_vec();
    file.extend_from_slice(b".gguf");
    let count = number(count)?;
    (!whole.is_empty()).then_some(PieceName {
        whole: OsString::from_vec(file),
        no: number(no)?,
        series: Series {
            before: before.to_vec(),
            after: name.get(end..)?.to_vec(),
            letters: 0,
            count: Some(count),
            needs_first: false,
        },
        width: no.len(),
    })
}

/// `x.gguf`, and then what says which piece it is.
fn after_gguf(name: &[u8]) -> Option<PieceName> {
    let end = name
        .windows(5)
        .rposition(|window| window.eq_ignore_ascii_case(b".gguf"))
        .filter(|&at| at > 0)?
        .checked_add(5)?;
    let (whole, tail) = name.split_at_checked(end)?;
    let (&separator, rest) = tail.split_first().filter(|(s, _)| is_separator(**s))?;
    let word = [&b"part"[..], b"split", b"chunk", b"piece"]
        .into_iter()
        .find(|word| {
            rest.get(..word.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(word))
        })
        .map_or(0, <[u8]>::len);
    let after_word = rest.get(word..)?;
    let gap = usize::from(word > 0 && after_word.first().is_some_and(|&b| is_separator(b)));
    let index = after_word.get(gap..)?;
    let before = name.len().checked_sub(index.len())?;
    let digits = index.iter().take_while(|b| b.is_ascii_digit()).count();
    let mut series = Series {
        before: name.get(..before)?.to_vec(),
        after: index.get(digits..)?.to_vec(),
        letters: 0,
        count: None,
        needs_first: false,
    };
    if digits > 0 {
        if !series.after.is_empty() {
            series.count = Some(count_of(&series.after)?);
        } else if word == 0 && separator != b'.' {
            return None;
        }
        return Some(PieceName {
            whole: OsString::from_vec(whole.to_vec()),
            no: number(index.get(..digits)?)?,
            series,
            width: digits,
        });
    }
    // `part` and two letters is what `split` writes, but `partial` is a download that goes on.
    let letters = index.len();
    let (fits, sure) = match (word > 0, gap > 0) {
        (true, true) => ((1..=3).contains(&letters), true),
        (true, false) => (letters == 2, false),
        (false, _) => (
            (1..=3).contains(&letters) && separator == b'.',
            letters == 1,
        ),
    };
    if !fits || !index.iter().all(u8::is_ascii_lowercase) {
        return None;
    }
    series.after = Vec::new();
    series.letters = letters;
    series.needs_first = !sure;
    let place = |b: &u8| u32::from(b.saturating_sub(b'a'));
    Some(PieceName {
        whole: OsString::from_vec(whole.to_vec()),
        no: index.iter().fold(0, |no: u32, b| {
            no.saturating_mul(26).saturating_add(place(b))
        }),
        series,
        width: letters,
    })
}

/// `of3`, `-of-3`, `_of_3`.
fn count_of(text: &[u8]) -> Option<u32> {
    let strip =
        |text: &'_ [u8]| -> usize { usize::from(text.first().is_some_and(|&b| is_separator(b))) };
    let of = text.get(strip(text)..)?.strip_prefix(b"of")?;
    number(of.get(strip(of)..)?)
}

fn is_separator(b: u8) -> bool {
    matches!(b, b'.' | b'-' | b'_')
}

fn number(digits: &[u8]) -> Option<u32> {
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let number = all_digits.then(|| std::str::from_utf8(digits).ok()?.parse::<u32>().ok())??;
    (number <= MAX_PIECES).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<PieceName> {
        PieceName::parse(OsStr::new(name))
    }

    #[test]
    fn names_as_in_the_wild() {
        for (name, whole, no, next) in [
            ("x.gguf.part1of3", "x.gguf", 1, "x.gguf.part2of3"),
            ("x.Q8.GGUF.part1of3", "x.Q8.GGUF", 1, "x.Q8.GGUF.part2of3"),
            ("x.gguf.part00", "x.gguf", 0, "x.gguf.part01"),
            ("x.gguf.part09", "x.gguf", 9, "x.gguf.part10"),
            ("x.gguf.part-00", "x.gguf", 0, "x.gguf.part-01"),
            ("x.gguf.partab", "x.gguf", 1, "x.gguf.partac"),
            ("x.gguf-split-a", "x.gguf", 0, "x.gguf-split-b"),
            ("x.gguf-split-aa", "x.gguf", 0, "x.gguf-split-ab"),
            ("x.gguf.a", "x.gguf", 0, "x.gguf.b"),
            ("x.gguf.az", "x.gguf", 25, "x.gguf.ba"),
            ("x.gguf.001", "x.gguf", 1, "x.gguf.002"),
            (
                "x.gguf-00001-of-00003",
                "x.gguf",
                1,
                "x.gguf-00002-of-00003",
            ),
            (
                "x-chunk-001-of-018.gguf",
                "x.gguf",
                1,
                "x-chunk-002-of-018.gguf",
            ),
            (
                "x-00001-of-00002.gguf.part1of2",
                "x-00001-of-00002.gguf",
                1,
                "x-00001-of-00002.gguf.part2of2",
            ),
        ] {
            let piece = parse(name).unwrap_or_else(|| panic!("{name} is a piece"));
            assert_eq!(
                (piece.whole.to_str().unwrap(), piece.no),
                (whole, no),
                "{name}"
            );
            assert_eq!(piece.sibling(no), name);
            assert_eq!(piece.sibling(no + 1), next);
            assert_eq!(parse(next).unwrap().series, piece.series, "{name}");
        }
        assert_eq!(parse("x.gguf.part1of3").unwrap().series.count, Some(3));
        let raw = OsStr::from_bytes(b"\xff.gguf.part1of2");
        assert_eq!(
            PieceName::parse(raw).unwrap().whole.as_bytes(),
            b"\xff.gguf"
        );
    }

    #[test]
    fn other_names() {
        for name in [
            "x.gguf",
            ".gguf.001",
            "x.gguf.part",
            "x.gguf.partial",
            "x.gguf.incomplete",
            "x.gguf.downloadInProgress",
            "x.gguf.aria2",
            "x.gguf.json",
            "x.gguf-1",
            "x.gguf.part1of",
            "x.gguf.part1of70000",
            "x.gguf.99999999999",
            "x.ggufa",
            "x-00001-of-00002.gguf",
            "-chunk-1-of-2.gguf",
            "x.bin.001",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
        for name in ["x.gguf.md", "x.gguf.txt", "x.gguf.bak", "x.gguf.partab"] {
            assert!(
                parse(name).is_none_or(|piece| piece.series.needs_first),
                "{name}"
            );
        }
        assert!(!parse("x.gguf.b").unwrap().series.needs_first);
    }
}
