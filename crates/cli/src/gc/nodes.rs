//! A list of the existing nodes, as `kubectl` prints it or as a person writes it.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::list::List;
use crate::error::Result;
use crate::output::printable;

/// The accepted forms.
const EXPECTED: &str = "give what kubectl get nodes -o name or -o json prints, or a node's name in each line";

/// Reads a list. An empty one is refused unless it `may_be_empty`.
///
/// # Errors
/// The file cannot be read, or is no such list; the error names the place.
pub(super) fn read(path: &Path, may_be_empty: bool) -> Result<BTreeSet<String>> {
    let list = List::read(path)?;
    let nodes = parse(&list.text).map_err(|what| list.wrong(&what, EXPECTED))?;
    list.unless_empty(nodes.is_empty(), may_be_empty)?;
    Ok(nodes)
}

fn parse(text: &str) -> Result<BTreeSet<String>, String> {
    if text.trim_start().starts_with(['{', '[']) {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
        let items = match value.get("items") {
            Some(items) => items.as_array().ok_or("its items are no array")?.clone(),
            None => vec![value],
        };
        let numbered = items.iter().enumerate();
        return numbered.map(|(number, one)| named(one).ok_or_else(|| not_a_node(number + 1))).collect();
    }
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    let name = |(number, line): (usize, &str)| {
        let name = line.strip_prefix("node/").unwrap_or(line);
        let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/');
        let shown = || printable(&line.chars().take(60).collect::<String>());
        if is_name { Ok(name.to_owned()) } else { Err(format!("line {}: {:?} is no node's name", number + 1, shown())) }
    };
    lines.map(name).collect()
}

/// The name of a node, if the value is a node.
fn named(value: &Value) -> Option<String> {
    let is_node = value.get("kind").is_none_or(|kind| kind == "Node");
    let name = value.pointer("/metadata/name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.filter(|_| is_node).map(str::to_owned)
}

fn not_a_node(number: usize) -> String {
    format!("element {number} is no node")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_every_form() {
        let list = r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Node","metadata":{"name":"a"}},
            {"kind":"Node","metadata":{"name":"b.example.org"}}]}"#;
        let names = |text: &str| parse(text).unwrap().into_iter().collect::<Vec<_>>();
        assert_eq!(names(list), ["a", "b.example.org"]);
        assert_eq!(names("node/a\nnode/b\n"), ["a", "b"]);
        assert_eq!(names("\n a \r\nb"), ["a", "b"]);
        assert_eq!(names(r#"{"kind":"Node","metadata":{"name":"a"}}"#), ["a"]);
        assert!(names(r#"{"items":[]}"#).is_empty() && names("").is_empty());
    }

    #[test]
    fn a_list_that_is_no_text_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (content, words) in [
            (&b"\xef\xbb\xbfnode1\nnode2\n"[..], "it begins with a byte order mark"),
            (b"\xff\xfen\0o\0", "it begins with a byte order mark"),
            (b"\0\0\0\0", "it holds nothing but zero bytes"),
            (b"node1\n\xff\n", "it is not UTF-8"),
            (b"", "it is empty"),
        ] {
            std::fs::write(file.path(), content).unwrap();
            let error = format!("{:?}", read(file.path(), false).unwrap_err());
            assert!(error.contains(words) && error.contains("nothing was freed"), "{content:?}: {error}");
        }
        std::fs::write(file.path(), "").unwrap();
        assert!(read(file.path(), true).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_such_list_says_where() {
        for (text, words) in [
            ("NAME  STATUS\na  Ready", "line 1: \"NAME  STATUS\" is no node's name"),
            ("a\npod/b", "line 2: \"pod/b\" is no node's name"),
            (r#"{"items":[{"kind":"Pod","metadata":{"name":"a"}}]}"#, "element 1 is no node"),
            (r#"{"items":[{"id":"a"}]}"#, "element 1 is no node"),
            ("[{}", "it is no JSON"),
            (r#"{"items":1}"#, "no array"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
