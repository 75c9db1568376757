//! Values in annotations and configurations, as Go's libraries read them and as they print them in errors.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::gojson::{Json, quoted};

/// Go's words about a character, by those of `serde_json` about its place.
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

/// A list of texts in JSON. As in Go, null is an empty list, and an empty text within a list.
///
/// # Errors
/// Go's text for what is no JSON, or something else.
pub(crate) fn strings(text: &str) -> Result<Vec<String>, String> {
    let json: Json = serde_json::from_str(text).map_err(|error| syntax_error(text, &error))?;
    let elements = match json {
        Json::Null => Vec::new(),
        Json::Array(elements) => elements,
        other => return Err(format!("json: cannot unmarshal {} into Go value of type []string", other.kind())),
    };
    let text = |element| match element {
        Json::Null => Ok(String::new()),
        Json::String(text) => Ok(text),
        other => Err(format!("json: cannot unmarshal {} into Go value of type string", other.kind())),
    };
    elements.into_iter().map(text).collect()
}

/// Go's text for what `serde_json` found; where the two differ in what they look at first, only nearly so.
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

/// A network address with its prefix length, the other bits cleared.
///
/// # Errors
/// Go's text.
pub(crate) fn parse_cidr(text: &str) -> Result<IpNet, String> {
    let parsed = || {
        let (address, length) = text.split_once('/')?;
        // The parser takes a plus sign, too.
        let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
        let length = length.parse().ok().filter(|_| is_number)?;
        IpNet::new(address.parse().ok()?, length).ok()
    };
    parsed().map(|net| net.trunc()).ok_or_else(|| format!("invalid CIDR address: {text}"))
}

/// An address. One of IPv4 that is written as one of IPv6 is one of IPv4.
pub(crate) fn parse_ip(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(|address: IpAddr| address.to_canonical())
}

/// The bytes of a hardware address of six, eight or twenty bytes: pairs of hexadecimal digits between colons or dashes,
/// or fours between dots.
///
/// # Errors
/// Go's text.
pub(crate) fn parse_mac(text: &str) -> Result<Vec<u8>, String> {
    let group = if text.as_bytes().get(4) == Some(&b'.') { 4 } else { 2 };
    let separator = text.as_bytes().get(group).copied().filter(|byte| b":-.".contains(byte));
    let parsed = || {
        let mut bytes = Vec::new();
        for part in text.as_bytes().split(|byte| Some(*byte) == separator) {
            // The parser takes a sign, too.
            if part.len() != group || !part.iter().all(u8::is_ascii_hexdigit) {
                return None;
            }
            for pair in part.chunks(2) {
                bytes.push(u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok()?);
            }
        }
        // Dots stand between fours, the others between pairs.
        let fits = (separator == Some(b'.')) == (group == 4);
        ([6, 8, 20].contains(&bytes.len()) && fits).then_some(bytes)
    };
    parsed().ok_or_else(|| match text {
        "" => "invalid MAC address".to_owned(),
        _ => format!("address {text}: invalid MAC address"),
    })
}

/// The same value with the members of objects sorted, the last of several of the same name: what Go makes of JSON that it
/// reads into no type of its own.
pub(crate) fn untyped(json: &Json) -> Value {
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => Value::Number(number.clone()),
        Json::String(text) => Value::String(text.clone()),
        Json::Array(elements) => elements.iter().map(untyped).collect(),
        Json::Object(members) => {
            Value::Object(members.iter().map(|(name, value)| (name.clone(), untyped(value))).collect())
        }
    }
}

/// A value as Go's `%v` prints it.
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

/// A number as `%v` prints it: the fewest digits, with an exponent from a million on, or after more than
/// four zeroes.
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
    fn lists_of_texts_are_read_as_go_reads_them() {
        assert_eq!(strings(r#" ["a", null, "ü"] "#).unwrap(), ["a", "", "ü"]);
        assert!(strings("null").unwrap().is_empty());
        for (text, error) in [
            // As recorded.
            ("10.66.0.0/24", "invalid character '.' after top-level value"),
            ("IPv4", "invalid character 'I' looking for beginning of value"),
            ("x", "invalid character 'x' looking for beginning of value"),
            // As Go's documentation and source have it.
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
    fn networks_lose_the_bits_of_the_host() {
        assert_eq!(parse_cidr("1.1.1.1/24").unwrap().to_string(), "1.1.1.0/24");
        assert_eq!(parse_cidr("FD00::1/064").unwrap().to_string(), "fd00::/64");
        for text in
            ["", "x", "8.8.8.8", "8.8.8.8/", "8.8.8.8/33", "8.8.8/24", "08.8.8.8/24", "8.8.8.8/+8", "fe80::%1/64"]
        {
            assert_eq!(parse_cidr(text).unwrap_err(), format!("invalid CIDR address: {text}"));
        }
    }

    #[test]
    fn addresses_of_hardware_come_in_three_forms() {
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
    fn values_are_printed_as_go_prints_them() {
        let json = Json::parse(br#"{"b":[1,"x",null,true],"a":{"z":1.5,"a":"y","z":2}}"#).unwrap();
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
