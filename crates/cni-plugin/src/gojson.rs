//! JSON in the way of Go's `encoding/json`, from which the texts come that runtimes see.

use std::fmt::{self, Write as _};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Number, error::Category};

/// A JSON value with the members of objects in the order of the text, repeated ones included.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a whole text. Objects and arrays may be nested 127 deep.
    ///
    /// # Errors
    /// The fault in the syntax and its place; never a part of the text, which may have secrets in it.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        if text.starts_with(b"\xef\xbb\xbf") {
            return Err("it begins with a byte order mark; save the file without one".to_owned());
        }
        serde_json::from_slice(text).map_err(|error: serde_json::Error| match error.classify() {
            Category::Eof => "unexpected end of JSON input".to_owned(),
            _ => error.to_string(),
        })
    }

    /// The name of this kind of value in Go's errors.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "bool",
            Self::Number(_) => "number",
            Self::String(_) => "string",
            Self::Array(_) => "array",
            Self::Object(_) => "object",
        }
    }

    /// The last member of that name, upper and lower case being the same, that is not null.
    pub(crate) fn member(&self, name: &str) -> Option<&Self> {
        let Self::Object(members) = self else { return None };
        let named = members.iter().filter(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Self::Null);
        named.map(|(_, value)| value).next_back()
    }

    /// The text of the last member of that name that is not null; empty if there is none.
    ///
    /// # Errors
    /// The [kind](Self::kind) of the first such member that is no text.
    pub(crate) fn text_member(&self, name: &str) -> Result<&str, &'static str> {
        let Self::Object(members) = self else { return Ok("") };
        let named = members.iter().filter(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Self::Null);
        named.map(|(_, value)| value.as_str().ok_or_else(|| value.kind())).try_fold("", |_, text| text)
    }

    /// The text, if this is a string.
    pub(crate) fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    /// The elements; a single value stands for a list of one.
    pub(crate) fn one_or_many(&self) -> &[Self] {
        if let Self::Array(elements) = self { elements } else { std::slice::from_ref(self) }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        // JSON has no way to write a number that is not finite.
        Ok(Number::from_f64(value).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Json, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = sequence.next_element()? {
            elements.push(element);
        }
        Ok(Json::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

/// The output of Go's `json.MarshalIndent` with four blanks: no newline at the end; `<`, `>`, `&` and the two line
/// separators escaped.
pub(crate) fn indented<T: Serialize>(value: &T) -> String {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b"    "));
    // Writing plain structs of strings and numbers into memory cannot fail; an empty text would be seen at once.
    if value.serialize(&mut serializer).is_err() {
        bytes.clear();
    }
    escaped(&String::from_utf8_lossy(&bytes))
}

/// The escapes that Go adds. They only ever stand inside of strings, so the text can be gone through as it is.
fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            _ => out.push(c),
        }
    }
    out
}

/// A text in double quotes as Go's `%q` prints it.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            _ if c != ' ' && (c.is_control() || c.is_whitespace()) => push_escape(&mut out, c),
            _ => out.push(c),
        }
    }
    out.push('"');
    out
}

fn push_escape(out: &mut String, c: char) {
    let code = u32::from(c);
    // Writing to a string cannot fail.
    let _ = if code < 0x80 { write!(out, "\\x{code:02x}") } else { write!(out, "\\u{code:04x}") };
}

/// Texts as Go's `%q` prints a list of them: `["a" "b"]`.
pub(crate) fn quoted_list<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    format!("[{}]", texts.into_iter().map(quoted).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_repeats_are_kept() {
        let json = Json::parse(br#"{"b":1,"A":2,"a":null,"a":"x"}"#).unwrap();
        assert_eq!(json.member("a"), Some(&Json::String("x".into())));
        assert_eq!(json.member("B"), Some(&Json::Number(1.into())));
        assert_eq!(json.member("c"), None);
        assert_eq!(json.text_member("a"), Err("number"));
        assert_eq!(json.text_member("c"), Ok(""));
        let Json::Object(members) = json else { panic!("not an object") };
        assert_eq!(members.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["b", "A", "a", "a"]);
    }

    #[test]
    fn garbage_is_an_error_that_repeats_nothing() {
        let deep = "[".repeat(1_000_000);
        let texts: [&[u8]; 8] =
            [b"", b"{", b"{}x", b"\xff", b"{\"a\":\"\xff\"}", b"nul", b"\"\\ud800\"", deep.as_bytes()];
        for text in texts {
            assert!(Json::parse(text).is_err());
        }
        assert_eq!(Json::parse(b"").unwrap_err(), "unexpected end of JSON input");
        assert!(Json::parse(b"\xef\xbb\xbf{}").unwrap_err().contains("begins with a byte order mark"));
        let error = Json::parse(br#"{"password":"hunter2""#).unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn quoted_as_go_quotes() {
        assert_eq!(quoted("a\"\\\n\u{1}\u{a0}é\u{7f}"), r#""a\"\\\n\x01\u00a0é\x7f""#);
        assert_eq!(quoted_list(["a", "b c"]), r#"["a" "b c"]"#);
    }
}
