//! Writes YAML in calicoctl's layout. Object fields are in alphabetical order, list items are not indented, and strings
//! are quoted as Go's YAML library would quote them. The YAML library that this crate uses for reading quotes strings
//! differently than Go's, so this module writes YAML itself.

use serde_json::Value;

/// Formats a value as a YAML document that ends in a line break.
pub(crate) fn yaml(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(fields) if !fields.is_empty() => block(&mut text, value, 0),
        Value::Array(items) if !items.is_empty() => block(&mut text, value, 0),
        other => {
            text.push_str(&scalar(other));
            text.push('\n');
        }
    }
    text
}

/// Writes a list or an object as YAML. The first line of the YAML list or object continues the last line of `text`.
fn block(text: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                start(text, at, indent);
                text.push_str("- ");
                if is_block(item) {
                    block(text, item, indent + 2);
                } else {
                    line(text, item);
                }
            }
        }
        Value::Object(fields) => {
            let mut sorted: Vec<_> = fields.iter().collect();
            sorted.sort_by_key(|(name, _)| name.as_str());
            for (at, (name, field)) in sorted.into_iter().enumerate() {
                start(text, at, indent);
                text.push_str(&quoted(name));
                text.push(':');
                if is_block(field) {
                    // List items have the same indentation as the name of the list. The fields of an object are
                    // indented by two more columns than the object's name.
                    let indent = if field.is_array() { indent } else { indent + 2 };
                    text.push('\n');
                    text.extend(std::iter::repeat_n(' ', indent));
                    block(text, field, indent);
                } else {
                    text.push(' ');
                    line(text, field);
                }
            }
        }
        other => line(text, other),
    }
}

/// Indents a line of a YAML list or object, unless it is the first line, which continues an existing line.
fn start(text: &mut String, at: usize, indent: usize) {
    if at > 0 {
        text.extend(std::iter::repeat_n(' ', indent));
    }
}

fn line(text: &mut String, value: &Value) {
    text.push_str(&scalar(value));
    text.push('\n');
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => false,
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(on) => on.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => quoted(text),
        Value::Array(_) => "[]".to_owned(),
        Value::Object(_) => "{}".to_owned(),
    }
}

/// Formats a YAML string. The string is quoted if YAML would otherwise read it as another type.
fn quoted(text: &str) -> String {
    if text.is_empty() || is_something_else(text) || text.chars().any(|c| c.is_control() || c == '\u{feff}') {
        // YAML strings in double quotes accept all escapes of JSON, but JSON does not escape every unprintable
        // character.
        let json = Value::from(text).to_string();
        return json.chars().map(|c| if is_odd(c) { format!("\\u{:04x}", u32::from(c)) } else { c.into() }).collect();
    }
    if is_plain(text) { text.to_owned() } else { format!("'{}'", text.replace('\'', "''")) }
}

/// True for unprintable characters that JSON does not escape.
fn is_odd(c: char) -> bool {
    ('\u{7f}'..='\u{9f}').contains(&c) || c == '\u{feff}'
}

/// True for a string that needs no quotes in YAML.
fn is_plain(text: &str) -> bool {
    let mut chars = text.chars();
    let (first, second) = (chars.next().unwrap_or(' '), chars.next().unwrap_or(' '));
    let begins_well = match first {
        '-' | '?' | ':' => second != ' ',
        first => !",[]{}#&*!|>'\"%@`= ".contains(first),
    };
    begins_well && !text.ends_with([' ', ':']) && !text.contains(": ") && !text.contains(" #")
}

/// True for a string that YAML 1.1 would read as a number, a time, a boolean or null if it were not quoted.
fn is_something_else(text: &str) -> bool {
    const WORDS: [&str; 13] = ["~", "null", "y", "n", "yes", "no", "on", "off", "true", "false", "<<", "---", "..."];
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_start_matches(['+', '-']).replace('_', "");
    let of_base = |prefix: &str, base: u32| {
        digits.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_digit(base)))
    };
    WORDS.contains(&lower.as_str())
        || [".inf", ".nan"].contains(&digits.as_str())
        || digits.parse::<f64>().is_ok()
        || of_base("0x", 16)
        || of_base("0o", 8)
        || of_base("0b", 2)
        || is_sexagesimal(&digits)
        || is_date(text)
}

/// True for a string that YAML 1.1 reads as a number in base 60, such as 1:30.
fn is_sexagesimal(digits: &str) -> bool {
    let numbers = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit() || c == '.');
    digits.contains(':') && digits.split(':').all(numbers)
}

/// True for a string that starts with a date such as 2026-11-22.
fn is_date(text: &str) -> bool {
    let mut parts = text.splitn(3, '-');
    let digits = |part: Option<&str>, count: usize| {
        part.is_some_and(|part| part.len() <= count && !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    let (year, month) = (parts.next(), parts.next());
    year.is_some_and(|year| year.len() == 4)
        && digits(year, 4)
        && digits(month, 2)
        && parts.next().is_some_and(|day| day.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_looks_as_calicoctl_prints_it() {
        let pool = json!({
            "kind": "IPPool", "apiVersion": "projectcalico.org/v3",
            "metadata": {"name": "main", "creationTimestamp": "2026-11-22T03:00:00Z", "resourceVersion": "7", "labels": {}},
            "spec": {"cidr": "10.65.0.0/16", "blockSize": 26, "natOutgoing": true, "nodeSelector": "!has(gpu)",
                "allowedUses": ["Workload", "Tunnel"], "none": [], "nothing": null},
        });
        let list = json!({"kind": "IPPoolList", "items": [pool], "nested": [[1, 2], {"a": {"b": [{"c": 1, "d": 2}]}}]});
        let expected = "\
items:
- apiVersion: projectcalico.org/v3
  kind: IPPool
  metadata:
    creationTimestamp: \"2026-11-22T03:00:00Z\"
    labels: {}
    name: main
    resourceVersion: \"7\"
  spec:
    allowedUses:
    - Workload
    - Tunnel
    blockSize: 26
    cidr: 10.65.0.0/16
    natOutgoing: true
    nodeSelector: '!has(gpu)'
    none: []
    nothing: null
kind: IPPoolList
nested:
- - 1
  - 2
- a:
    b:
    - c: 1
      d: 2
";
        assert_eq!(yaml(&list), expected);
        assert_eq!((yaml(&json!([])), yaml(&json!({}))), ("[]\n".to_owned(), "{}\n".to_owned()));
    }

    #[test]
    fn yaml_is_read_back_as_written() {
        let texts = [
            "",
            " a",
            "a ",
            "a: b",
            "a #b",
            "#a",
            "a:",
            "-",
            "- a",
            "-a",
            "?",
            "yes",
            "No",
            "~",
            "null",
            "1",
            "1.5",
            "1e3",
            "0x1f",
            "0o7",
            "0b1",
            "1_000",
            "+1",
            "1:30",
            "10:20:30",
            ".inf",
            "2026-11-22",
            "2026-11-22T03:00:00Z",
            "a'b",
            "'a'",
            "\"a\"",
            "a\nb",
            "a\tb",
            "\u{1b}[2J",
            "\u{85}",
            "\u{feff}a",
            "{a}",
            "[a",
            "a]",
            "&a",
            "*a",
            "!a",
            "|",
            ">",
            "%a",
            "@a",
            "`a",
            "=",
            "<<",
            "---",
            "...",
            "fd00::",
            "fd00::1/64",
            "10.0.0.0/8",
            "all()",
            "rack == 'b'",
            "has(a) && !has(b)",
            "schön",
            "a,b",
            "a\\b",
            "0",
            "-0",
            "nan",
            "inf",
            ".5",
            "12e03",
            "1e",
        ];
        let all = Value::from(texts.to_vec());
        let written = yaml(&all);
        let read: Value = serde_saphyr::from_slice(written.as_bytes()).unwrap();
        assert_eq!(read, all, "{written}");
        let fields: serde_json::Map<String, Value> =
            texts.map(|text| (text.to_owned(), text.into())).into_iter().collect();
        let fields = Value::Object(fields);
        let read: Value = serde_saphyr::from_slice(yaml(&fields).as_bytes()).unwrap();
        assert_eq!(read, fields, "{}", yaml(&fields));
        assert!(!written.contains('\u{1b}') && !written.contains('\u{85}'));
    }
}
