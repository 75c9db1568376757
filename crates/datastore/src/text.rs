//! The fault of a file that should be a text.

use std::fmt;

/// The fault of a file that should be a text. Its `Display` is a sentence about the file: `it is empty`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TextFault {
    /// It has nothing but white space.
    Empty,
    /// It has nothing but zero bytes, as after a power cut.
    ZeroBytes,
    /// It begins with the byte order mark of UTF-8 or of UTF-16.
    ByteOrderMark,
    /// It is compressed.
    Gzip,
    /// It is not UTF-8.
    NotUtf8,
}

impl fmt::Display for TextFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "it is empty",
            Self::ZeroBytes => "it holds nothing but zero bytes",
            Self::ByteOrderMark => "it begins with a byte order mark",
            Self::Gzip => "it is compressed with gzip",
            Self::NotUtf8 => "it is not UTF-8",
        })
    }
}

/// Returns the fault of the bytes of a file; `None` for a text in UTF-8. For a file that a parser refuses: the
/// parser's own error would be about the first byte.
pub fn text_fault(content: &[u8]) -> Option<TextFault> {
    const BYTE_ORDER_MARKS: [&[u8]; 3] = [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"];
    const GZIP: &[u8] = b"\x1f\x8b";
    if content.trim_ascii().is_empty() {
        Some(TextFault::Empty)
    } else if content.iter().all(|byte| *byte == 0) {
        Some(TextFault::ZeroBytes)
    } else if BYTE_ORDER_MARKS.iter().any(|mark| content.starts_with(mark)) {
        Some(TextFault::ByteOrderMark)
    } else if content.starts_with(GZIP) {
        Some(TextFault::Gzip)
    } else if str::from_utf8(content).is_err() {
        Some(TextFault::NotUtf8)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_no_fault() {
        for (content, fault) in [
            (&b""[..], TextFault::Empty),
            (b" \r\n", TextFault::Empty),
            (b"\0\0\0", TextFault::ZeroBytes),
            (b"\xef\xbb\xbf{}", TextFault::ByteOrderMark),
            (b"\xff\xfe{\0}\0", TextFault::ByteOrderMark),
            (b"\xfe\xff\0{\0}", TextFault::ByteOrderMark),
            (b"\x1f\x8b\x08\x00", TextFault::Gzip),
            (b"{\"\xff\"}", TextFault::NotUtf8),
        ] {
            assert_eq!(text_fault(content), Some(fault), "{content:?}");
        }
        assert_eq!(text_fault("{\"\u{e9}\":\"\u{feff}\"}".as_bytes()), None);
    }
}
