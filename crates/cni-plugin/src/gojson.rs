//! Reads and prints JSON as Go's `encoding/json` does, for every text that a container runtime may see. Parses values
//! in annotations and configurations, and formats values in error messages, as Go's libraries do.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

use ipnet::IpNet;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::Serialize;
use serde_json::error::Category;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Number, Value};

/// A JSON value. A JSON object keeps the order of its fields, and keeps repeated fields.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum GoJson {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    Array(Vec<GoJson>),
    Object(Vec<(String, GoJson)>),
}

impl GoJson {
    /// Parses a complete JSON document. Objects and arrays in the document may be nested at most 127 levels deep.
    ///
    /// # Errors
    /// A description of the JSON syntax error, with its position. The description of the syntax error contains no part
    /// of the JSON text, which may contain secrets.
    pub(crate) fn parse(text: &[u8]) -> Result<Self, String> {
        if text.starts_with(b"\xef\xbb\xbf") {
            return Err("it begins with a byte order mark; save the file without one".to_owned());
        }
        serde_json::from_slice(text).map_err(|error: serde_json::Error| match error.classify() {
            Category::Eof => "unexpected end of JSON input".to_owned(),
            _ => error.to_string(),
        })
    }

    /// Returns the name that Go's error messages use for this kind of JSON value.
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

    /// Returns the last non-null field of a JSON object that has this name. The field names of JSON objects are
    /// compared case-insensitively.
    pub(crate) fn member(&self, name: &str) -> Option<&Self> {
        let Self::Object(members) = self else { return None };
        let named = members.iter().filter(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Self::Null);
        named.map(|(_, value)| value).next_back()
    }

    /// Returns the string in an object's last non-null field with this name, or an empty string if there is no such
    /// field.
    ///
    /// # Errors
    /// The [kind](Self::kind) of the first field with this name that is neither null nor a string.
    pub(crate) fn text_member(&self, name: &str) -> Result<&str, &'static str> {
        let Self::Object(members) = self else { return Ok("") };
        let named = members.iter().filter(|(key, value)| key.eq_ignore_ascii_case(name) && *value != Self::Null);
        named.map(|(_, value)| value.as_str().ok_or_else(|| value.kind())).try_fold("", |_, text| text)
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    /// Returns the elements of a JSON array, or any other JSON value as the only element.
    pub(crate) fn one_or_many(&self) -> &[Self] {
        if let Self::Array(elements) = self { elements } else { std::slice::from_ref(self) }
    }
}

impl<'de> Deserialize<'de> for GoJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = GoJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<GoJson, E> {
        Ok(GoJson::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<GoJson, E> {
        Ok(GoJson::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<GoJson, E> {
        Ok(GoJson::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<GoJson, E> {
        Ok(GoJson::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<GoJson, E> {
        // JSON has no notation for infinity and NaN, so these numbers become null.
        Ok(Number::from_f64(value).map_or(GoJson::Null, GoJson::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<GoJson, E> {
        Ok(GoJson::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<GoJson, E> {
        Ok(GoJson::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<GoJson, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = sequence.next_element()? {
            elements.push(element);
        }
        Ok(GoJson::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<GoJson, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(GoJson::Object(members))
    }
}

/// Renders a value as JSON without a final newline, like Go's `json.MarshalIndent` with an indent of four spaces. The
/// characters `<`, `>`, `&`, U+2028 and U+2029 are escaped, as in Go.
pub(crate) fn indented<T: Serialize>(value: &T) -> String {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, PrettyFormatter::with_indent(b"    "));
    // Serializing a plain struct into memory cannot fail. If it did, the output would be empty and the tests would
    // fail.
    if value.serialize(&mut serializer).is_err() {
        bytes.clear();
    }
    escaped(&String::from_utf8_lossy(&bytes))
}

/// Escapes the characters that Go escapes in JSON. `<`, `>`, `&`, U+2028 and U+2029 occur in JSON only inside strings,
/// so the text can be escaped without parsing it.
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

/// Quotes a string like Go's format verb `%q`.
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
    // Writing to a `String` cannot fail.
    let _ = if code < 0x80 { write!(out, "\\x{code:02x}") } else { write!(out, "\\u{code:04x}") };
}

/// Formats a list of strings like `["a" "b"]`, as Go's format verb `%q` does.
pub(crate) fn quoted_list<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    format!("[{}]", texts.into_iter().map(quoted).collect::<Vec<_>>().join(" "))
}

/// Maps the start of a `serde_json` message to the words that Go prints after the invalid character.
const SYNTAX_ERRORS: [(&str, &str); 10] = [
    ("trailing characters", "after top-level value"),
    ("expected value", "looking for beginning of value"),
    ("trailing comma", "looking for beginning of value"),
    ("expected `,` or `]`", "after array element"),
    ("expected `,` or `}`", "after object key:value pair"),
    ("expected `:`", "after object key"),
    ("key must be a string", "looking for beginning of object key string"),
    ("invalid number", "in numeric literal"),
    ("invalid escape", "in string escape code"),
    ("control character", "in string literal"),
];

/// Parses a JSON array of strings. As in Go, null counts as an empty array, and a null element as an empty string.
///
/// # Errors
/// Go's error message if the text is not JSON, or not an array of strings.
pub(crate) fn strings(text: &str) -> Result<Vec<String>, String> {
    let json: GoJson = serde_json::from_str(text).map_err(|error| syntax_error(text, &error))?;
    let elements = match json {
        GoJson::Null => Vec::new(),
        GoJson::Array(elements) => elements,
        other => return Err(format!("json: cannot unmarshal {} into Go value of type []string", other.kind())),
    };
    let text = |element| match element {
        GoJson::Null => Ok(String::new()),
        GoJson::String(text) => Ok(text),
        other => Err(format!("json: cannot unmarshal {} into Go value of type string", other.kind())),
    };
    elements.into_iter().map(text).collect()
}

/// Translates a syntax error of `serde_json` to Go's error message. If the text has several errors, the message can
/// differ from Go's, because `serde_json` and Go may report different ones.
fn syntax_error(text: &str, error: &serde_json::Error) -> String {
    if error.is_eof() {
        return "unexpected end of JSON input".to_owned();
    }
    let said = error.to_string();
    let line = text.split('\n').nth(error.line().saturating_sub(1)).unwrap_or_default();
    let found = error.column().checked_sub(1).and_then(|column| line.as_bytes().get(column));
    let place = SYNTAX_ERRORS.iter().find(|(ours, _)| said.starts_with(ours)).map(|(_, place)| place);
    match (found, place) {
        (Some(b'"'), Some(place)) => format!("invalid character '\"' {place}"),
        (Some(b'\''), Some(place)) => format!(r"invalid character '\'' {place}"),
        (Some(&byte), Some(place)) => {
            let shown = quoted(&char::from(byte).to_string());
            format!("invalid character '{}' {place}", shown.trim_matches('"'))
        }
        _ => said,
    }
}

/// Parses a network in CIDR notation, and clears the host bits of its address.
///
/// # Errors
/// Go's error message for a malformed network in CIDR notation.
pub(crate) fn parse_cidr(text: &str) -> Result<IpNet, String> {
    let parsed = || {
        let (address, length) = text.split_once('/')?;
        // Rust's integer parser would accept a plus sign before the prefix length.
        let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
        let length = length.parse().ok().filter(|_| is_number)?;
        IpNet::new(address.parse().ok()?, length).ok()
    };
    parsed().map(|net| net.trunc()).ok_or_else(|| format!("invalid CIDR address: {text}"))
}

/// Parses an IP address, where an IPv4-mapped IPv6 address (`::ffff:a.b.c.d`) becomes the IPv4 address.
pub(crate) fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(|address: IpAddr| address.to_canonical())
}

/// Parses a hardware address of 6, 8 or 20 bytes. A hardware address is written as pairs of hexadecimal digits
/// separated by colons or dashes, or as groups of four hexadecimal digits separated by dots.
///
/// # Errors
/// Go's error message for a malformed hardware address.
pub(crate) fn parse_mac(text: &str) -> Result<Vec<u8>, String> {
    let group = if text.as_bytes().get(4) == Some(&b'.') { 4 } else { 2 };
    let separator = text.as_bytes().get(group).copied().filter(|byte| b":-.".contains(byte));
    let parsed = || {
        let mut bytes = Vec::new();
        for part in text.as_bytes().split(|byte| Some(*byte) == separator) {
            // Rust's integer parser would accept a plus sign before the hexadecimal digits.
            if part.len() != group || !part.iter().all(u8::is_ascii_hexdigit) {
                return None;
            }
            for pair in part.chunks(2) {
                bytes.push(u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?);
            }
        }
        // In a hardware address, dots separate groups of four hexadecimal digits; colons and dashes separate pairs.
        let fits = (separator == Some(b'.')) == (group == 4);
        ([6, 8, 20].contains(&bytes.len()) && fits).then_some(bytes)
    };
    parsed().ok_or_else(|| match text {
        "" => "invalid MAC address".to_owned(),
        _ => format!("address {text}: invalid MAC address"),
    })
}

/// Converts a JSON value to the value that Go's `encoding/json` would store in an `interface{}`. Object fields are
/// sorted by name, and of several fields with one name only the last is kept.
pub(crate) fn untyped(json: &GoJson) -> Value {
    match json {
        GoJson::Null => Value::Null,
        GoJson::Bool(value) => Value::Bool(*value),
        GoJson::Number(number) => Value::Number(number.clone()),
        GoJson::String(text) => Value::String(text.clone()),
        GoJson::Array(elements) => elements.iter().map(untyped).collect(),
        GoJson::Object(members) => {
            Value::Object(members.iter().map(|(name, value)| (name.clone(), untyped(value))).collect())
        }
    }
}

/// Formats a JSON value like Go's format verb `%v`.
pub(crate) fn printed(value: &Value) -> String {
    let joined = |parts: Vec<String>| parts.join(" ");
    match value {
        Value::Null => "<nil>".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.as_f64().map(float).unwrap_or_default(),
        Value::String(text) => text.clone(),
        Value::Array(elements) => format!("[{}]", joined(elements.iter().map(printed).collect())),
        Value::Object(members) => format!("map[{}]", joined(members_printed(members))),
    }
}

fn members_printed(members: &Map<String, Value>) -> Vec<String> {
    let mut printed: Vec<_> = members.iter().map(|(name, value)| format!("{name}:{}", printed(value))).collect();
    printed.sort();
    printed
}

/// Formats a floating-point number like Go's format verb `%v`, with as few digits as possible. The formatted number has
/// an exponent if it is at least one million or below one ten-thousandth.
fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let parts = scientific.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?)));
    match parts {
        Some((digits, power)) if !(-4..6).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.abs())
        }
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_order_and_repeats() {
        let json = GoJson::parse(br#"{"b":1,"A":2,"a":null,"a":"x"}"#).unwrap();
        assert_eq!(json.member("a"), Some(&GoJson::String("x".into())));
        assert_eq!(json.member("B"), Some(&GoJson::Number(1.into())));
        assert_eq!(json.member("c"), None);
        assert_eq!(json.text_member("a"), Err("number"));
        assert_eq!(json.text_member("c"), Ok(""));
        let GoJson::Object(members) = json else { panic!("not an object") };
        assert_eq!(members.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["b", "A", "a", "a"]);
    }

    #[test]
    fn json_error_repeats_nothing_of_garbage() {
        let deep = "[".repeat(1_000_000);
        let texts: [&[u8]; 8] =
            [b"", b"{", b"{}x", b"\xff", b"{\"a\":\"\xff\"}", b"nul", b"\"\\ud800\"", deep.as_bytes()];
        for text in texts {
            assert!(GoJson::parse(text).is_err());
        }
        assert_eq!(GoJson::parse(b"").unwrap_err(), "unexpected end of JSON input");
        assert!(GoJson::parse(b"\xef\xbb\xbf{}").unwrap_err().contains("begins with a byte order mark"));
        let error = GoJson::parse(br#"{"password":"hunter2""#).unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn json_text_is_quoted_as_go_does() {
        assert_eq!(quoted("a\"\\\n\u{1}\u{a0}é\u{7f}"), r#""a\"\\\n\x01\u00a0é\x7f""#);
        assert_eq!(quoted_list(["a", "b c"]), r#"["a" "b c"]"#);
    }

    #[test]
    fn json_text_lists_are_read_as_go_does() {
        assert_eq!(strings(r#" ["a", null, "ü"] "#).unwrap(), ["a", "", "ü"]);
        assert!(strings("null").unwrap().is_empty());
        for (text, error) in [
            // Error messages that were recorded from runs of Calico's plugin.
            ("10.66.0.0/24", "invalid character '.' after top-level value"),
            ("IPv4", "invalid character 'I' looking for beginning of value"),
            ("x", "invalid character 'x' looking for beginning of value"),
            // Error messages from the documentation and source of Go.
            ("", "unexpected end of JSON input"),
            (r#"["a""#, "unexpected end of JSON input"),
            (r#"["a" "b"]"#, "invalid character '\"' after array element"),
            (r#"["a",]"#, "invalid character ']' looking for beginning of value"),
            (r"['a']", r"invalid character '\'' looking for beginning of value"),
            (r#"["a"] x"#, "invalid character 'x' after top-level value"),
            ("[\n é]", "invalid character 'Ã' looking for beginning of value"),
            (r#"["\x"]"#, "invalid character 'x' in string escape code"),
            (r#""a""#, "json: cannot unmarshal string into Go value of type []string"),
            ("{}", "json: cannot unmarshal object into Go value of type []string"),
            (r#"["a",5]"#, "json: cannot unmarshal number into Go value of type string"),
            (r#"[["a"]]"#, "json: cannot unmarshal array into Go value of type string"),
        ] {
            assert_eq!(strings(text).unwrap_err(), error, "{text}");
        }
        assert!(strings(&"[".repeat(1_000_000)).is_err());
    }

    #[test]
    fn json_networks_lose_host_bits() {
        assert_eq!(parse_cidr("1.1.1.1/24").unwrap().to_string(), "1.1.1.0/24");
        assert_eq!(parse_cidr("FD00::1/064").unwrap().to_string(), "fd00::/64");
        for text in
            ["", "x", "8.8.8.8", "8.8.8.8/", "8.8.8.8/33", "8.8.8/24", "08.8.8.8/24", "8.8.8.8/+8", "fe80::%1/64"]
        {
            assert_eq!(parse_cidr(text).unwrap_err(), format!("invalid CIDR address: {text}"));
        }
    }

    #[test]
    fn json_hardware_addresses_come_in_three_forms() {
        let six = [0xca, 0xfe, 0xca, 0xfe, 0x0a, 0xfe];
        for text in ["ca:fe:ca:fe:0a:fe", "CA-FE-ca-fe-0a-fe", "cafe.cafe.0afe"] {
            assert_eq!(parse_mac(text).unwrap(), six, "{text}");
        }
        assert_eq!(parse_mac("00:11:22:33:44:55:66:77").unwrap(), [0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77]);
        assert_eq!(parse_mac(&"00:".repeat(20)[..59]).unwrap().len(), 20);
        assert_eq!(parse_mac("").unwrap_err(), "invalid MAC address");
        let long = "00:".repeat(7);
        for text in [
            "invalid MAC address",
            "ca:fe:ca:fe:ca",
            "ca:fe-ca:fe:ca:fe",
            "ca.fe.ca.fe.ca.fe",
            "cafe:cafe:cafe",
            "cafecafecafe",
            "a:fe:ca:fe:ca:fee",
            "+a:fe:ca:fe:ca:fe",
            "ca:fe:ca:fe:ca:fe:",
            "ca:fe:ca:fe:ca:fé",
            &long[..20],
        ] {
            assert_eq!(parse_mac(text).unwrap_err(), format!("address {text}: invalid MAC address"));
        }
    }

    #[test]
    fn json_values_are_printed_as_go_does() {
        let json = GoJson::parse(br#"{"b":[1,"x",null,true],"a":{"z":1.5,"a":"y","z":2}}"#).unwrap();
        assert_eq!(printed(&untyped(&json)), "map[a:map[a:y z:2] b:[1 x <nil> true]]");
        for (number, text) in [
            ("5", "5"),
            ("-0.25", "-0.25"),
            ("1e300", "1e+300"),
            ("0.00001", "1e-05"),
            ("1234567", "1.234567e+06"),
            ("123456", "123456"),
        ] {
            assert_eq!(printed(&serde_json::from_str(number).unwrap()), text);
        }
    }
}
