//! Words of a command line, quoted so that a shell and `xargs` both read them back.

/// Quotes one word. `xargs` takes every character in quotes as it is; a shell expands `$`, `` ` `` and some backslashes
/// in double quotes, and nothing in single ones. So a word stands in double quotes if a shell leaves it alone there,
/// else in single quotes, its own single quotes in double ones; both join the pieces.
///
/// `None` for a word with a line break: `xargs` has no quotes for that which a shell reads as well.
pub fn quote(word: &[u8]) -> Option<Vec<u8>> {
    if word.contains(&b'\n') || word.contains(&0) {
        return None;
    }
    if is_literal_in_double_quotes(word) {
        return Some([b"\"", word, b"\""].concat());
    }
    let mut out = Vec::with_capacity(word.len() + 2);
    for (i, piece) in word.split(|&b| b == b'\'').enumerate() {
        if i > 0 {
            out.extend(b"\"'\"");
        }
        if !piece.is_empty() {
            out.push(b'\'');
            out.extend(piece);
            out.push(b'\'');
        }
    }
    Some(out)
}

/// Whether a shell changes nothing of it: no expansion, no history, and no backslash before what it would escape.
fn is_literal_in_double_quotes(word: &[u8]) -> bool {
    let special = |b: u8| b"\"$`!".contains(&b);
    let next = word.iter().skip(1).map(Some).chain([None]);
    word.iter().zip(next).all(|(&b, next)| {
        let escapes = next.is_none_or(|&n| n == b'\\' || special(n));
        let expands = b == b'\\' && escapes;
        !special(b) && !expands
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes() {
        let quoted = |word: &str| quote(word.as_bytes()).map(|q| String::from_utf8(q).unwrap());
        assert_eq!(quoted("/a b").as_deref(), Some(r#""/a b""#));
        assert_eq!(quoted(r"blk\.1\.x").as_deref(), Some(r#""blk\.1\.x""#));
        assert_eq!(quoted("").as_deref(), Some(r#""""#));
        assert_eq!(quoted("$a").as_deref(), Some("'$a'"));
        assert_eq!(quoted(r"a\").as_deref(), Some(r"'a\'"));
        assert_eq!(
            quoted(r#"it's "it""#).as_deref(),
            Some(r#"'it'"'"'s "it"'"#)
        );
        assert_eq!(quoted("'$'").as_deref(), Some(r#""'"'$'"'""#));
        assert_eq!(quoted("a\nb"), None);
    }
}
