//! Byte sizes: alignment, parsing, display.

/// `n` rounded up to a multiple of `to` (at least 1); `None` on overflow.
pub fn align_up(n: u64, to: u64) -> Option<u64> {
    n.checked_next_multiple_of(to)
}

/// Parses `2G`, `500MiB`, `4096`: a whole number; K, M, G, T are decimal, KiB, MiB, GiB, TiB binary. No unit: bytes.
///
/// # Errors
/// One sentence that says what a size looks like.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor: Option<u64> = match unit {
        "" | "B" => Some(1),
        "K" => Some(1000),
        "M" => Some(1_000_000),
        "G" => Some(1_000_000_000),
        "T" => Some(1_000_000_000_000),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        "TiB" => Some(1 << 40),
        _ => None,
    };
    let size = number
        .parse::<u64>()
        .ok()
        .zip(factor)
        .and_then(|(n, f)| n.checked_mul(f))
        .filter(|&n| n > 0);
    size.ok_or_else(|| format!("{text:?} is no size: a positive whole number with K, M, G, T (decimal) or KiB, MiB, GiB, TiB"))
}

/// `fat32`, or a size.
///
/// # Errors
/// As [`parse_size`].
pub fn parse_file_size(text: &str) -> Result<u64, String> {
    if text.eq_ignore_ascii_case("fat32") {
        Ok(u32::MAX.into())
    } else {
        parse_size(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("2G"), Ok(2_000_000_000));
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("7"), Ok(7));
        assert_eq!(parse_file_size("fat32"), Ok(4_294_967_295));
        for bad in [
            "",
            "G",
            "0M",
            "-1M",
            "1.5G",
            "2g",
            "99999999999999T",
            "18446744073709551616",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn aligning() {
        assert_eq!(align_up(0, 32), Some(0));
        assert_eq!(align_up(33, 32), Some(64));
        assert_eq!(align_up(u64::MAX, 32), None);
    }
}
