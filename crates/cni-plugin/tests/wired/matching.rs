//! Compares expected values, which contain the recording's placeholders, with actual values.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// Placeholder in the entries of `EXCEPTIONS` that matches any value, or the rest of a string.
pub(crate) const ANY: &str = "<any>";

/// The beginnings of error messages of Go's JSON parser, which Margay's messages need not match. If a recorded string
/// contains a message of Go's parser, only the part before this message is compared.
const OF_GOS_PARSER: [&str; 3] = ["invalid character '", "unexpected end of JSON input", "json: cannot unmarshal "];

/// One-to-one map from the numbered placeholders of a case to the strings that they stand for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bindings(BTreeMap<String, String>);

impl Bindings {
    fn bind(&mut self, placeholder: &str, text: &str) -> bool {
        match self.0.get(placeholder) {
            Some(bound) => bound == text,
            None if self.0.values().any(|other| other == text) => false,
            None => {
                self.0.insert(placeholder.to_owned(), text.to_owned());
                true
            }
        }
    }

    /// Returns the string for which a placeholder stands, if the string is known already.
    pub(crate) fn get(&self, placeholder: &str) -> Option<&str> {
        self.0.get(placeholder).map(String::as_str)
    }

    /// Replaces known strings with their placeholders, so that a reported difference is short.
    fn reported(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |reported, (placeholder, bound)| reported.replace(bound, placeholder))
    }
}

/// The path at which an expected and an actual value differ, and both values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    path: String,
    expected: String,
    came: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {}\n    - {}\n    + {}", self.path, self.expected, self.came)
    }
}

/// Returns all paths at which the actual value `came` differs from the expected value.
pub(crate) fn differences(expected: &Value, came: &Value, bindings: &mut Bindings) -> Vec<Difference> {
    let mut found = Vec::new();
    compare("", Some(expected), Some(came), bindings, &mut found);
    found
}

fn compare(
    path: &str,
    expected: Option<&Value>,
    came: Option<&Value>,
    bindings: &mut Bindings,
    found: &mut Vec<Difference>,
) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path} > {name}") };
    let same = match (expected, came) {
        (Some(Value::Object(fields)), Some(Value::Object(others))) => {
            let added = others.keys().filter(|name| !fields.contains_key(*name));
            for name in fields.keys().chain(added) {
                compare(&below(name), fields.get(name), others.get(name), bindings, found);
            }
            true
        }
        (Some(Value::Array(items)), Some(Value::Array(others))) => {
            for index in 0..items.len().max(others.len()) {
                compare(&below(&index.to_string()), items.get(index), others.get(index), bindings, found);
            }
            true
        }
        (Some(Value::String(pattern)), Some(_)) if pattern == ANY => true,
        (Some(Value::String(pattern)), Some(Value::String(text))) => matches(pattern, text, bindings),
        (expected, came) => expected == came,
    };
    if !same {
        let reported = |value: Option<&Value>| value.map_or_else(|| "nothing".to_owned(), Value::to_string);
        let came = bindings.reported(&reported(came));
        found.push(Difference { path: path.to_owned(), expected: reported(expected), came });
    }
}

/// Returns true if a string matches an expected string with placeholders.
fn matches(pattern: &str, text: &str, bindings: &mut Bindings) -> bool {
    let complaint = OF_GOS_PARSER.iter().filter_map(|begin| pattern.find(begin)).min();
    let until = complaint.unwrap_or(pattern.len());
    let Some(at) = pattern[..until].find('<') else {
        return text.starts_with(&pattern[..until]) && (complaint.is_some() || text.len() == until);
    };
    let (Some(rest), true) = (text.get(at..), text.starts_with(&pattern[..at])) else { return false };
    let Some((placeholder, after)) = pattern[at..].split_inclusive('>').next().map(|one| (one, at + one.len())) else {
        return false;
    };
    let length = match length_of(placeholder, rest) {
        Length::Literal => {
            let literal = &pattern[..=at];
            return text.starts_with(literal) && matches(&pattern[literal.len()..], &text[literal.len()..], bindings);
        }
        Length::Rest => return true,
        Length::Is(length) => length,
        Length::No => return false,
    };
    let numbered = placeholder.contains(':');
    (!numbered || bindings.bind(placeholder, &rest[..length])) && matches(&pattern[after..], &rest[length..], bindings)
}

enum Length {
    /// The expected string is plain text here: it does not start with a placeholder.
    Literal,
    /// The placeholder matches the whole rest of the string.
    Rest,
    /// The placeholder matches the first bytes of the string; the field is their number.
    Is(usize),
    /// The placeholder does not match the start of the string.
    No,
}

/// Returns the length of the start of a string that a placeholder matches.
fn length_of(placeholder: &str, text: &str) -> Length {
    let kind = placeholder.trim_matches(['<', '>']).split(':').next().unwrap_or_default();
    let run = |is: fn(char) -> bool| text.find(|letter| !is(letter)).unwrap_or(text.len());
    let shaped = |shape: &str| {
        let fits = |(shape, letter): (char, char)| match shape {
            'x' => letter.is_ascii_hexdigit(),
            '0' => letter.is_ascii_digit(),
            other => letter == other,
        };
        let is = text.len() >= shape.len() && shape.chars().zip(text.chars()).all(fits);
        if is { Length::Is(shape.len()) } else { Length::No }
    };
    match kind {
        "mac" => shaped("xx:xx:xx:xx:xx:xx"),
        "uid" => shaped("xxxxxxxx-xxxx-4xxx-xxxx-xxxxxxxxxxxx"),
        "time" => shaped("0000-00-00T00:00:00Z"),
        "ifindex" => match run(|letter| letter.is_ascii_digit()) {
            0 => Length::No,
            length => Length::Is(length),
        },
        // The kernel derives a link-local address from the hardware address, and inserts the bytes `ff:fe` in the
        // middle.
        "link-local" => match run(|letter| letter.is_ascii_hexdigit() || letter == ':') {
            length if text.starts_with("fe80::") && text[..length].contains("ff:fe") => Length::Is(length),
            _ => Length::No,
        },
        "any" | "stack" => Length::Rest,
        _ => Length::Literal,
    }
}
